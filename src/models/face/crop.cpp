#include "models/face/crop.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace weft {
namespace {

using Point = std::array<float, 2>;
using Vector = std::array<double, 2>;

// In f32 and point by point, as numpy sums them.
Point mean_of(const Landmarks& l, std::size_t first, std::size_t count) {
  Point sum{};
  for (std::size_t i = first; i < first + count; ++i)
    for (std::size_t c = 0; c < 2; ++c) sum[c] += l[i][c];
  for (float& v : sum) v /= static_cast<float>(count);
  return sum;
}

Point middle(const Point& a, const Point& b) {
  return {(a[0] + b[0]) * 0.5f, (a[1] + b[1]) * 0.5f};
}
Point difference(const Point& a, const Point& b) { return {a[0] - b[0], a[1] - b[1]}; }

std::int64_t rounded(double v) { return static_cast<std::int64_t>(std::nearbyint(v)); }
std::int64_t towards_zero(double v) { return static_cast<std::int64_t>(v); }

// The square around a face: corners from the top left one, against the clock.
struct Square {
  std::array<Vector, 4> corners;
  double side = 0;
};

Square square_of(const Landmarks& l) {
  const Point left = mean_of(l, 36, 6), right = mean_of(l, 42, 6);
  const Point eyes = middle(left, right), mouth = middle(l[48], l[54]);
  const Point across = difference(right, left), down = difference(mouth, eyes);
  // Along the line of the eyes, as that of the mouth corrects it.
  Vector x = {static_cast<double>(across[0]) + static_cast<double>(down[1]),
              static_cast<double>(across[1]) - static_cast<double>(down[0])};
  const double length = std::hypot(x[0], x[1]);
  const double half = std::max(static_cast<double>(std::hypot(across[0], across[1])) * 2.0,
                               static_cast<double>(std::hypot(down[0], down[1])) * 1.8);
  for (double& v : x) v = v / length * half;
  const Vector y = {-x[1], x[0]};
  const Point c = {eyes[0] + down[0] * 0.1f, eyes[1] + down[1] * 0.1f};
  Square s;
  const auto corner = [&](double along, double below) {
    return Vector{static_cast<double>(c[0]) + along * x[0] + below * y[0],
                  static_cast<double>(c[1]) + along * x[1] + below * y[1]};
  };
  s.corners = {corner(-1, -1), corner(-1, 1), corner(1, 1), corner(1, -1)};
  s.side = std::hypot(x[0], x[1]) * 2;
  return s;
}

}  // namespace

FaceQuad face_quad(const Landmarks& landmarks, std::int64_t height, std::int64_t width,
                   const std::string& name, std::int64_t side) {
  for (const auto& point : landmarks)
    for (const float v : point)
      WEFT_CHECK(std::isfinite(v) && std::abs(v) < 1e6f, Exit::data,
                 "landmarks count in pixels of the picture", "{}: a landmark is at {}", name, v);
  Square s = square_of(landmarks);
  WEFT_CHECK(std::isfinite(s.side) && s.side > 0, Exit::data,
             "landmarks are x and y of 68 points of one face",
             "{}: the landmarks do not span a face", name);
  FaceQuad q;
  const auto shrink = static_cast<double>(
      static_cast<std::int64_t>(std::floor(s.side / static_cast<double>(side) * 0.5)));
  q.width = width;
  q.height = height;
  if (shrink > 1) {
    q.width = rounded(static_cast<double>(width) / shrink);
    q.height = rounded(static_cast<double>(height) / shrink);
    for (Vector& c : s.corners)
      for (double& v : c) v /= shrink;
    s.side /= shrink;
  }
  const auto [left, right] =
      std::ranges::minmax({s.corners[0][0], s.corners[1][0], s.corners[2][0], s.corners[3][0]});
  const auto [top, bottom] =
      std::ranges::minmax({s.corners[0][1], s.corners[1][1], s.corners[2][1], s.corners[3][1]});
  const std::int64_t border = std::max<std::int64_t>(rounded(s.side * 0.1), 3);
  q.outer.x1 = std::max<std::int64_t>(towards_zero(std::floor(left)) - border, 0);
  q.outer.y1 = std::max<std::int64_t>(towards_zero(std::floor(top)) - border, 0);
  q.outer.x2 = std::min(towards_zero(std::ceil(right)) + border, q.width);
  q.outer.y2 = std::min(towards_zero(std::ceil(bottom)) + border, q.height);
  for (Vector& c : s.corners) {
    c[0] = c[0] - static_cast<double>(q.outer.x1) + 0.5;
    c[1] = c[1] - static_cast<double>(q.outer.y1) + 0.5;
  }
  const auto& c = s.corners;
  q.inner = {std::max(std::min(c[0][0], c[1][0]), 0.0), std::max(std::min(c[0][1], c[3][1]), 0.0),
             std::min(std::max(c[2][0], c[3][0]), static_cast<double>(q.width)),
             std::min(std::max(c[1][1], c[2][1]), static_cast<double>(q.width))};
  return q;
}

Preprocess preprocess_of(const std::string& name) {
  if (name == "crop") return Preprocess::crop;
  if (name == "extcrop") return Preprocess::extcrop;
  if (name == "resize") return Preprocess::resize;
  if (name == "full") return Preprocess::full;
  WEFT_ASSERT(name == "extfull");
  return Preprocess::extfull;
}

FaceCut whole_picture(std::int64_t height, std::int64_t width) {
  const PixelBox all{0, 0, width, height};
  return {width, height, all, width, height, all};
}

FaceCut make_cut(const FaceQuad& q, Preprocess mode, std::int64_t height, std::int64_t width,
                 const std::string& name) {
  if (mode == Preprocess::resize) return whole_picture(height, width);
  FaceCut cut;
  cut.width = q.width;
  cut.height = q.height;
  const std::int64_t lx = towards_zero(q.inner[0]), ly = towards_zero(q.inner[1]),
                     rx = towards_zero(q.inner[2]), ry = towards_zero(q.inner[3]);
  cut.frame_width = rx - lx;
  cut.frame_height = ry - ly;
  cut.box = q.outer;
  if (!extended(mode))
    cut.box = {q.outer.x1 + lx, q.outer.y1 + ly, std::min(q.outer.x1 + rx, q.outer.x2),
               std::min(q.outer.y1 + ry, q.outer.y2)};
  WEFT_CHECK(cut.width > 0 && cut.height > 0 && cut.frame_width > 0 && cut.frame_height > 0 &&
                 !cut.box.empty(),
             Exit::data, "take a picture that shows the whole face",
             "{}: nothing is left of its {}x{} pixels around the face", name, height, width);
  const auto scaled = [](std::int64_t v, std::int64_t from, std::int64_t to) {
    return std::llround(static_cast<double>(v) * static_cast<double>(to) /
                        static_cast<double>(from));
  };
  cut.place = {scaled(cut.box.x1, cut.width, width), scaled(cut.box.y1, cut.height, height),
               scaled(cut.box.x2, cut.width, width), scaled(cut.box.y2, cut.height, height)};
  return cut;
}

ImageFile cut_box(const ImageFile& picture, const PixelBox& box) {
  WEFT_ASSERT(!box.empty() && box.x1 >= 0 && box.y1 >= 0 && box.x2 <= picture.width &&
              box.y2 <= picture.height);
  ImageFile cut{box.height(), box.width(), {}};
  const auto row = static_cast<std::size_t>(3 * cut.width);
  cut.values.resize(row * static_cast<std::size_t>(cut.height));
  for (std::int64_t y = 0; y < cut.height; ++y)
    std::memcpy(cut.values.data() + static_cast<std::size_t>(y) * row,
                picture.values.data() + 3 * ((box.y1 + y) * picture.width + box.x1), row);
  return cut;
}

ImageFile cut_face(const ImageFile& picture, const FaceCut& cut, std::int64_t size) {
  if (picture.height == cut.height && picture.width == cut.width)
    return resize_bilinear(cut_box(picture, cut.box), size, size);
  const ImageFile smaller = resize_bilinear(picture, cut.height, cut.width);
  return resize_bilinear(cut_box(smaller, cut.box), size, size);
}

Landmarks cut_landmarks(const Landmarks& points, std::int64_t height, std::int64_t width,
                        const FaceCut& cut, std::int64_t size) {
  const auto moved = [size](float v, std::int64_t from, std::int64_t to, std::int64_t first,
                            std::int64_t length) {
    const double at = static_cast<double>(v) * static_cast<double>(to) / static_cast<double>(from);
    return static_cast<float>((at - static_cast<double>(first)) * static_cast<double>(size) /
                              static_cast<double>(length));
  };
  Landmarks there = points;
  for (auto& [x, y] : there) {
    x = moved(x, width, cut.width, cut.box.x1, cut.box.width());
    y = moved(y, height, cut.height, cut.box.y1, cut.box.height());
  }
  return there;
}

}  // namespace weft
