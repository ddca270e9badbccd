// A face on its way out of a frame into the square in which it is restored, and back
// (docs/models/gfpgan.md, Alignment, Paste).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "media/image_file.h"
#include "tensor/tensor.h"

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

// How much of the restored face shows, in 0 to 1, for each pixel of its square: f64 [512,512]. From
// ParseNet's classes u8 [512,512]: the face and what belongs to it against background, hat, neck
// and clothes, softened by two Gaussians (101x101, deviation 11), and 0 in the outermost 10 pixels.
// Takes 4 MiB of the arena, which is this rank's device's.
std::vector<double> face_mask(std::span<const std::uint8_t> classes);

// A restored face as it lies over the frame: the rectangle of the frame that it touches.
struct FacePatch {
  int x = 0, y = 0, width = 0, height = 0;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
  std::vector<double> alpha;      // [height, width]
};

// Face u8 [512,512,3] and mask f64 [512,512] taken to a frame of that size. No pixel outside of the
// rectangle would show them. nullopt where the face lies outside of the frame.
std::optional<FacePatch> make_patch(std::span<const std::uint8_t> face,
                                    std::span<const double> mask, const AffineMap& back,
                                    std::int64_t height, std::int64_t width);

// The frame with the patches over it, one after the other, in f64 as the original blends; values
// are cut, not rounded, to whole ones. Pixels that no patch touches stay as they are.
void paste(std::span<const FacePatch> patches, ImageFile& frame);

// The frame at twice its size (Lanczos, 8x8 neighbours).
ImageFile doubled_frame(const ImageFile& frame);

}  // namespace weft
