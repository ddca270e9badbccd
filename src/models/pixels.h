// Pixels as footage has them to what a VAE takes.
#pragma once

#include <cstdint>
#include <span>

#include "core/tensor.h"

namespace weft {

// Frames [first, first + count) of a clip of pixels, u8 [.,height,width,3] on this rank's device (any shape of that size), as
// f32 [count,height,width,3] in [-1,1] in the current arena. While planning, `clip` may be undefined.
Tensor pixel_frames(const Tensor& clip, std::int64_t first, std::int64_t count, std::int64_t height,
                    std::int64_t width);

// And back: values in [-1,1], clamped, to 256 levels. Where one of them is not finite, the first such place; otherwise -1.
std::int64_t round_to_pixels(std::span<const float> values, std::span<std::uint8_t> pixels);

}  // namespace weft
