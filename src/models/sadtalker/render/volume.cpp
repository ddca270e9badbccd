#include "models/sadtalker/render/volume.h"

#include <span>
#include <vector>

#include "ops/layout.h"
#include "ops/resize.h"

namespace weft {

Tensor channels_to_depth(const Tensor& x, std::int64_t depth) {
  const std::int64_t N = x.dim(0), h = x.dim(2), w = x.dim(3), C = x.dim(4) / depth;
  Tensor first = Tensor::empty({N, C * depth, 1, h, w}, x.dtype());
  ops::to_channels_first(x, first);
  Tensor y = Tensor::empty({N, depth, h, w, C}, x.dtype());
  ops::to_channels_last(first.view({N, C, depth, h, w}), y);
  return y;
}

Tensor picture_values(const Tensor& pictures, DType dtype) {
  const std::int64_t N = pictures.dim(0), H = pictures.dim(1), W = pictures.dim(2);
  std::vector<std::int32_t> whole;
  for (std::int64_t i = 0; i < N; ++i)
    whole.insert(whole.end(), {static_cast<std::int32_t>(H), static_cast<std::int32_t>(W)});
  Tensor y = Tensor::empty({N, 1, H, W, 3}, dtype);
  ops::normalise_images(pictures, Tensor::from_host(std::span<const std::int32_t>(whole), {N, 2}),
                        {255.0f, {0, 0, 0}, {1, 1, 1}, false}, y);
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

}  // namespace weft
