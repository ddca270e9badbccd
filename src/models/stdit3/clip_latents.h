// From clips, as a store holds them, to what STDiT3 trains on: pixels as they are, latents as they
// are or drawn from stored moments, or pixels that a VAE encodes on the way.
#pragma once

#include <memory>
#include <span>

#include "config/deck.h"
#include "data/clip_source.h"
#include "models/video_vae/video_vae.h"

namespace weft {

class ClipLatents {
 public:
  // With model.in_channels = 4 and vae.weights, buckets of pixels are encoded. Enough to plan with.
  explicit ClipLatents(const Deck& deck);
  // Exit::usage unless the bucket, as the model sees it, has model.in_channels channels.
  void check(const Bucket& bucket) const;
  // Reads the VAE if one of the buckets needs it.
  void load(std::span<const Bucket> buckets);

  // Whether its clips are pixels that the VAE encodes, and the bytes of the VAE's weights.
  bool encodes(const Bucket& b) const { return vae_ != nullptr && b.dtype == DType::u8; }
  std::size_t weight_bytes() const;

  // The bucket as the model sees it: frames, height, width and channels of the latents.
  Bucket seen(const Bucket& bucket) const;

  // Writes x0 f32 [C,T,H,W] from `clip`, u8, a whole clip's bytes on this rank's device. Noise of
  // posteriors is a function of (seed, sample) in the 2D VAE, as in `weft encode`, and of (seed,
  // step, sample) where a latent is drawn: the same whether the moments were stored or are made
  // here. While planning, `clip` may be undefined.
  void make(const Bucket& bucket, const Tensor& clip, std::uint64_t step, std::uint64_t sample,
            Tensor& x0) const;

 private:
  const Deck& deck_;
  std::uint64_t seed_;
  std::unique_ptr<VideoVae> vae_;
};

}  // namespace weft
