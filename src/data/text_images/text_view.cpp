#include "data/text_images/text_view.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <opencv2/imgproc.hpp>

#include "core/log.h"
#include "data/text_images/drawn/grounds.h"
#include "data/text_images/opencv.h"
#include "data/text_images/text_images.h"

namespace weft {
namespace {

constexpr double most_turn = 10, least_scale = 0.5, most_scale = 3, least_crop = 0.1;

cv::Mat matrix(TextImage& image) {
  return {static_cast<int>(image.size.height), static_cast<int>(image.size.width), CV_8UC3,
          image.rgb.data()};
}
cv::Mat matrix(const TextImage& image) { return matrix(const_cast<TextImage&>(image)); }

// A black square.
cv::Mat square(std::int64_t side, TextImage& out) {
  out.size = {side, side};
  out.rgb.assign(side * side * 3, 0);
  return matrix(out);
}

// Size of a crop after it is fitted.
cv::Size fitted(double width, double height, std::int64_t side) {
  const double scale = static_cast<double>(side) / std::max(width, height);
  const auto scaled = [&](double v) { return std::max(1, static_cast<int>(v * scale + 0.5)); };
  return {scaled(width), scaled(height)};
}

// Bilinear; from pictures more than twice as large, means of blocks first.
void shrink_or_grow(const cv::Mat& from, cv::Mat to) {
  const bool smaller = from.cols >= 2 * to.cols || from.rows >= 2 * to.rows;
  cv::resize(from, to, to.size(), 0, 0, smaller ? cv::INTER_AREA : cv::INTER_LINEAR);
}

// x' = a x + b y + c, y' = d x + e y + f; pixel i spans [i, i + 1].
struct Affine {
  double a = 1, b = 0, c = 0, d = 0, e = 1, f = 0;
  Point operator()(Point p) const { return {a * p.x + b * p.y + c, d * p.x + e * p.y + f}; }
};

// Sutherland and Hodgman: one side after the other.
Polygon clipped(const Polygon& polygon, double width, double height) {
  Polygon in = polygon, out;
  const auto side = [&](auto inside) {  // distance from a side, not below 0 within
    out.clear();
    for (std::size_t i = 0; i < in.size(); ++i) {
      const Point &p = in[i], &q = in[(i + 1) % in.size()];
      const double dp = inside(p), dq = inside(q);
      if (dp >= 0) out.push_back(p);
      if ((dp < 0) == (dq < 0)) continue;
      const double t = dp / (dp - dq);
      out.push_back({p.x + t * (q.x - p.x), p.y + t * (q.y - p.y)});
    }
    std::swap(in, out);
  };
  side([](const Point& p) { return p.x; });
  side([&](const Point& p) { return width - p.x; });
  side([](const Point& p) { return p.y; });
  side([&](const Point& p) { return height - p.y; });
  // Crossings are rounded.
  for (Point& p : in) p = {std::clamp(p.x, 0.0, width), std::clamp(p.y, 0.0, height)};
  return in;
}

// One of the runs of ones, then one of its places.
int pick(Draws& d, const std::vector<std::uint8_t>& free) {
  std::vector<std::pair<int, int>> runs;
  const int n = static_cast<int>(free.size());
  for (int i = 0; i < n; ++i) {
    if (free[i] == 0) continue;
    if (runs.empty() || runs.back().second != i) runs.emplace_back(i, i);
    runs.back().second = i + 1;
  }
  WEFT_ASSERT(!runs.empty());
  const auto [begin, end] = runs[d.below(static_cast<int>(runs.size()))];
  return begin + d.below(end - begin);
}

// Where a crop begins and ends on one axis of `length` pixels; `spans` are those of the regions,
// and `kept` is the one that lies within it.
using Span = std::pair<int, int>;
Span crop_axis(Draws& d, int length, const std::vector<Span>& spans, const Span& kept) {
  std::vector<std::uint8_t> free(length + 1, 1);
  for (const Span& s : spans) std::fill(free.begin() + s.first, free.begin() + s.second, 0);
  const int least = std::max(1, static_cast<int>(length * least_crop));
  std::vector<std::uint8_t> starts = free;
  std::fill(starts.begin() + std::min(length + 1 - least, kept.first), starts.end(), 0);
  starts[0] = 1;
  const int begin = pick(d, starts);
  std::fill(free.begin(), free.begin() + std::min(length, std::max(begin + least, kept.second)), 0);
  free.back() = 1;
  return {begin, pick(d, free)};
}

Span span_of(const Polygon& polygon, double Point::*axis, int length) {
  double low = length, high = 0;
  for (const Point& p : polygon) low = std::min(low, p.*axis), high = std::max(high, p.*axis);
  return {std::clamp(static_cast<int>(std::floor(low)), 0, length),
          std::clamp(static_cast<int>(std::ceil(high)), 0, length)};
}

cv::Rect draw_crop(Draws& d, const std::vector<TextRegion>& regions, cv::Size size) {
  if (regions.empty()) return cv::Rect({0, 0}, size);
  std::vector<Span> x, y;
  for (const TextRegion& r : regions) {
    x.push_back(span_of(r.polygon, &Point::x, size.width));
    y.push_back(span_of(r.polygon, &Point::y, size.height));
  }
  const auto kept = static_cast<std::size_t>(d.below(static_cast<int>(regions.size())));
  const auto [left, right] = crop_axis(d, size.width, x, x[kept]);
  const auto [top, bottom] = crop_axis(d, size.height, y, y[kept]);
  return {cv::Point(left, top), cv::Point(right, bottom)};
}

// A table for v * factor, and the mix with grey as Pillow's ITU-R 601-2 has it.
void change_colours(cv::Mat to, double brightness, double saturation, bool brightness_first) {
  std::uint8_t light[256];
  for (int v = 0; v < 256; ++v)
    light[v] = static_cast<std::uint8_t>(std::clamp(brightness * v, 0.0, 255.0));
  const auto share = static_cast<float>(saturation);
  for (int y = 0; y < to.rows; ++y) {
    auto* p = to.ptr<std::uint8_t>(y);
    for (int x = 0; x < to.cols; ++x, p += 3) {
      if (brightness_first)
        for (int k = 0; k < 3; ++k) p[k] = light[p[k]];
      const auto grey =
          static_cast<float>((p[0] * 19595 + p[1] * 38470 + p[2] * 7471 + 0x8000) >> 16);
      for (int k = 0; k < 3; ++k) {
        const float v = grey + share * (static_cast<float>(p[k]) - grey);
        p[k] = static_cast<std::uint8_t>(std::clamp(v, 0.0f, 255.0f));
      }
      if (!brightness_first)
        for (int k = 0; k < 3; ++k) p[k] = light[p[k]];
    }
  }
}

void change(const TextImage& in, std::int64_t side, std::uint64_t draw, TextImage& out) {
  Draws d(Philox(draw, Purpose::image_view, 0, 0));
  const bool flip = d.chance(0.5);
  const double angle = d.between(-most_turn, most_turn) * std::numbers::pi / 180;
  const double scale = d.between(least_scale, most_scale);
  const double brightness = d.between(1 - 32.0 / 255, 1 + 32.0 / 255);
  const double saturation = d.between(0.5, 1.5);
  const bool brightness_first = d.chance(0.5);

  // 1. Flip and turn, of the regions.
  const auto width = static_cast<double>(in.size.width);
  const auto height = static_cast<double>(in.size.height);
  const double cosine = std::cos(angle), sine = std::sin(angle), mirror = flip ? -1 : 1;
  const Point middle{width / 2, height / 2};
  const Affine turn{
      mirror * cosine, -sine,  middle.x - mirror * cosine * middle.x + sine * middle.y,
      mirror * sine,   cosine, middle.y - mirror * sine * middle.x - cosine * middle.y};
  out.regions.clear();
  for (const TextRegion& r : in.regions) {
    Polygon polygon;
    for (const Point& p : r.polygon) polygon.push_back(turn(p));
    polygon = clipped(polygon, width, height);
    if (polygon.size() >= 3 && polygon_area(polygon) > 0)
      out.regions.push_back({std::move(polygon), r.ignore});
  }

  // 2. The crop.
  const cv::Rect crop = draw_crop(d, out.regions, matrix(in).size());
  const cv::Size last = fitted(crop.width, crop.height, side);
  const Affine fit{static_cast<double>(last.width) / crop.width,
                   0,
                   -static_cast<double>(crop.x) * last.width / crop.width,
                   0,
                   static_cast<double>(last.height) / crop.height,
                   -static_cast<double>(crop.y) * last.height / crop.height};
  std::erase_if(out.regions, [&](const TextRegion& r) {
    return std::ranges::any_of(r.polygon, [&](const Point& p) {
      return p.x < crop.x || p.y < crop.y || p.x > crop.x + crop.width ||
             p.y > crop.y + crop.height;
    });
  });
  for (TextRegion& r : out.regions)
    for (Point& p : r.polygon) p = fit(p);

  // 3. The same of the pixels: first to the smaller of the two scales.
  const double final_scale = static_cast<double>(last.width) / crop.width;
  const double first_scale = std::min(scale, final_scale);
  cv::Size first = last;
  if (first_scale < final_scale)
    first = {std::max(1, static_cast<int>(crop.width * first_scale)),
             std::max(1, static_cast<int>(crop.height * first_scale))};
  cv::Mat from = matrix(in), smaller;
  const int block = std::min({static_cast<int>(1 / first_scale), from.cols, from.rows});
  if (block >= 2) {  // a mean of pixels rather than one of many
    cv::resize(from, smaller, {from.cols / block, from.rows / block}, 0, 0, cv::INTER_AREA);
    from = smaller;
  }
  // From a pixel of the result to its place in the picture: the crop's, turned back. The matrix of
  // a turn, mirrored or not, has its transpose as inverse. OpenCV has pixel i at i, not i + 1/2.
  const double sx = static_cast<double>(crop.width) / first.width;
  const double sy = static_cast<double>(crop.height) / first.height;
  const double bx = static_cast<double>(from.cols) / width;
  const double by = static_cast<double>(from.rows) / height;
  const double u = crop.x + 0.5 * sx - turn.c, v = crop.y + 0.5 * sy - turn.f;
  const cv::Matx23d back(bx * turn.a * sx, bx * turn.d * sy, bx * (turn.a * u + turn.d * v) - 0.5,
                         by * turn.b * sx, by * turn.e * sy, by * (turn.b * u + turn.e * v) - 0.5);
  cv::Mat to = square(side, out)(cv::Rect({0, 0}, last));
  if (first == last) {
    cv::warpAffine(from, to, back, first, cv::INTER_LINEAR | cv::WARP_INVERSE_MAP);
  } else {
    cv::Mat blurred;
    cv::warpAffine(from, blurred, back, first, cv::INTER_LINEAR | cv::WARP_INVERSE_MAP);
    cv::resize(blurred, to, last, 0, 0, cv::INTER_LINEAR);
  }
  change_colours(to, brightness, saturation, brightness_first);
}

}  // namespace

void fit_text(const TextImage& in, std::int64_t side, TextImage& out) {
  with_opencv([&] {
    const cv::Mat from = matrix(in);
    const cv::Size size = fitted(from.cols, from.rows, side);
    shrink_or_grow(from, square(side, out)(cv::Rect({0, 0}, size)));
    out.regions = in.regions;
    for (TextRegion& r : out.regions)
      for (Point& p : r.polygon) p = {p.x * size.width / from.cols, p.y * size.height / from.rows};
  });
}

void change_text(const TextImage& in, std::int64_t side, std::uint64_t draw, TextImage& out) {
  with_opencv([&] { change(in, side, draw, out); });
}

namespace {

constexpr double shrinking = 1 - 0.4 * 0.4, least_side = 8;

Polygon in_whole_pixels(const Polygon& polygon) {
  Polygon out;
  for (const Point& p : polygon) out.push_back({std::trunc(p.x), std::trunc(p.y)});
  return out;
}

std::vector<cv::Point> pixels(const Polygon& polygon) {
  std::vector<cv::Point> out;
  for (const Point& p : polygon) out.emplace_back(static_cast<int>(p.x), static_cast<int>(p.y));
  return out;
}

// The polygon's rows and columns that lie in the picture.
cv::Rect box_of(const std::vector<cv::Point>& polygon, cv::Size size) {
  return cv::boundingRect(polygon) & cv::Rect({0, 0}, size);
}

// Sets or clears a bit of the pixels within a polygon.
void mark(cv::Mat& flags, const std::vector<cv::Point>& polygon, std::uint8_t bit, bool on) {
  const cv::Rect box = box_of(polygon, flags.size());
  if (box.empty()) return;
  cv::Mat inside = cv::Mat::zeros(box.size(), CV_8U);
  cv::fillPoly(inside, std::vector{polygon}, 1, cv::LINE_8, 0, -box.tl());
  for (int y = 0; y < box.height; ++y) {
    const std::uint8_t* in = inside.ptr<std::uint8_t>(y);
    std::uint8_t* f = flags.ptr<std::uint8_t>(box.y + y, box.x);
    for (int x = 0; x < box.width; ++x)
      if (in[x] != 0) f[x] = static_cast<std::uint8_t>(on ? f[x] | bit : f[x] & ~bit);
  }
}

struct Edge {
  float x, y, dx, dy, inverse;  // its start, its way, 1 / length^2; 0 for a point

  float squared_distance(float px, float py) const {
    const float u = px - x, v = py - y;
    const float t = std::clamp((u * dx + v * dy) * inverse, 0.0f, 1.0f);
    const float ex = u - t * dx, ey = v - t * dy;
    return ex * ex + ey * ey;
  }
};

void add_thresholds(cv::Mat& thresholds, const Polygon& polygon, const cv::Rect& box,
                    double distance) {
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point &a = polygon[i], &b = polygon[(i + 1) % polygon.size()];
    const double dx = b.x - a.x, dy = b.y - a.y, square = dx * dx + dy * dy;
    edges.push_back({static_cast<float>(a.x), static_cast<float>(a.y), static_cast<float>(dx),
                     static_cast<float>(dy), square > 0 ? static_cast<float>(1 / square) : 0});
  }
  const auto most = static_cast<float>(distance * distance);
  const auto inverse = static_cast<float>(1 / distance);
  for (int y = box.y; y < box.y + box.height; ++y) {
    std::uint8_t* to = thresholds.ptr<std::uint8_t>(y);
    for (int x = box.x; x < box.x + box.width; ++x) {
      float nearest = most;
      for (const Edge& e : edges)
        nearest =
            std::min(nearest, e.squared_distance(static_cast<float>(x), static_cast<float>(y)));
      if (nearest >= most) continue;
      const float value = 1 - std::sqrt(nearest) * inverse;
      to[x] = std::max(to[x], static_cast<std::uint8_t>(std::lround(255 * value)));
    }
  }
}

// What is left of the region, or nothing if that is empty or in pieces.
Polygon shrunk(const Polygon& polygon) {
  const Polygon whole = in_whole_pixels(polygon);
  const double distance =
      std::floor(polygon_area(whole) * shrinking / (polygon_length(whole) + 0.001) + 0.5);
  std::vector<Polygon> parts = offset_polygon(whole, -distance);
  return parts.size() == 1 ? std::move(parts[0]) : Polygon();
}

// What is learnt as text of a region; if nothing, that is counted.
Polygon core_of(const TextRegion& region, RegionCounts& counts) {
  if (region.ignore) return ++counts.marked, Polygon();
  if (min_area_rect(region.polygon).shorter_side < least_side) return ++counts.small, Polygon();
  Polygon core = polygon_area(region.polygon) < 1 ? Polygon() : shrunk(region.polygon);
  if (core.empty()) ++counts.crossing;
  return core;
}

void write_targets(std::span<const TextRegion> regions, cv::Mat& flags, cv::Mat& thresholds) {
  flags.setTo(counts_bit);
  thresholds.setTo(0);
  RegionCounts counts;
  for (const TextRegion& region : regions) {
    const Polygon& polygon = region.polygon;
    if (polygon.size() < 3) continue;
    const Polygon core = core_of(region, counts);
    if (core.empty()) {
      mark(flags, pixels(polygon), counts_bit, false);
      continue;
    }
    mark(flags, pixels(core), text_bit, true);
    const double distance = polygon_area(polygon) * shrinking / polygon_length(polygon);
    const std::vector<Polygon> grown = offset_polygon(polygon, distance);
    const std::vector<cv::Point> outside = pixels(grown.size() == 1 ? grown[0] : polygon);
    mark(flags, outside, threshold_bit, true);
    add_thresholds(thresholds, polygon, box_of(outside, flags.size()), distance);
  }
  for (int y = 0; y < flags.rows; ++y) {
    const std::uint8_t* f = flags.ptr<std::uint8_t>(y);
    std::uint8_t* t = thresholds.ptr<std::uint8_t>(y);
    for (int x = 0; x < flags.cols; ++x)
      if ((f[x] & threshold_bit) == 0) t[x] = 0;
  }
}

}  // namespace

void RegionCounts::add(std::span<const TextRegion> all, ImageSize size) {
  const std::int64_t before = marked + small + crossing + outside;
  const auto height = static_cast<double>(size.height), width = static_cast<double>(size.width);
  with_opencv([&] {
    for (const TextRegion& r : all)
      if (height > 0 && clipped(r.polygon, width, height).empty())
        ++outside;
      else
        core_of(r, *this);
  });
  ++pictures;
  regions += std::ssize(all);
  without += marked + small + crossing + outside - before == std::ssize(all) ? 1 : 0;
}

std::string RegionCounts::text() const {
  return fmt::format(
      "no region to learn from in {} of {}; of {}, {} marked as ignored, {} with a side below 8 "
      "pixels before augmentation, {} of crossing edges{}",
      without, counted(pictures, "picture"), counted(regions, "region"), marked, small, crossing,
      outside > 0 ? fmt::format(", {} outside", outside) : "");
}

void write_text_targets(std::span<const TextRegion> regions, ImageSize size,
                        std::span<std::uint8_t> flags, std::span<std::uint8_t> thresholds) {
  WEFT_ASSERT(std::ssize(flags) == size.height * size.width);
  WEFT_ASSERT(std::ssize(thresholds) == size.height * size.width);
  with_opencv([&] {
    const auto rows = static_cast<int>(size.height), columns = static_cast<int>(size.width);
    cv::Mat f(rows, columns, CV_8U, flags.data()), t(rows, columns, CV_8U, thresholds.data());
    write_targets(regions, f, t);
  });
}

}  // namespace weft
