#include "models/sadtalker/gfpgan/paste.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <opencv2/imgproc.hpp>
#include <span>
#include <utility>

#include "core/error.h"
#include "data/text_images/opencv.h"
#include "ops/matmul.h"
#include "tensor/device.h"

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

namespace {

constexpr std::int64_t side = face_side, border = 10;

// Both Gaussians along one axis as a matrix [side,side]: row i has the shares of the pixels that
// make pixel i. At the ends the axis is mirrored at its outermost pixel.
std::vector<float> blur_matrix() {
  constexpr int taps = 101;
  const cv::Mat kernel = cv::getGaussianKernel(taps, 11, CV_64F);
  std::vector<double> once(side * side);
  for (std::int64_t i = 0; i < side; ++i)
    for (int k = 0; k < taps; ++k) {
      const std::int64_t from = std::abs(i + k - taps / 2),
                         within = from < side ? from : 2 * (side - 1) - from;
      once[i * side + within] += kernel.at<double>(k);
    }
  std::vector<float> twice(once.size());
  for (std::int64_t i = 0; i < side; ++i) {
    std::array<double, side> row{};
    for (std::int64_t k = std::max<std::int64_t>(0, i - taps / 2);
         k <= std::min(side - 1, i + taps / 2); ++k)
      for (std::int64_t j = 0; j < side; ++j) row[j] += once[i * side + k] * once[k * side + j];
    for (std::int64_t j = 0; j < side; ++j) twice[i * side + j] = static_cast<float>(row[j]);
  }
  return twice;
}

// Products keep f32's whole mantissa while one exists: TF32 would leave steps of half a level where
// a face shows through fully.
class WholeProducts {
 public:
  WholeProducts() : before_(tf32_allowed()) { allow_tf32(false); }
  ~WholeProducts() { allow_tf32(before_); }
  WholeProducts(const WholeProducts&) = delete;
  WholeProducts& operator=(const WholeProducts&) = delete;

 private:
  bool before_;
};

// Where the pixels of the patch's rectangle lie in the face, as cv::remap takes it: whole pixels,
// and 32nds of one between them. These are the places that cv::warpAffine finds for all of the
// frame: its steps are rounded from the frame's corner on, and would fall otherwise from another.
std::pair<cv::Mat, cv::Mat> places_of(const AffineMap& back, const FacePatch& p) {
  constexpr int fraction = cv::INTER_TAB_SIZE;  // 32
  constexpr double step = 1024;
  cv::Matx23d m;
  cv::invertAffineTransform(cv::Matx23d(back.m.data()), m);
  cv::Mat places(p.height, p.width, CV_16SC2), between(p.height, p.width, CV_16UC1);
  constexpr int shift = 5, half = 1 << (shift - 1);  // from 1024ths to 32nds, rounded
  const auto at = [&](int axis, int x, int y) {
    const int start = cv::saturate_cast<int>((m(axis, 1) * y + m(axis, 2)) * step) + half;
    return (start + cv::saturate_cast<int>(m(axis, 0) * x * step)) >> shift;
  };
  for (int y = 0; y < p.height; ++y)
    for (int x = 0; x < p.width; ++x) {
      const int u = at(0, p.x + x, p.y + y), v = at(1, p.x + x, p.y + y);
      places.at<cv::Vec2s>(y, x) = {cv::saturate_cast<short>(u >> shift),
                                    cv::saturate_cast<short>(v >> shift)};
      between.at<std::uint16_t>(y, x) =
          static_cast<std::uint16_t>((v & (fraction - 1)) * fraction + (u & (fraction - 1)));
    }
  return {places, between};
}

}  // namespace

std::vector<double> face_mask(std::span<const std::uint8_t> classes) {
  WEFT_ASSERT(std::ssize(classes) == side * side);
  static const std::vector<float> blur = with_opencv(blur_matrix);
  const auto shown = [](std::uint8_t c) { return c != 0 && c != 14 && c < 16; };
  std::vector<float> hard(classes.size());
  std::ranges::transform(classes, hard.begin(), [&](std::uint8_t c) { return shown(c); });
  const Shape square{side, side};
  const Tensor g = Tensor::from_host(std::span<const float>(blur), square);
  Tensor half = Tensor::empty(square, DType::f32), soft = Tensor::empty(square, DType::f32);
  {
    // A product takes its second factor transposed: G M^T, then G (G M^T)^T = G M G^T.
    const WholeProducts whole;
    ops::linear_forward(g, Tensor::from_host(std::span<const float>(hard), square), {}, {}, half);
    ops::linear_forward(g, half, {}, {}, soft);
  }
  if (ops::planning()) return {};
  const Tensor host = soft.to_host();
  std::vector<double> mask(classes.size());
  // The rounding of f32 must not show where the mask is all or nothing: levels are cut, not
  // rounded, when a face is pasted.
  constexpr double rounding = 1e-5;
  for (std::int64_t y = border; y < side - border; ++y)
    for (std::int64_t x = border; x < side - border; ++x) {
      const double v = host.span<float>()[y * side + x];
      mask[y * side + x] = v < rounding ? 0 : v > 1 - rounding ? 1 : v;
    }
  return mask;
}

std::optional<FacePatch> make_patch(std::span<const std::uint8_t> face,
                                    std::span<const double> mask, const AffineMap& back,
                                    std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(std::ssize(face) == side * side * 3 && std::ssize(mask) == side * side);
  // The mask is 0 from the border's last pixel on, and a pixel reaches one further.
  constexpr double low = border - 1, high = static_cast<double>(side - border);
  constexpr double infinite = std::numeric_limits<double>::infinity();
  double left = infinite, top = infinite, right = -infinite, bottom = -infinite;
  for (const auto& [x, y] : {std::pair{low, low}, {low, high}, {high, low}, {high, high}}) {
    const auto [u, v] = back(x, y);
    left = std::min(left, u), right = std::max(right, u);
    top = std::min(top, v), bottom = std::max(bottom, v);
  }
  left = std::max(std::floor(left) - 1, 0.0), top = std::max(std::floor(top) - 1, 0.0);
  right = std::min(std::ceil(right) + 1, static_cast<double>(width - 1));
  bottom = std::min(std::ceil(bottom) + 1, static_cast<double>(height - 1));
  // Written so that what is not finite is outside.
  if (!(right >= left && bottom >= top)) return std::nullopt;
  FacePatch p{static_cast<int>(left),
              static_cast<int>(top),
              static_cast<int>(right - left) + 1,
              static_cast<int>(bottom - top) + 1,
              {},
              {}};
  const std::size_t pixels = static_cast<std::size_t>(p.width) * static_cast<std::size_t>(p.height);
  p.rgb.resize(pixels * 3);
  p.alpha.resize(pixels);
  with_opencv([&] {
    const auto [places, between] = places_of(back, p);
    const auto warp = [&](const void* from, void* to, int type) {
      const cv::Mat in(face_side, face_side, type, const_cast<void*>(from));
      cv::Mat out(p.height, p.width, type, to);
      cv::remap(in, out, places, between, cv::INTER_LINEAR);
    };
    warp(face.data(), p.rgb.data(), CV_8UC3);
    warp(mask.data(), p.alpha.data(), CV_64FC1);
  });
  return p;
}

void paste(std::span<const FacePatch> patches, ImageFile& frame) {
  // A row at a time, so that only it is ever in f64.
  std::vector<double> line(frame.width * 3);
  for (std::int64_t y = 0; y < frame.height; ++y) {
    const auto meets = [&](const FacePatch& p) { return y >= p.y && y < p.y + p.height; };
    if (std::ranges::none_of(patches, meets)) continue;
    std::uint8_t* const row = frame.values.data() + y * frame.width * 3;
    std::copy_n(row, line.size(), line.data());
    for (const FacePatch& p : patches) {
      if (!meets(p)) continue;
      const auto first = static_cast<std::size_t>(y - p.y) * static_cast<std::size_t>(p.width);
      for (std::size_t x = 0; x < static_cast<std::size_t>(p.width); ++x) {
        const double a = p.alpha[first + x];
        double* to = line.data() + (static_cast<std::size_t>(p.x) + x) * 3;
        for (std::size_t c = 0; c < 3; ++c)
          to[c] = a * p.rgb[(first + x) * 3 + c] + (1 - a) * to[c];
      }
    }
    std::ranges::transform(line, row, [](double v) { return static_cast<std::uint8_t>(v); });
  }
}

ImageFile doubled_frame(const ImageFile& frame) {
  ImageFile to{2 * frame.height, 2 * frame.width, {}};
  to.values.resize(frame.values.size() * 4);
  with_opencv([&] {
    const cv::Mat in(static_cast<int>(frame.height), static_cast<int>(frame.width), CV_8UC3,
                     const_cast<std::uint8_t*>(frame.values.data()));
    cv::Mat out(static_cast<int>(to.height), static_cast<int>(to.width), CV_8UC3, to.values.data());
    cv::resize(in, out, out.size(), 0, 0, cv::INTER_LANCZOS4);
  });
  return to;
}

}  // namespace weft
