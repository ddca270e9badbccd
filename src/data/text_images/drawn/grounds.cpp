#include "data/text_images/drawn/grounds.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <opencv2/imgproc.hpp>

namespace weft {
namespace {

using std::numbers::pi;

cv::Mat matrix(Picture& p) {
  return {static_cast<int>(p.size.height), static_cast<int>(p.size.width), CV_8UC3, p.rgb.data()};
}

cv::Scalar colour(Draws& d) {
  // Walls and streets are greyer than flowers.
  const double grey = d.between(10, 245), vivid = d.chance(0.3) ? 120 : 35;
  cv::Scalar c;
  for (int k = 0; k < 3; ++k) c[k] = std::clamp(grey + d.between(-vivid, vivid), 0.0, 255.0);
  return c;
}

cv::Scalar near(Draws& d, const cv::Scalar& c, double by) {
  const double light = d.between(-by, by);
  cv::Scalar out;
  for (int k = 0; k < 3; ++k)
    out[k] = std::clamp(c[k] + light + d.between(-by, by) / 4, 0.0, 255.0);
  return out;
}

// Values about 0 with a spectrum like that of photographs: each octave has `fall` times the
// amplitude of the next coarser one, which has `amplitude`.
cv::Mat surface(Draws& d, cv::Size size, double amplitude, double fall) {
  const int longest = std::max(size.width, size.height);
  int side = 3 + d.below(4);
  cv::Mat sum = cv::Mat::zeros(side, side, CV_32F);
  std::vector<std::uint8_t> noise;
  for (;; side *= 2, amplitude *= fall) {
    const bool last = side >= longest;
    const cv::Size s = last ? size : cv::Size(side, side);
    if (sum.size() != s) {
      cv::Mat finer;
      cv::resize(sum, finer, s, 0, 0, cv::INTER_LINEAR);
      sum = finer;
    }
    noise.resize(s.area());
    d.bytes(noise);
    const auto scale = static_cast<float>(amplitude / 127.5);
    auto* v = sum.ptr<float>();
    for (std::size_t i = 0; i < noise.size(); ++i)
      v[i] += scale * (static_cast<float>(noise[i]) - 127.5f);
    if (last) return sum;
  }
}

// Adds a surface to the whole picture, or where `where` is not 0; `tint` is how much each channel
// takes of it.
void add_surface(cv::Mat& to, const cv::Mat& values, const cv::Scalar& tint,
                 const cv::Mat& where = {}) {
  const float t[3] = {static_cast<float>(tint[0]), static_cast<float>(tint[1]),
                      static_cast<float>(tint[2])};
  for (int y = 0; y < to.rows; ++y) {
    auto* p = to.ptr<std::uint8_t>(y);
    const auto* v = values.ptr<float>(y);
    const auto* mask = where.empty() ? nullptr : where.ptr<std::uint8_t>(y);
    for (int x = 0; x < to.cols; ++x, p += 3)
      if (mask == nullptr || mask[x] != 0)
        for (int k = 0; k < 3; ++k)
          p[k] = cv::saturate_cast<std::uint8_t>(static_cast<float>(p[k]) + t[k] * v[x]);
  }
}

void fade(Draws& d, cv::Mat& to) {
  const cv::Scalar from = colour(d), end = near(d, from, 90);
  const double angle = d.between(0, 2 * pi), dx = std::cos(angle), dy = std::sin(angle);
  const double length = std::abs(dx) * to.cols + std::abs(dy) * to.rows;
  const auto fx = static_cast<float>(dx);
  float c[3], slope[3];
  for (int k = 0; k < 3; ++k) {
    c[k] = static_cast<float>((from[k] + end[k]) / 2);
    slope[k] = static_cast<float>((end[k] - from[k]) / length);
  }
  for (int y = 0; y < to.rows; ++y) {
    auto* p = to.ptr<std::uint8_t>(y);
    const auto row = static_cast<float>(dy * (y - to.rows / 2) - dx * (to.cols / 2));
    for (int x = 0; x < to.cols; ++x, p += 3) {
      const float at = row + fx * static_cast<float>(x);
      for (int k = 0; k < 3; ++k) p[k] = cv::saturate_cast<std::uint8_t>(c[k] + slope[k] * at);
    }
  }
}

cv::Point2d somewhere(Draws& d, const cv::Mat& in) {
  return {d.unit() * in.cols, d.unit() * in.rows};
}

// Shapes in whole pixels; OpenCV's limits are far beyond.
std::vector<cv::Point> blob(Draws& d, cv::Point2d centre, double radius, int corners) {
  std::vector<cv::Point> points;
  const double turn = d.between(0, 2 * pi);
  for (int i = 0; i < corners; ++i) {
    const double a = turn + 2 * pi * i / corners, r = radius * d.between(0.6, 1.2);
    points.emplace_back(cv::saturate_cast<int>(centre.x + r * std::cos(a)),
                        cv::saturate_cast<int>(centre.y + r * std::sin(a)));
  }
  return points;
}

std::vector<cv::Point> turned(cv::Point2d centre, double width, double height, double angle) {
  const double c = std::cos(angle), s = std::sin(angle);
  std::vector<cv::Point> points;
  for (const auto& [u, v] : {std::pair{-1, -1}, {1, -1}, {1, 1}, {-1, 1}})
    points.emplace_back(cv::saturate_cast<int>(centre.x + (c * u * width - s * v * height) / 2),
                        cv::saturate_cast<int>(centre.y + (s * u * width + c * v * height) / 2));
  return points;
}

// Large things, one behind the other.
void objects(Draws& d, cv::Mat& to) {
  const double side = std::min(to.rows, to.cols);
  const bool small = d.chance(0.3);
  for (int n = d.below(small ? 25 : 7); n > 0; --n) {
    const cv::Scalar c = colour(d);
    const cv::Point2d at = somewhere(d, to);
    const double radius = side * (small ? d.between(0.01, 0.1) : d.between(0.05, 0.45));
    if (d.chance(0.4))
      cv::fillPoly(to,
                   std::vector{turned(at, 2 * radius, radius * d.between(0.3, 3),
                                      d.chance(0.6) ? 0 : d.between(-0.4, 0.4))},
                   c, cv::LINE_AA);
    else if (d.chance(0.4))
      cv::ellipse(to, at, {static_cast<int>(radius), static_cast<int>(radius * d.between(0.4, 1))},
                  d.between(0, 180), 0, 360, c, d.chance(0.7) ? -1 : 2 + d.below(12), cv::LINE_AA);
    else
      cv::fillPoly(to, std::vector{blob(d, at, radius, 3 + d.below(7))}, c, cv::LINE_AA);
  }
}

// A place for a pattern: its axes, and a mask of what it covers.
struct Patch {
  cv::Rect box;
  double angle = 0;
};
Patch patch(Draws& d, const cv::Mat& in) {
  if (d.chance(0.3)) return {{0, 0, in.cols, in.rows}, 0};
  const int w = std::max(8, static_cast<int>(in.cols * d.between(0.2, 0.8)));
  const int h = std::max(8, static_cast<int>(in.rows * d.between(0.2, 0.8)));
  return {
      cv::Rect(d.below(std::max(1, in.cols - w + 1)), d.below(std::max(1, in.rows - h + 1)), w, h) &
          cv::Rect(0, 0, in.cols, in.rows),
      0};
}

void bricks(Draws& d, cv::Mat to) {
  const int h = 6 + d.below(26), w = static_cast<int>(h * d.between(1.5, 3.5));
  const int joint = 1 + d.below(std::max(1, h / 6));
  const cv::Scalar mortar = colour(d), brick = colour(d);
  to.setTo(mortar);
  for (int row = 0, y = 0; y < to.rows; ++row, y += h)
    for (int x = row % 2 == 0 ? 0 : -w / 2; x < to.cols; x += w)
      cv::rectangle(to, {x + joint, y + joint}, {x + w - 1, y + h - 1}, near(d, brick, 18), -1);
}

void windows(Draws& d, cv::Mat to) {
  const int w = 8 + d.below(40), h = static_cast<int>(w * d.between(0.5, 2));
  const int dx = w + 3 + d.below(w), dy = h + 3 + d.below(h);
  const cv::Scalar glass = colour(d);
  const bool framed = d.chance(0.5);
  for (int y = d.below(dy); y < to.rows; y += dy)
    for (int x = d.below(dx); x < to.cols; x += dx) {
      cv::rectangle(to, {x, y}, {x + w, y + h}, near(d, glass, 40), -1);
      if (!framed) continue;
      cv::rectangle(to, {x, y}, {x + w, y + h}, colour(d), 1 + w / 20);
      cv::line(to, {x + w / 2, y}, {x + w / 2, y + h}, near(d, glass, 80), 1 + w / 24);
    }
}

void bars(Draws& d, cv::Mat to) {
  const int gap = 6 + d.below(40), thick = 1 + d.below(std::max(1, gap / 3));
  const cv::Scalar c = colour(d);
  const bool crossed = d.chance(0.35), lying = d.chance(0.3);
  const int lean = d.chance(0.4) ? d.below(61) - 30 : 0;
  const int length = std::max(to.rows, to.cols);
  for (int at = -length; at < 2 * length; at += gap) {
    if (!lying || crossed) cv::line(to, {at, 0}, {at + lean, to.rows}, c, thick, cv::LINE_AA);
    if (lying || crossed) cv::line(to, {0, at}, {to.cols, at + lean}, c, thick, cv::LINE_AA);
  }
}

void rings(Draws& d, cv::Mat to) {
  const int most = std::max(4, std::min(to.rows, to.cols) / 6);
  const cv::Scalar c = colour(d);
  const bool in_row = d.chance(0.4);
  const int y = d.below(to.rows), radius = 3 + d.below(most);
  for (int n = 3 + d.below(20), i = 0; i < n; ++i) {
    const cv::Point at =
        in_row ? cv::Point(i * radius * 5 / 2, y) : cv::Point(d.below(to.cols), d.below(to.rows));
    cv::circle(to, at, in_row ? radius : 2 + d.below(most), near(d, c, 30),
               d.chance(0.5) ? -1 : 1 + d.below(4), cv::LINE_AA);
  }
}

void leaves(Draws& d, cv::Mat to) {
  const cv::Scalar c = colour(d);
  const int size = 2 + d.below(9);
  const int n = std::min(900, static_cast<int>(to.total() / (12 * size * size)) + 10);
  for (int i = 0; i < n; ++i)
    cv::ellipse(to, {d.below(to.cols), d.below(to.rows)}, {1 + d.below(2 * size), 1 + size / 2},
                d.between(0, 180), 0, 360, near(d, c, 60), -1);
}

// Thin strokes of no letters: branches, cables, graffiti.
void scribbles(Draws& d, cv::Mat to) {
  const cv::Scalar c = colour(d);
  const int thick = 1 + d.below(4);
  for (int n = 2 + d.below(10); n > 0; --n) {
    cv::Point2d at = somewhere(d, to);
    double angle = d.between(0, 2 * pi);
    const double step = d.between(4, 30), bend = d.between(0.1, 0.9);
    std::vector<cv::Point> line;
    for (int i = 0; i < 24; ++i) {
      line.emplace_back(at);
      angle += d.between(-bend, bend);
      at += step * cv::Point2d(std::cos(angle), std::sin(angle));
    }
    cv::polylines(to, std::vector{line}, false, c, thick, cv::LINE_AA);
  }
}

void checks(Draws& d, cv::Mat to) {
  const int w = 4 + d.below(40), h = d.chance(0.5) ? w : 4 + d.below(40);
  const cv::Scalar c = colour(d);
  for (int y = 0; y < to.rows; y += h)
    for (int x = (y / h) % 2 * w; x < to.cols; x += 2 * w)
      cv::rectangle(to, {x, y}, {x + w - 1, y + h - 1}, c, -1);
}

void pattern(Draws& d, cv::Mat& to) {
  static constexpr auto kinds = std::to_array<void (*)(Draws&, cv::Mat)>(
      {bricks, windows, bars, rings, leaves, scribbles, checks, bars, leaves, rings});
  const Patch where = patch(d, to);
  cv::Mat part = to(where.box);
  kinds[d.below(static_cast<int>(kinds.size()))](d, part);
  if (d.chance(0.5)) add_surface(part, surface(d, part.size(), 25, 0.8), cv::Scalar::all(1));
}

}  // namespace

void paint_ground(Draws& d, Picture& out) {
  out.rgb.resize(out.size.height * out.size.width * 3);
  cv::Mat to = matrix(out);
  fade(d, to);
  if (d.chance(0.2)) {  // a plain wall or a page
    add_surface(to, surface(d, to.size(), d.between(0, 15), 0.7), cv::Scalar::all(1));
    return;
  }
  if (d.chance(0.8))
    add_surface(to, surface(d, to.size(), d.between(10, 90), d.between(0.5, 0.95)),
                {d.between(0.5, 1.2), d.between(0.5, 1.2), d.between(0.5, 1.2)});
  objects(d, to);
  for (int n = d.below(4); n > 0; --n) pattern(d, to);
  if (d.chance(0.5)) objects(d, to);
  if (d.chance(0.6))
    add_surface(to, surface(d, to.size(), d.between(5, 40), d.between(0.6, 1)), cv::Scalar::all(1));
}

void take_ground(Draws& d, const Picture& footage, Picture& out) {
  out.rgb.resize(out.size.height * out.size.width * 3);
  cv::Mat to = matrix(out);
  const cv::Mat from(static_cast<int>(footage.size.height), static_cast<int>(footage.size.width),
                     CV_8UC3, const_cast<std::uint8_t*>(footage.rgb.data()));
  // The largest window of the picture's shape, or a smaller one.
  const double fits =
      std::min(static_cast<double>(from.cols) / to.cols, static_cast<double>(from.rows) / to.rows);
  const double scale = fits * d.between(0.4, 1);
  const int w = std::clamp(static_cast<int>(to.cols * scale), 1, from.cols);
  const int h = std::clamp(static_cast<int>(to.rows * scale), 1, from.rows);
  const cv::Rect window(d.below(from.cols - w + 1), d.below(from.rows - h + 1), w, h);
  cv::resize(from(window), to, to.size(), 0, 0, scale > 1 ? cv::INTER_AREA : cv::INTER_LINEAR);
  if (d.chance(0.5)) cv::flip(to, to, 1);
}

void photograph(Draws& d, Picture& picture) {
  cv::Mat to = matrix(picture);
  cv::Mat changed;
  if (d.chance(0.25))  // light and shade, over text too
    add_surface(to, surface(d, to.size(), d.between(10, 50), 0.4), cv::Scalar::all(1));
  if (d.chance(0.15)) {  // low resolution
    const double scale = d.between(0.5, 0.85);
    cv::resize(to, changed, {}, scale, scale, cv::INTER_AREA);
    cv::resize(changed, to, to.size(), 0, 0, cv::INTER_LINEAR);
  }
  if (d.chance(0.35)) cv::GaussianBlur(to, to, {5, 5}, d.between(0.4, 1.3));
  if (d.chance(0.06)) {  // shake
    const int length = 2 + d.below(3);
    cv::blur(to, changed, d.chance(0.5) ? cv::Size(length, 1) : cv::Size(1, length));
    changed.copyTo(to);
  }
  // Contrast and brightness as one table.
  const double contrast = d.between(0.65, 1.1), light = d.between(-25, 25);
  const double amplitude = d.chance(0.6) ? d.between(0, 1.6) : 0;  // of noise, times -15 to 15
  std::uint8_t table[256];
  for (int v = 0; v < 256; ++v)
    table[v] = cv::saturate_cast<std::uint8_t>(128 + contrast * (v - 128) + light);
  if (amplitude == 0) {
    for (std::uint8_t& v : picture.rgb) v = table[v];
    return;
  }
  std::vector<std::uint8_t> noise(picture.rgb.size());
  d.bytes(noise);
  // The sum of two uniform numbers: a triangle, close enough to a bell.
  std::int8_t grain[256];
  for (int v = 0; v < 256; ++v)
    grain[v] = static_cast<std::int8_t>(std::lround(amplitude * ((v >> 4) + (v & 15) - 15)));
  for (std::size_t i = 0; i < noise.size(); ++i)
    picture.rgb[i] = cv::saturate_cast<std::uint8_t>(table[picture.rgb[i]] + grain[noise[i]]);
}

}  // namespace weft
