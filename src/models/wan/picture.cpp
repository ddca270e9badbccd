#include "models/wan/picture.h"

#include <cmath>
#include <vector>

#include "ops/pointwise.h"

namespace weft {

// Both fits in the original's order of operations in f64, whose rounding decides the size: 832x480
// at its own area is 832x464 when it is stretched.
PictureFit stretched_fit(std::int64_t width, std::int64_t height, std::int64_t area,
                         std::int64_t latent, std::int64_t patch) {
  const double aspect = static_cast<double>(height) / static_cast<double>(width);
  const auto side = [&](double pixels) {
    const auto l = static_cast<double>(latent), p = static_cast<double>(patch);
    return static_cast<std::int64_t>(std::floor(std::floor(std::sqrt(pixels) / l) / p) * p * l);
  };
  PictureFit fit;
  fit.height = fit.scaled_height = side(static_cast<double>(area) * aspect);
  fit.width = fit.scaled_width = side(static_cast<double>(area) / aspect);
  return fit;
}

PictureFit covering_fit(std::int64_t width, std::int64_t height, std::int64_t area,
                        std::int64_t unit) {
  const auto w = static_cast<double>(width), h = static_cast<double>(height);
  const auto pixels = static_cast<double>(area), u = static_cast<double>(unit);
  const double ratio = w / h, wide = std::sqrt(pixels * ratio), high = pixels / wide;
  const auto down = [&](double side) { return std::floor(side / u) * u; };
  const double w1 = down(wide), h1 = down(pixels / w1), h2 = down(high), w2 = down(pixels / h2);
  const auto distance = [&](double q) { return std::max(ratio / q, q / ratio); };
  const bool width_first = distance(w1 / h1) < distance(w2 / h2);
  PictureFit fit;
  fit.width = static_cast<std::int64_t>(width_first ? w1 : w2);
  fit.height = static_cast<std::int64_t>(width_first ? h1 : h2);
  const double scale =
      std::max(static_cast<double>(fit.width) / w, static_cast<double>(fit.height) / h);
  fit.scaled_width = static_cast<std::int64_t>(std::nearbyint(w * scale));
  fit.scaled_height = static_cast<std::int64_t>(std::nearbyint(h * scale));
  fit.left = (fit.scaled_width - fit.width) / 2;
  fit.top = (fit.scaled_height - fit.height) / 2;
  return fit;
}

Tensor stretched(const RgbView& picture, const PictureFit& fit) {
  std::vector<float> pixels(static_cast<std::size_t>(fit.height * fit.width * 3));
  bicubic_resize(picture, fit.height, fit.width, pixels.data());
  return Tensor::from_host(std::span<const float>(pixels), {1, fit.height, fit.width, 3});
}

Tensor covering(const RgbView& picture, const PictureFit& fit, std::vector<std::uint8_t>* bytes) {
  std::vector<std::uint8_t> cut(static_cast<std::size_t>(fit.height * fit.width * 3));
  pillow_resize_window(picture, fit.scaled_height, fit.scaled_width, PillowFilter::lanczos,
                       {fit.top, fit.left, fit.height, fit.width}, cut.data(), fit.width * 3);
  std::vector<float> pixels(cut.size());
  for (std::size_t i = 0; i < cut.size(); ++i) pixels[i] = static_cast<float>(cut[i]) / 127.5f - 1;
  if (bytes != nullptr) *bytes = std::move(cut);
  return Tensor::from_host(std::span<const float>(pixels), {1, fit.height, fit.width, 3});
}

Tensor picture_condition(VideoCodec& codec, const Tensor& picture, std::int64_t frames) {
  constexpr std::int64_t mask_channels = 4;
  const std::int64_t height = picture.dim(1), width = picture.dim(2);
  const auto source = [&](std::int64_t first, std::int64_t count) {
    Tensor clip = Tensor::empty({count, height, width, 3}, DType::f32);
    ops::fill_zero(clip);
    Tensor begin = clip.slice(0, 1);
    if (first == 0) ops::convert(picture, begin);
    return clip;
  };
  const Tensor z = codec.encode(codec.whole(frames), height, width, source, nullptr);
  const std::int64_t C = z.dim(1), T = z.dim(2), pixels = z.dim(3) * z.dim(4);
  Tensor y = Tensor::empty({1, mask_channels + C, T, z.dim(3), z.dim(4)}, DType::f32);
  const Tensor channels = y.view({mask_channels + C, T * pixels});
  Tensor mask = channels.slice(0, mask_channels),
         latents = channels.slice(mask_channels, mask_channels + C);
  std::vector<float> ones(static_cast<std::size_t>(mask_channels * T * pixels));
  for (std::int64_t i = 0; i < std::ssize(ones); ++i)
    ones[static_cast<std::size_t>(i)] = i % (T * pixels) < pixels ? 1.0f : 0.0f;
  if (!Arena::current().is_planning()) mask.set(std::span<const float>(ones));
  ops::convert(z.view({C, T * pixels}), latents);
  return y;
}

}  // namespace weft
