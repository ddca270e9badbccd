// Wan's VAEs as a codec (docs/models/wan_vae.md, Chunks): clips in chunks of a few latent frames,
// each of which goes on where the one before ended, so that memory does not grow with the clip.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "models/interfaces.h"
#include "models/wan/options.h"
#include "models/wan/vae_networks.h"

namespace weft {

// Means and deviations of the released VAE's latents (docs/models/wan_vae.md, Normalisation).
struct LatentStatistics {
  std::vector<float> means, deviations;  // [C]
};
const LatentStatistics& wan_latents(const std::string& variant);

class WanVae : public VideoCodec {
 public:
  // params().allocate() is the caller's.
  explicit WanVae(const WanVaeDeck& config);

  std::string name() const override { return "Wan VAE"; }
  ParameterTable& params() override { return params_; }
  WeightNames weight_names() const override;
  bool bf16() const override { return config_.dtype == "bf16"; }
  std::set<std::string> tables() const override { return {"vae"}; }
  WeightsKey weights() const override { return {"vae.weights", config_.weights}; }
  std::string dtype_key() const override { return "vae.dtype"; }

  const CausalVae& networks() const { return networks_; }

  std::int64_t channels() const override { return config_.z_channels; }
  std::int64_t latent_frames(std::int64_t frames) const override {
    return frames > 0 ? networks_.latent_frames(frames) : 0;
  }
  std::int64_t coded_frames(std::int64_t frames) const override {
    return networks_.pixel_frames(networks_.latent_frames(frames));
  }
  std::int64_t pixels_a_latent() const override { return networks_.pixels_a_latent(); }
  // Exit::usage: every chunk needs those before it.
  std::int64_t chunk_pixels() const override;
  // The published means and deviations.
  Normalisation normalisation() const override;
  // From the clip's beginning on.
  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const override;

  // Noise of the posterior: the stream of Philox with Purpose::posterior, step 0, [C,T,h,w] of the
  // whole clip in that order.
  Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                const FrameSource& source, const Noise* noise) override;
  // The log variance as the network gives it. There is no noise in it.
  Tensor encode_moments(const Part& part, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise* noise) override;
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) override;
  double decoding_flops(double height, double width) const override {
    return networks_.decoding_flops(height, width);
  }

  // Channel factors and terms f32 [2,C] for ops::channel_affine_*: latents of the posterior to
  // those of the denoiser, and back.
  const Tensor& normalised() const { return normalised_; }
  const Tensor& denormalised() const { return denormalised_; }

 private:
  // The latent frames of a chunk, as many as `frames_at_once` amounts to.
  std::int64_t latents_at_once(std::int64_t frames) const;

  WanVaeDeck config_;
  ParameterTable params_;
  CausalVae networks_;
  Tensor normalised_, denormalised_;
};

// The released names are the parameters' own; others() gives those of diffusers'
// AutoencoderKLWan.
WeightNames wan_vae_weight_names(const WanVaeDeck& config);

}  // namespace weft
