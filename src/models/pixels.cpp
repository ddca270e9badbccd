#include "models/pixels.h"

#include "core/error.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

Tensor pixel_frames(const Tensor& clip, std::int64_t first, std::int64_t count, std::int64_t height,
                    std::int64_t width) {
  const std::int64_t frame = height * width * 3;
  Tensor planes = Tensor::empty({3, count, height, width}, DType::f32);
  Tensor frames = Tensor::empty({1, count, height, width, 3}, DType::f32);
  if (clip.defined()) {  // while planning, only the allocations count
    const Tensor part = clip.view({clip.numel()}).slice(first * frame, (first + count) * frame);
    ops::frames_to_latent(part.view({count, height, width, 3}), planes);
    ops::to_channels_last(planes.view({1, 3, count, height, width}), frames);
  }
  return frames.view({count, height, width, 3});
}

std::int64_t pixels_of(const Tensor& frames, std::span<std::uint8_t> pixels) {
  WEFT_ASSERT(pixels.size() == static_cast<std::size_t>(frames.numel()));
  const bool gpu = frames.device() == DeviceKind::cuda;
  // On the CPU the caller's memory takes the result directly.
  Tensor rounded = gpu ? Tensor::empty(frames.shape(), DType::u8)
                       : Tensor::borrow(pixels.data(), frames.shape(), DType::u8);
  Tensor bad = Tensor::empty({frames.dim(0)}, DType::i32);
  ops::fill_zero(bad);
  ops::frames_to_pixels(frames, rounded, bad);
  if (gpu) device_runtime().download(pixels.data(), rounded.raw(), pixels.size());
  const Tensor counts = bad.to_host();
  for (std::int64_t t = 0; t < bad.numel(); ++t)
    if (counts.data<std::int32_t>()[t] > 0) return t;
  return -1;
}

}  // namespace weft
