#include "models/images.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {

Tensor picture_tensor(const ImageFile& picture) {
  WEFT_ASSERT(std::ssize(picture.values) == 3 * picture.height * picture.width);
  return Tensor::from_host(std::span<const std::uint8_t>(picture.values),
                           {1, picture.height, picture.width, 3});
}

Tensor network_pixels(const Tensor& pictures, const ops::PixelScale& scale, DType dtype) {
  const std::int64_t N = pictures.dim(0), H = pictures.dim(1), W = pictures.dim(2);
  std::vector<std::int32_t> whole;
  for (std::int64_t i = 0; i < N; ++i)
    whole.insert(whole.end(), {static_cast<std::int32_t>(H), static_cast<std::int32_t>(W)});
  Tensor y = Tensor::empty({N, 1, H, W, 3}, dtype);
  ops::normalise_images(pictures, Tensor::from_host(std::span<const std::int32_t>(whole), {N, 2}),
                        scale, y);
  return y;
}

Tensor join_channels(const Tensor& a, const Tensor& b) {
  const Shape& s = a.shape();
  Tensor y = Tensor::empty({s[0], s[1], s[2], s[3], s[4] + b.dim(4)}, a.dtype());
  ops::put_channels(a, 0, y);
  ops::put_channels(b, s[4], y);
  return y;
}

Tensor halve(const Tensor& x) {
  const Shape& s = x.shape();
  Tensor y = Tensor::empty({s[0], s[1], s[2] / 2, s[3] / 2, s[4]}, x.dtype());
  ops::average_pool_2x2_forward(x, y);
  return y;
}

void check_finite(std::span<const float> values, const char* network) {
  WEFT_CHECK(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }), Exit::data,
             "check that the weights are of this network and not damaged",
             "{} gave a value that is not finite", network);
}

}  // namespace weft
