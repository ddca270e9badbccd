#include "models/stdit3/clip_latents.h"

#include <algorithm>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

// Factors and terms that turn a drawn latent into the model's input (docs/models/video_vae.md,
// Scaling and normalisation).
Tensor normalising(const Bucket& bucket) {
  const std::size_t C = bucket.scale.size();
  std::vector<float> both(2 * C);
  for (std::size_t c = 0; c < C; ++c) {
    both[c] = 1.0f / bucket.scale[c];
    both[C + c] = -bucket.shift[c] / bucket.scale[c];
  }
  return Tensor::from_host(std::span<const float>(both), {2, static_cast<std::int64_t>(C)});
}

}  // namespace

ClipLatents::ClipLatents(const Deck& deck)
    : deck_(deck), seed_(static_cast<std::uint64_t>(deck.run.seed)) {
  if (deck.get<Stdit3Deck>().in_channels == TemporalVae::latent_channels &&
      !deck.get<VaeDeck>().weights.empty())
    vae_ = std::make_unique<VideoVae>(deck.get<VaeDeck>());
}

void ClipLatents::check(const Bucket& bucket) const {
  const std::int64_t channels = deck_.get<Stdit3Deck>().in_channels, has = seen(bucket).channels;
  const bool pixels = bucket.dtype == DType::u8, latents = channels == TemporalVae::latent_channels;
  WEFT_CHECK(
      has == channels, Exit::usage,
      !pixels   ? "set model.in_channels to the latents' channels"
      : latents ? "make latents with `weft encode`, or name a VAE with vae.weights to encode while "
                  "training"
                : "training on pixels wants model.in_channels = 3",
      "bucket {} has {} channels, model.in_channels = {}", bucket.name, has, channels);
  WEFT_CHECK(!encodes(bucket) || !deck_.get<VaeDeck>().scale.empty(), Exit::usage,
             "take the values that weft encode or weft reconstruct prints, or train on what weft "
             "encode stores",
             "vae.scale is empty: latents that are encoded while training cannot be normalised");
}

void ClipLatents::load(std::span<const Bucket> buckets) {
  const bool wanted =
      std::any_of(buckets.begin(), buckets.end(), [this](const Bucket& b) { return encodes(b); });
  if (!wanted) return;
  vae_->params().allocate_for_inference(deck_.get<VaeDeck>().dtype == "bf16");
  load_weights(deck_.get<VaeDeck>().weights, vae_->params(), vae_weight_names());
}

std::size_t ClipLatents::weight_bytes() const {
  return vae_ ? vae_->params().inference_bytes(deck_.get<VaeDeck>().dtype == "bf16") : 0;
}

Bucket ClipLatents::seen(const Bucket& bucket) const {
  Bucket b = bucket;
  b.channels = bucket.model_channels();
  if (!encodes(bucket)) return b;
  b.channels = TemporalVae::latent_channels;
  b.frames = vae_->latent_frames(bucket.frames);
  b.height = bucket.height / vae_->pixels_a_latent();
  b.width = bucket.width / vae_->pixels_a_latent();
  return b;
}

void ClipLatents::make(const Bucket& bucket, const Tensor& clip, std::uint64_t step,
                       std::uint64_t sample, Tensor& x0) const {
  const Shape stored{bucket.channels, bucket.frames, bucket.height, bucket.width};
  const bool encode = encodes(bucket);
  // 1. Pixels that the model trains on directly, or stored latents: only converted.
  if (bucket.dtype == DType::u8 && !encode) {
    if (clip.defined())
      ops::frames_to_latent(clip.view({stored[1], stored[2], stored[3], stored[0]}), x0);
    return;
  }
  const auto as_stored = [&](DType dtype) {
    return Tensor::borrow(clip.raw(), stored, dtype, clip.device());
  };
  if (!encode && !bucket.moments) {
    if (clip.defined()) ops::convert(as_stored(bucket.dtype), x0);
    return;
  }

  // 2. Moments: from the VAE, or as stored.
  Tensor moments;
  if (encode) {
    const VideoVae::Noise noise{seed_, sample};
    moments = vae_->encode_moments(
        bucket.frames, bucket.height, bucket.width,
        [&](std::int64_t first, std::int64_t count) {
          return pixel_frames(clip, first, count, bucket.height, bucket.width);
        },
        &noise);
  } else if (bucket.dtype == DType::f32) {
    if (clip.defined()) moments = as_stored(DType::f32);
  } else {
    moments = Tensor::empty(stored, DType::f32);
    if (clip.defined()) ops::convert(as_stored(DType::f16), moments);
  }
  // 3. A latent drawn from them, normalised.
  const Shape one{1, x0.dim(0), x0.dim(1), x0.dim(2), x0.dim(3)};
  Tensor eps = Tensor::empty(one, DType::f32), z = x0.view(one);
  const Tensor affine = encode ? vae_->normalised() : normalising(bucket);
  if (!clip.defined()) return;  // planning: everything that takes memory is allocated by now
  ops::fill_normal(seed_, static_cast<int>(Purpose::latent), step, sample, eps);
  ops::posterior_draw_forward(moments.view({1, 2 * one[1], one[2], one[3], one[4]}), eps, affine,
                              ops::Channels::first, z);
}

}  // namespace weft
