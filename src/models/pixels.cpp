#include "models/pixels.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

std::int64_t round_to_pixels(std::span<const float> values, std::span<std::uint8_t> pixels) {
  constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
  std::int64_t bad = none;
#pragma omp parallel for schedule(static) reduction(min : bad)
  for (std::int64_t i = 0; i < std::ssize(values); ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (!std::isfinite(values[at])) {
      bad = std::min(bad, i);
      continue;
    }
    const float unit = (std::clamp(values[at], -1.0f, 1.0f) + 1.0f) / 2.0f;
    pixels[at] = static_cast<std::uint8_t>(unit * 255.0f + 0.5f);
  }
  return bad == none ? -1 : bad;
}

}  // namespace weft
