// Restored faces back into their frame: the mask that says where, and the blend
// (docs/models/gfpgan.md, Paste).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "models/gfpgan/warp.h"
#include "tensor/tensor.h"

namespace weft {

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
