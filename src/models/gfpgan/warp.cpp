#include "models/gfpgan/warp.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <opencv2/imgproc.hpp>
#include <span>
#include <utility>

#include "data/text_images/opencv.h"

namespace weft {
namespace {

using Point = std::array<float, 2>;

// x' = a x - b y + tx, y' = b x + a y + ty.
struct Similarity {
  double a, b, tx, ty;
  AffineMap map() const { return {{a, -b, tx, b, a, ty}}; }
};

// The one that takes p to P and q to Q; not finite where p = q.
Similarity through(const Point& p, const Point& q, const Point& P, const Point& Q) {
  const double dx = static_cast<double>(p[0]) - q[0], dy = static_cast<double>(p[1]) - q[1],
               DX = static_cast<double>(P[0]) - Q[0], DY = static_cast<double>(P[1]) - Q[1];
  const double square = dx * dx + dy * dy;
  const double a = (DX * dx + DY * dy) / square, b = (DY * dx - DX * dy) / square;
  return {a, b, P[0] - a * p[0] + b * p[1], P[1] - b * p[0] - a * p[1]};
}

// The least squares over the points with `taken`: centred, the normal equations are diagonal.
Similarity least_squares(const FacePoints& from, const FacePoints& to,
                         const std::array<bool, 5>& taken) {
  double n = 0, x = 0, y = 0, X = 0, Y = 0;
  for (std::size_t i = 0; i < 5; ++i)
    if (taken[i]) n += 1, x += from[i][0], y += from[i][1], X += to[i][0], Y += to[i][1];
  x /= n, y /= n, X /= n, Y /= n;
  double square = 0, along = 0, across = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    if (!taken[i]) continue;
    const double dx = from[i][0] - x, dy = from[i][1] - y, DX = to[i][0] - X, DY = to[i][1] - Y;
    square += dx * dx + dy * dy;
    along += dx * DX + dy * DY;
    across += dx * DY - dy * DX;
  }
  const double a = along / square, b = across / square;
  return {a, b, X - a * x + b * y, Y - b * x - a * y};
}

// Squared distances of the mapped points from where they belong, in f32 as the original takes them.
std::array<float, 5> errors_of(const Similarity& s, const FacePoints& from, const FacePoints& to) {
  const auto a = static_cast<float>(s.a), b = static_cast<float>(s.b),
             tx = static_cast<float>(s.tx), ty = static_cast<float>(s.ty);
  std::array<float, 5> errors;
  for (std::size_t i = 0; i < 5; ++i) {
    const float dx = a * from[i][0] - b * from[i][1] + tx - to[i][0],
                dy = b * from[i][0] + a * from[i][1] + ty - to[i][1];
    errors[i] = dx * dx + dy * dy;
  }
  return errors;
}

cv::Matx23d matrix(const AffineMap& map) { return cv::Matx23d(map.m.data()); }

}  // namespace

const FacePoints& face_template() {
  static const FacePoints points{{{192.98138f, 239.94708f},
                                  {318.90277f, 240.1936f},
                                  {256.63416f, 314.01935f},
                                  {201.26117f, 371.41043f},
                                  {313.08905f, 371.15118f}}};
  return points;
}

std::optional<AffineMap> face_transform(const FacePoints& points) {
  for (const Point& p : points)
    if (!std::isfinite(p[0]) || !std::isfinite(p[1])) return std::nullopt;
  const FacePoints& to = face_template();
  // The pairs among five points that OpenCV's generator draws from its fixed start in the 13 rounds
  // that its confidence of 0.99 asks for; those it draws again are left out.
  constexpr std::pair<std::size_t, std::size_t> pairs[] = {{0, 4}, {0, 3}, {1, 2},
                                                           {1, 0}, {1, 4}, {3, 1}};
  float least = std::numeric_limits<float>::infinity();
  std::array<float, 5> best{};
  for (const auto& [i, j] : pairs) {
    const std::array<float, 5> errors =
        errors_of(through(points[i], points[j], to[i], to[j]), points, to);
    if (std::ranges::any_of(errors, [](float e) { return !std::isfinite(e); })) continue;
    std::array<float, 5> sorted = errors;
    std::ranges::sort(sorted);
    if (sorted[2] < least) least = sorted[2], best = errors;
  }
  if (!std::isfinite(least)) return std::nullopt;
  // 2.5 robust deviations (1.4826 times the median), widened for the few points that are left.
  const double deviation =
      std::max(2.5 * 1.4826 * (1 + 5.0 / 3) * std::sqrt(static_cast<double>(least)), 0.001);
  const auto bound = static_cast<float>(deviation * deviation);
  std::array<bool, 5> fits;
  for (std::size_t i = 0; i < 5; ++i) fits[i] = best[i] <= bound;
  const AffineMap map = least_squares(points, to, fits).map();
  const double determinant = map.m[0] * map.m[4] - map.m[1] * map.m[3];
  if (!std::isfinite(determinant) || determinant == 0) return std::nullopt;
  return map;
}

std::vector<std::uint8_t> warp_face(const ImageFile& frame, const AffineMap& transform) {
  std::vector<std::uint8_t> face(std::size_t{face_side} * face_side * 3);
  with_opencv([&] {
    const cv::Mat from(static_cast<int>(frame.height), static_cast<int>(frame.width), CV_8UC3,
                       const_cast<std::uint8_t*>(frame.values.data()));
    cv::Mat to(face_side, face_side, CV_8UC3, face.data());
    cv::warpAffine(from, to, matrix(transform), to.size(), cv::INTER_LINEAR, cv::BORDER_CONSTANT,
                   cv::Scalar(132, 133, 135));
  });
  return face;
}

AffineMap back_transform(const AffineMap& transform, int scale) {
  return with_opencv([&] {
    cv::Matx23d inverse;
    cv::invertAffineTransform(matrix(transform), inverse);
    AffineMap back;
    // Past a scale of 1 the original shifts by half a pixel of the frame.
    const double shift = scale > 1 ? 0.5 * scale : 0;
    for (std::size_t i = 0; i < 6; ++i)
      back.m[i] = inverse.val[i] * scale + (i % 3 == 2 ? shift : 0);
    return back;
  });
}

}  // namespace weft
