#include "models/pixels.h"

#include <algorithm>

#include "core/error.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

void copy_frames(const Tensor& from, std::int64_t from_frame, std::int64_t count, Tensor& to,
                 std::int64_t to_frame) {
  const auto rows = [](const Tensor& t) {
    return Shape{t.dim(1), t.dim(2), t.dim(3) * t.dim(4), 1};
  };
  Tensor target = to.view(rows(to));
  ops::copy_tokens(from.view(rows(from)), {count, to.dim(3) * to.dim(4), from_frame, 0, to_frame},
                   target);
}

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

VideoCodec::Part PixelCodec::part_with(std::int64_t frames, std::int64_t first,
                                       std::int64_t last) const {
  WEFT_ASSERT(0 <= first && first < last && last <= frames);
  return {frames, first, last - first, first, last - first};
}

// [T,H,W,3] -> [3,T,H,W], a few frames at a time.
Tensor PixelCodec::encode(const Part& part, std::int64_t height, std::int64_t width,
                          const FrameSource& source, const Noise*) {
  const std::int64_t size = height * width, at_once = frames_at_once(part.frames);
  Tensor latent = Tensor::empty({1, pixel_channels, part.frames, height, width}, DType::f32);
  Tensor all = latent.view({pixel_channels, part.frames, size, 1});
  for (std::int64_t done = 0; done < part.frames; done += at_once) {
    const std::int64_t n = std::min(at_once, part.frames - done);
    Tensor planes = Tensor::empty({1, pixel_channels, n, height, width}, DType::f32);
    ops::to_channels_first(
        source(part.first_frame + done, n).view({1, n, height, width, pixel_channels}), planes);
    ops::copy_tokens(planes.view({pixel_channels, n, size, 1}), {n, size, 0, 0, done}, all);
  }
  return latent;
}

void PixelCodec::decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) {
  WEFT_ASSERT(latent.dim(1) == pixel_channels && latent.dim(2) == frames);
  const std::int64_t height = latent.dim(3), width = latent.dim(4), size = height * width;
  const Tensor all = latent.view({pixel_channels, frames, size, 1});
  for (std::int64_t first = 0; first < frames; first += frames_at_once(frames)) {
    const std::int64_t n = std::min(frames_at_once(frames), frames - first);
    Tensor planes = Tensor::empty({1, pixel_channels, n, height, width}, DType::f32);
    Tensor rows = planes.view({pixel_channels, n, size, 1});
    ops::copy_tokens(all, {n, size, first}, rows);
    Tensor pixels = Tensor::empty({1, n, height, width, pixel_channels}, DType::f32);
    ops::to_channels_last(planes, pixels);
    sink(first, pixels.view({n, height, width, pixel_channels}));
  }
}

Tensor channel_affine(std::span<const float> factors, std::span<const float> terms) {
  std::vector<float> both(factors.begin(), factors.end());
  both.insert(both.end(), terms.begin(), terms.end());
  Tensor t = Tensor::persistent({2, std::ssize(factors)}, DType::f32);
  t.set(std::span<const float>(both));
  return t;
}

}  // namespace weft
