#include "models/sadtalker/face/crop.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <opencv2/imgproc.hpp>

#include "core/error.h"
#include "data/text_images/opencv.h"
#include "media/resize.h"

namespace weft {

ImageFile resize_bilinear(const ImageFile& in, std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(in.height > 0 && in.width > 0 && height > 0 && width > 0);
  const auto view = [](const ImageFile& image) {
    // OpenCV has no view of values that do not change.
    return cv::Mat(static_cast<int>(image.height), static_cast<int>(image.width), CV_8UC3,
                   const_cast<std::uint8_t*>(image.values.data()));
  };
  ImageFile out{height, width, std::vector<std::uint8_t>(3 * height * width)};
  with_opencv([&] {
    cv::Mat to = view(out);
    cv::resize(view(in), to, to.size(), 0, 0, cv::INTER_LINEAR);
  });
  return out;
}

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
             Exit::data, "use a picture that shows the complete face",
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

const MeanFace mean_face = {{{-0.31148657f, 0.29036078f, 0.13377953f},
                             {0.30979887f, 0.28972036f, 0.13179526f},
                             {0.0032534988f, -0.046179324f, 0.55244243f},
                             {-0.25216928f, -0.38133916f, 0.22405732f},
                             {0.24846619f, -0.38128236f, 0.22235769f}}};

namespace {

// Half of the distance that the mean face's units have in the image.
constexpr double rescale = 102;

// x, and y counted from below.
std::array<std::array<float, 2>, 68> upwards(const Landmarks& landmarks, std::int64_t height) {
  Landmarks up = landmarks;
  for (auto& point : up) point[1] = static_cast<float>(height - 1) - point[1];
  return up;
}

// The eyes, the nose and the corners of the mouth, in f32.
std::array<std::array<float, 2>, 5> five_of(const Landmarks& l) {
  const auto mean = [&](std::size_t a, std::size_t b) {
    return std::array<float, 2>{(l[a][0] + l[b][0]) / 2, (l[a][1] + l[b][1]) / 2};
  };
  return {mean(36, 39), mean(42, 45), l[30], l[48], l[54]};
}

// What maps the mean face onto the landmarks, without perspective: rows that give x and y, and what
// they add.
struct Pose {
  double scale = 0, tx = 0, ty = 0;
};
Pose pose_of(const std::array<std::array<float, 2>, 5>& five, const MeanFace& face) {
  Eigen::Matrix<double, 5, 4> a;
  Eigen::Matrix<double, 5, 2> b;
  for (int i = 0; i < 5; ++i) {
    const auto p = static_cast<std::size_t>(i);
    a.row(i) << face[p][0], face[p][1], face[p][2], 1.0;
    b.row(i) << static_cast<double>(five[p][0]), static_cast<double>(five[p][1]);
  }
  const Eigen::Matrix<double, 4, 2> k = a.colPivHouseholderQr().solve(b);
  return {(k.col(0).head<3>().norm() + k.col(1).head<3>().norm()) / 2, k(3, 0), k(3, 1)};
}

}  // namespace

AlignedFace align_face(const ImageFile& picture, const Landmarks& landmarks,
                       const std::string& name, const MeanFace& face) {
  const std::array<std::array<float, 2>, 68> up = upwards(landmarks, picture.height);
  const Pose pose = pose_of(five_of(up), face);
  const auto w0 = static_cast<double>(picture.width), h0 = static_cast<double>(picture.height);
  const double s = rescale / pose.scale, tx = pose.tx, ty = pose.ty;
  constexpr double most = 65535;
  WEFT_CHECK(std::isfinite(s) && w0 * s >= 1 && h0 * s >= 1 && w0 * s <= most && h0 * s <= most &&
                 std::abs(tx * s) < 1e9 && std::abs(ty * s) < 1e9,
             Exit::data, "landmarks are x and y of 68 points of one face",
             "{}: the landmarks' face cannot be brought to {} pixels (scale {:.3g})", name,
             aligned_side, s);
  const auto w = static_cast<std::int64_t>(w0 * s), h = static_cast<std::int64_t>(h0 * s);
  constexpr std::int64_t side = aligned_side;
  const double beside = static_cast<double>(w) / 2 - side / 2.0,
               over = static_cast<double>(h) / 2 - side / 2.0;
  const auto left = static_cast<std::int64_t>(beside + (tx - w0 / 2) * s),
             top = static_cast<std::int64_t>(over + (h0 / 2 - ty) * s);

  AlignedFace aligned;
  aligned.trans = {w0, h0, s, tx, ty};
  for (std::size_t i = 0; i < up.size(); ++i)
    aligned.landmarks[i] = {(static_cast<double>(up[i][0]) - tx + w0 / 2) * s - beside,
                            (static_cast<double>(up[i][1]) - ty + h0 / 2) * s - over};
  aligned.image = {side, side, std::vector<std::uint8_t>(side * side * 3)};
  // What the square has in common with the scaled picture.
  const std::int64_t x1 = std::clamp<std::int64_t>(left, 0, w),
                     y1 = std::clamp<std::int64_t>(top, 0, h),
                     x2 = std::clamp<std::int64_t>(left + side, 0, w),
                     y2 = std::clamp<std::int64_t>(top + side, 0, h);
  if (x1 < x2 && y1 < y2)
    pillow_resize_window({picture.values.data(), picture.height, picture.width, 3 * picture.width},
                         h, w, PillowFilter::bicubic, {y1, x1, y2 - y1, x2 - x1},
                         aligned.image.values.data() + 3 * ((y1 - top) * side + x1 - left),
                         3 * side);
  return aligned;
}

SourceFace find_source_face(FaceFinder finder, const ImageFile& picture, Preprocess mode,
                            std::int64_t size, const std::string& name,
                            const std::optional<Landmarks>& given) {
  const std::int64_t H = picture.height, W = picture.width;
  WEFT_ASSERT(H > 0 && W > 0 && (finder || given));
  SourceFace source;
  std::optional<Landmarks> points = given;
  if (mode == Preprocess::resize) {
    source.cut = whole_picture(H, W);
  } else {
    if (!points) {
      // The original shows the detector the channels of this search in the wrong order.
      const FoundFace found =
          find_face(*finder.detector, *finder.landmarks, picture, ChannelOrder::rgb, name);
      source.faces = found.faces;
      points = found.landmarks;
    }
    source.cut = make_cut(face_quad(*points, H, W, name), mode, H, W, name);
  }
  source.crop = cut_face(picture, source.cut, size);
  if (!finder) {
    source.landmarks = cut_landmarks(*points, H, W, source.cut, size);
    return source;
  }
  const FoundFace found =
      find_face(*finder.detector, *finder.landmarks, source.crop, ChannelOrder::bgr,
                mode == Preprocess::resize ? name : name + " (cut to its face)");
  if (mode == Preprocess::resize) source.faces = found.faces;
  source.landmarks = found.landmarks;
  return source;
}

Landmarks landmarks_of(std::span<const float> pairs) {
  Landmarks landmarks;
  WEFT_ASSERT(pairs.size() == 2 * landmarks.size());
  for (std::size_t i = 0; i < landmarks.size(); ++i)
    landmarks[i] = {pairs[2 * i], pairs[2 * i + 1]};
  return landmarks;
}

}  // namespace weft
