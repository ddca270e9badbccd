#include "models/face/pixels.h"

#include "core/error.h"
#include "ops/pointwise.h"

namespace weft {

Tensor picture_tensor(const ImageFile& picture) {
  WEFT_ASSERT(std::ssize(picture.values) == 3 * picture.height * picture.width);
  return Tensor::from_host(std::span<const std::uint8_t>(picture.values),
                           {1, picture.height, picture.width, 3});
}

Tensor network_pixels(const Tensor& picture, const ops::PixelScale& scale, DType dtype) {
  const std::int64_t H = picture.dim(1), W = picture.dim(2);
  const std::int32_t whole[] = {static_cast<std::int32_t>(H), static_cast<std::int32_t>(W)};
  Tensor y = Tensor::empty({1, 1, H, W, 3}, dtype);
  ops::normalise_images(picture, Tensor::from_host(std::span<const std::int32_t>(whole), {1, 2}),
                        scale, y);
  return y;
}

Tensor in_f32(const Tensor& t) {
  if (t.dtype() == DType::f32) return t;
  Tensor y = Tensor::empty(t.shape(), DType::f32);
  ops::convert(t, y);
  return y;
}

}  // namespace weft
