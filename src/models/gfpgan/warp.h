// Where a face is in a frame, in the square in which it is restored (docs/models/gfpgan.md,
// Alignment).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "media/image_file.h"

namespace weft {

// (x, y) of the left eye, the right eye, the nose and the corners of the mouth, left and right as
// seen in the picture, in pixels; (0, 0) is the middle of the first.
using FacePoints = std::array<std::array<float, 2>, 5>;

// (x, y) -> (m[0] x + m[1] y + m[2], m[3] x + m[4] y + m[5]).
struct AffineMap {
  std::array<double, 6> m{1, 0, 0, 0, 1, 0};
  std::array<double, 2> operator()(double x, double y) const {
    return {m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]};
  }
};

// Side of the square.
constexpr int face_side = 512;
// Where the five points lie in it: means over FFHQ's aligned faces.
const FacePoints& face_template();

// The similarity (turn, scale and shift) that takes `points` to the template: a least median of
// squares, then least squares over the points that fit it, with the subsets and thresholds of
// OpenCV's estimateAffinePartial2D(LMEDS) for five points. nullopt where none exists: points that
// are not finite, or in one place.
std::optional<AffineMap> face_transform(const FacePoints& points);

// The square's pixels u8 [512,512,3], bilinear; grey where the frame ends.
std::vector<std::uint8_t> warp_face(const ImageFile& frame, const AffineMap& transform);

// The way back, into the frame at `scale` times its size.
AffineMap back_transform(const AffineMap& transform, int scale);

}  // namespace weft
