// Pixels as footage has them to what a codec takes.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/tensor.h"

namespace weft {

// Frames [first, first + count) of a clip of pixels, u8 [.,height,width,3] on this rank's device
// (any shape of that size), as f32 [count,height,width,3] in [-1,1] in the current arena. While
// planning, `clip` may be undefined.
Tensor pixel_frames(const Tensor& clip, std::int64_t first, std::int64_t count, std::int64_t height,
                    std::int64_t width);

// And back: frames f32 [count,H,W,3] as a codec decodes them to `pixels` in host memory, converted
// on their device (ops::frames_to_pixels). The first frame that has a value which is not finite;
// otherwise -1.
std::int64_t pixels_of(const Tensor& frames, std::span<std::uint8_t> pixels);

}  // namespace weft
