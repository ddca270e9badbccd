#include "jobs/generate/pixel_codec.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/error.h"
#include "tensor/tensor.h"

namespace weft {

VideoCodec::Part PixelCodec::part_with(std::int64_t frames, std::int64_t first,
                                       std::int64_t last) const {
  WEFT_ASSERT(0 <= first && first < last && last <= frames);
  return {frames, first, last - first, first, last - first};
}

Tensor PixelCodec::encode(const Part& part, std::int64_t height, std::int64_t width,
                          const FrameSource& source, const Noise*) {
  // [T,H,W,3] -> [3,T,H,W]
  const std::int64_t frame = height * width, end = part.first_frame + part.frames;
  std::vector<float> latent(static_cast<std::size_t>(pixel_channels * part.frames * frame));
  for (std::int64_t first = part.first_frame; first < end; first += at_once_) {
    const std::int64_t count = std::min(at_once_, end - first);
    const Tensor frames = source(first, count).to_host();
    const float* from = frames.data<float>();
    for (std::int64_t c = 0; c < pixel_channels; ++c) {
      float* to = latent.data() + (c * part.frames + first - part.first_frame) * frame;
      for (std::int64_t i = 0; i < count * frame; ++i) to[i] = from[i * pixel_channels + c];
    }
  }
  return Tensor::from_host(std::span<const float>(latent),
                           {1, pixel_channels, part.frames, height, width});
}

void PixelCodec::decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) {
  WEFT_ASSERT(latent.dim(1) == pixel_channels && latent.dim(2) == frames);
  const std::int64_t height = latent.dim(3), width = latent.dim(4), frame = height * width;
  const Tensor on_host = latent.to_host();
  const float* from = on_host.data<float>();
  std::vector<float> pixels;
  for (std::int64_t first = 0; first < frames; first += at_once_) {
    const std::int64_t count = std::min(at_once_, frames - first);
    pixels.resize(static_cast<std::size_t>(count * frame * pixel_channels));
    for (std::int64_t c = 0; c < pixel_channels; ++c)
      for (std::int64_t i = 0; i < count * frame; ++i)
        pixels[static_cast<std::size_t>(i * pixel_channels + c)] =
            from[(c * frames + first) * frame + i];
    sink(first,
         Tensor::from_host(std::span<const float>(pixels), {count, height, width, pixel_channels}));
  }
}

std::int64_t PixelCodec::frames_at_once(std::int64_t frames) const {
  return std::min(frames, at_once_);
}

MemoryNeed PixelCodec::plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t micro_batch, std::size_t capacity) {
  return plan_decode(frames, height, width, micro_batch, capacity);
}

MemoryNeed PixelCodec::plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t micro_batch, std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const Tensor latent = Tensor::empty({1, pixel_channels, frames, height, width}, DType::f32);
  const Tensor piece = Tensor::empty({micro_batch, height, width, pixel_channels}, DType::f32);
  return arena->need();
}

}  // namespace weft
