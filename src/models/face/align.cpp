#include "models/face/align.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "media/resize.h"

namespace weft {

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

}  // namespace weft
