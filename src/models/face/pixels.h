// Pictures on their way into a network, and values on their way out of one of either type.
#pragma once

#include "media/image_file.h"
#include "ops/layout.h"
#include "tensor/tensor.h"

namespace weft {

// u8 [1,H,W,3] in the current arena.
Tensor picture_tensor(const ImageFile& picture);
// [1,1,H,W,3] of that type from a picture u8 [1,H,W,3].
Tensor network_pixels(const Tensor& picture, const ops::PixelScale& scale, DType dtype);
// The tensor itself where it is f32.
Tensor in_f32(const Tensor& t);

}  // namespace weft
