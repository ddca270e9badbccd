// Small VAEs and clips for them.
#pragma once

#include <cstring>

#include "core/error.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "ops/pointwise.h"
#include "tests/nn/fixture.h"

namespace weft::test {

// Two pixels and four frames a latent; chunks of five frames, which are two latents.
inline VaeDeck tiny_vae() {
  VaeDeck d;
  d.spatial_channels = {8, 16};
  d.spatial_res_blocks = 1;
  d.spatial_groups = 4;
  d.filters = 8;
  d.num_res_blocks = 1;
  d.channel_multipliers = {1, 1, 2};
  d.temporal_downsample = {true, true};
  d.num_groups = 4;
  d.micro_frame_size = 5;
  d.micro_batch_size = 2;
  return d;
}

// Randomised as the models of other tests are, but with convolutions that keep the size of what
// goes through them.
inline void randomise_vae(ParameterTable& table, std::uint64_t seed) {
  table.initialise(seed);
  std::uint64_t stream = 100 * seed;
  for (const auto& p : table.all()) {
    const bool gain = p->shape.rank() == 1 && p->init.a == 1.0f;
    const double fan_in = static_cast<double>(p->shape.numel() / p->shape[0]);
    const Vec v = random_values(p->shape.numel(), ++stream,
                                p->shape.rank() > 1 ? 1 / std::sqrt(fan_in) : 0.2);
    for (std::size_t i = 0; i < v.size(); ++i)
      p->value.data<float>()[i] = static_cast<float>((gain ? 1.0 : 0.0) + v[i]);
  }
  table.refresh_working();
}

// A video VAE with values, or only planned with.
struct TinyVae {
  explicit TinyVae(const VaeDeck& deck = tiny_vae(), bool gradients = false) : vae(deck) {
    vae.params().allocate(1 << 16, deck.dtype == "bf16", gradients);
    randomise_vae(vae.params(), 3);
  }
  VideoVae vae;
};

// Frames of a clip whose frame t is the same whoever asks for it.
struct Clip {
  std::int64_t frames, height, width;
  Tensor operator()(std::int64_t first, std::int64_t count) const {
    Tensor t = Tensor::empty({count, height, width, 3}, DType::f32);
    if (Arena::current().is_planning()) return t;
    for (std::int64_t f = 0; f < count; ++f) {
      const Vec v =
          random_values(height * width * 3, 4000 + static_cast<std::uint64_t>(first + f), 0.5);
      for (std::size_t i = 0; i < v.size(); ++i)
        t.data<float>()[f * height * width * 3 + std::int64_t(i)] = static_cast<float>(v[i]);
    }
    return t;
  }
};

inline Tensor encode(VideoVae& vae, const Clip& clip, const VideoVae::Noise* noise = nullptr) {
  return vae.encode_moments(
      clip.frames, clip.height, clip.width,
      [&](std::int64_t first, std::int64_t count) { return clip(first, count); }, noise);
}

// Frames [T,H,W,3] in one tensor.
inline Tensor decode(VideoVae& vae, const Tensor& latent, std::int64_t frames) {
  const std::int64_t side = vae.pixels_a_latent();
  Tensor all = Tensor::empty({frames, latent.dim(3) * side, latent.dim(4) * side, 3}, DType::f32);
  std::int64_t next = 0;
  vae.decode(latent, frames, [&](std::int64_t first, const Tensor& part) {
    EXPECT_EQ(first, next);
    next += part.dim(0);
    if (Arena::current().is_planning()) return;
    std::memcpy(all.slice(first, first + part.dim(0)).raw(), part.raw(), part.bytes());
  });
  EXPECT_EQ(next, frames);
  return all;
}

// Frames [first, last) of latents [1,C,T,h,w].
inline Tensor frames_of(const Tensor& latent, std::int64_t first, std::int64_t last) {
  const Shape& s = latent.shape();
  Tensor part = Tensor::empty({1, s[1], last - first, s[3], s[4]}, DType::f32);
  const std::int64_t frame = s[3] * s[4];
  for (std::int64_t c = 0; c < s[1]; ++c)
    std::memcpy(part.data<float>() + c * (last - first) * frame,
                latent.data<float>() + (c * s[2] + first) * frame,
                static_cast<std::size_t>((last - first) * frame) * sizeof(float));
  return part;
}

}  // namespace weft::test
