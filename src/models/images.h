// Pictures on their way into a network that is only run, and values on their way out of one of
// either type.
#pragma once

#include <span>

#include "config/deck.h"
#include "media/image_file.h"
#include "ops/layout.h"
#include "tensor/tensor.h"

namespace weft {

// The type of activations: bf16 or f32, as model.dtype has it.
inline DType model_dtype(const Deck& deck) {
  return deck.model.dtype == "bf16" ? DType::bf16 : DType::f32;
}

// RGB in 0 to 1.
inline constexpr ops::PixelScale unit_scale{255.0f, {0, 0, 0}, {1, 1, 1}, false};

// u8 [1,H,W,3] in the current arena.
Tensor picture_tensor(const ImageFile& picture);
// [N,1,H,W,3] of that type from pictures u8 [N,H,W,3].
Tensor network_pixels(const Tensor& pictures, const ops::PixelScale& scale, DType dtype);
// [N,T,H,W,A+B]: the channels of `a` [N,T,H,W,A], then those of `b`.
Tensor join_channels(const Tensor& a, const Tensor& b);
// [N,T,H/2,W/2,C]: means of 2x2 pixels of x.
Tensor halve(const Tensor& x);

// Exit::data if a value of what a network, named for the message, gave is not finite.
void check_finite(std::span<const float> values, const char* network);

}  // namespace weft
