// Open-Sora's VAE v1.2, whole (docs/models/video_vae.md, Chunks): frames through the 2D VAE, its
// latents through the temporal one, chunk by chunk, so that memory does not grow with the clip.
#pragma once

#include <functional>
#include <memory>

#include "models/interfaces.h"
#include "models/video_vae/networks.h"
#include "models/video_vae/options.h"

namespace weft {

class VideoVae : public VideoCodec {
 public:
  // Registers both models' parameters under their released names ("spatial_vae.module." and
  // "temporal_vae." in front); params().allocate() is the caller's. The 2D VAE's are not trained
  // with `freeze_spatial`.
  explicit VideoVae(const VaeDeck& config, bool freeze_spatial = false);

  std::string name() const override { return "VAE"; }
  ParameterTable& params() override { return params_; }
  WeightNames weight_names() const override;
  bool bf16() const override { return config_.dtype == "bf16"; }
  std::set<std::string> tables() const override { return {"vae"}; }
  WeightsKey weights() const override { return {"vae.weights", config_.weights}; }
  std::string dtype_key() const override { return "vae.dtype"; }
  // Logs one warning if the files have another scale or shift than the deck, whose values are used.
  void check_weights(const ModelSource& source) const override;
  const VaeDeck& config() const { return config_; }
  SpatialVae& spatial() { return *spatial_; }
  TemporalVae& temporal() { return *temporal_; }
  DType activation_dtype() const { return config_.dtype == "bf16" ? DType::bf16 : DType::f32; }

  // Latent frames of so many pixel frames: 17 -> 5, 18 -> 6, 1 -> 1, chunk by chunk.
  std::int64_t latent_frames(std::int64_t frames) const override;
  // Pixels of one side of the latent's: 8 with the released shape.
  std::int64_t pixels_a_latent() const override { return spatial_->pixels_a_latent(); }
  std::int64_t channels() const override { return TemporalVae::latent_channels; }
  std::int64_t chunk_pixels() const override;
  // Frames that the temporal VAE takes at once; the 2D VAE takes vae.micro_batch_size of them.
  std::int64_t chunk_frames(std::int64_t frames) const override {
    return config_.micro_frame_size > 0 ? std::min(config_.micro_frame_size, frames) : frames;
  }
  // As the model uses them: rounded in bf16.
  Normalisation normalisation() const override;
  std::string lacks_scale() const override {
    return config_.scale.empty() ? "vae.scale and vae.shift are empty" : "";
  }
  std::string describe(const Normalisation& n) const override;
  void set_normalisation(Deck& deck, const Normalisation& n) const override;

  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const override;

  // Noise of the two posteriors: streams of Philox with Purpose::posterior, step 0 for the temporal
  // posterior, [4,Tl,h,w] in that order; step 1 + t for pixel frame t, [h,w,4] in that order.
  Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                const FrameSource& source, const Noise* noise) override {
    return draw_latent(part, encode_moments(part, height, width, source, noise), noise);
  }
  // Moments of the temporal posterior f32 [1,8,Tl,h,w] (mean, clamped log variance), not
  // normalised, in the current arena. H and W need not be multiples of 8: what is left over is cut
  // off by the model (docs/models/video_vae.md, Spatial VAE).
  Tensor encode_moments(std::int64_t frames, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise* noise) {
    return encode_moments(whole(frames), height, width, source, noise);
  }
  // The same of a part: the source is asked for its frames alone, in order, by their numbers in the
  // clip.
  Tensor encode_moments(const Part& part, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise* noise) override;
  // From moments [1,8,Tl,h,w] to the latent that STDiT3 sees, f32 [1,4,Tl,h,w]: drawn (null: the
  // mean), less shift, over scale.
  Tensor draw_latent(const Tensor& moments, const Noise* noise);
  // Moments of a part, drawn with the noise that they get within the clip.
  Tensor draw_latent(const Part& part, const Tensor& moments, const Noise* noise);

  // latent f32 [1,4,latent_frames(frames),h,w] as STDiT3 makes it -> `frames` pixel frames.
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) override;
  // Counts only the convolutions of the 2D decoder: they are most of decoding.
  double decoding_flops(double height, double width) const override;

  // Channel factors and terms f32 [2,4] for ops::channel_affine_*: 2D latents times
  // SpatialVae::scaling, and back; temporal latents to what STDiT3 sees, and back
  // (docs/models/video_vae.md, Scaling and normalisation). Rounded as the bf16 buffers of a bf16
  // model are.
  const Tensor& scaled_2d() const { return scaled_2d_; }
  const Tensor& unscaled_2d() const { return unscaled_2d_; }
  const Tensor& normalised() const { return normalised_; }
  const Tensor& denormalised() const { return denormalised_; }

 private:
  // `from` as activations: in the model's type.
  Tensor as_activations(const Tensor& from) const;
  // Latents of a chunk's frames, scaled: [1,count,h,w,4].
  Var encode_frames(std::int64_t first, std::int64_t count, std::int64_t h, std::int64_t w,
                    const FrameSource& source, const Noise* noise);
  void decode_frames(const Tensor& latents, std::int64_t first, const FrameSink& sink);

  VaeDeck config_;
  ParameterTable params_;
  std::unique_ptr<SpatialVae> spatial_;
  std::unique_ptr<TemporalVae> temporal_;
  Tensor scaled_2d_, unscaled_2d_, normalised_, denormalised_;
};

// Buffers "scale" and "shift" and a discriminator are spare; query, key, value, proj_attn are old
// names of to_q, to_k, to_v, to_out.0; a 2D VAE by itself has its names without
// "spatial_vae.module." (docs/models/video_vae.md, Spatial VAE).
WeightNames vae_weight_names();

}  // namespace weft
