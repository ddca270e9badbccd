#include "models/pixels.h"

#include "ops/conv.h"
#include "ops/loss.h"

namespace weft {

Tensor pixel_frames(const Tensor& clip, std::int64_t first, std::int64_t count, std::int64_t height,
                    std::int64_t width) {
  const std::int64_t frame = height * width * 3;
  Tensor planes = Tensor::empty({3, count, height, width}, DType::f32);
  Tensor frames = Tensor::empty({1, count, height, width, 3}, DType::f32);
  if (clip.defined()) {
    const Tensor part = clip.view({clip.numel()}).slice(first * frame, (first + count) * frame);
    ops::frames_to_latent(part.view({count, height, width, 3}), planes);
    ops::to_channels_last(planes.view({1, 3, count, height, width}), frames);
  }
  return frames.view({count, height, width, 3});
}

}  // namespace weft
