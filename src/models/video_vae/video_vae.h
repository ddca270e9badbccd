// Open-Sora's VAE v1.2, whole (docs/models/video_vae.md, Chunks): frames through the 2D VAE, its
// latents through the temporal one, chunk by chunk, so that memory does not grow with the clip.
#pragma once

#include <functional>
#include <memory>

#include "checkpoint/model_source.h"
#include "models/video_vae/options.h"
#include "models/video_vae/vae2d.h"
#include "models/video_vae/vae_temporal.h"

namespace weft {

class VideoVae {
 public:
  // Registers both models' parameters under their released names ("spatial_vae.module." and
  // "temporal_vae." in front); params().allocate() is the caller's. The 2D VAE's are not trained
  // with `freeze_spatial`.
  explicit VideoVae(const VaeDeck& config, bool freeze_spatial = false);

  ParameterTable& params() { return params_; }
  const VaeDeck& config() const { return config_; }
  SpatialVae& spatial() { return *spatial_; }
  TemporalVae& temporal() { return *temporal_; }
  DType activation_dtype() const { return config_.dtype == "bf16" ? DType::bf16 : DType::f32; }

  // Latent frames of so many pixel frames: 17 -> 5, 18 -> 6, 1 -> 1, chunk by chunk.
  std::int64_t latent_frames(std::int64_t frames) const;
  // Pixels of one side of the latent's: 8 with the released shape.
  std::int64_t pixels_a_latent() const { return spatial_->pixels_a_latent(); }

  // Whole chunks of a clip of `clip_frames`: pixel frames [first_frame, first_frame + frames),
  // which are the latent frames [first_latent, first_latent + latents). Chunks know nothing of each
  // other, so a part is coded as it is within the clip.
  struct Part {
    std::int64_t clip_frames = 0, first_frame = 0, frames = 0, first_latent = 0, latents = 0;
  };
  Part whole(std::int64_t frames) const { return {frames, 0, frames, 0, latent_frames(frames)}; }
  // The chunks that hold latent frames [first, last) of a clip, 0 <= first < last <=
  // latent_frames(frames).
  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const;

  // Where the noise of the two posteriors comes from; the same (seed, sample) gives the same
  // latents at any rank count and micro-batch size. Null in its place takes the means. Streams of
  // Philox with Purpose::posterior: step 0 for the temporal posterior, [4,Tl,h,w] in that order;
  // step 1 + t for pixel frame t, [h,w,4] in that order.
  struct Noise {
    std::uint64_t seed = 0, sample = 0;
  };

  // Frames [first, first + count) of a clip, f32 [count,H,W,3] in [-1,1] on this rank's device, in
  // the current arena.
  using FrameSource = std::function<Tensor(std::int64_t first, std::int64_t count)>;
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
                        const FrameSource& source, const Noise* noise);
  // From moments [1,8,Tl,h,w] to the latent that STDiT3 sees, f32 [1,4,Tl,h,w]: drawn (null: the
  // mean), less shift, over scale.
  Tensor draw_latent(const Tensor& moments, const Noise* noise);
  // Moments of a part, drawn with the noise that they get within the clip.
  Tensor draw_latent(const Part& part, const Tensor& moments, const Noise* noise);

  // Decoded frames f32 [count,H,W,3], in order, not clamped; `first` is the number of the first.
  // While planning they hold no values.
  using FrameSink = std::function<void(std::int64_t first, const Tensor& frames)>;
  // latent f32 [1,4,latent_frames(frames),h,w] as STDiT3 makes it -> `frames` pixel frames.
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink);

  // Dry runs: what encoding or decoding a clip of that size with micro-batches of `micro_batch`
  // frames takes of an arena of `capacity` bytes (0: endless). The same for any number of frames
  // from two chunks on, but for the latent itself.
  MemoryNeed plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0);
  MemoryNeed plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0);
  // Frames that the 2D VAE takes at once from now on (vae.micro_batch_size at first); 0 takes a
  // chunk at once.
  void set_micro_batch(std::int64_t frames) { micro_batch_ = frames; }
  std::int64_t micro_batch() const { return micro_batch_; }
  // The greatest number of frames up to vae.micro_batch_size (0: up to a chunk) with which encoding
  // and decoding a clip of that size (without `decode_too`: encoding alone) fit into `capacity`
  // bytes, a 32nd of it left free; 0: not even one.
  std::int64_t largest_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::size_t capacity, bool decode_too = true);
  // The same, but Exit::usage with what one frame needs where not even that fits.
  std::int64_t fit_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                               std::size_t capacity, bool decode_too = true);

  // Channel factors and terms f32 [2,4] for ops::channel_affine_*: 2D latents times
  // SpatialVae::scaling, and back; temporal latents to what STDiT3 sees, and back
  // (docs/models/video_vae.md, Scaling and normalisation). Rounded as the bf16 buffers of a bf16
  // model are.
  const Tensor& scaled_2d() const { return scaled_2d_; }
  const Tensor& unscaled_2d() const { return unscaled_2d_; }
  const Tensor& normalised() const { return normalised_; }
  const Tensor& denormalised() const { return denormalised_; }

  // Frames that the temporal VAE takes at once, of a clip of `frames`.
  std::int64_t chunk_frames(std::int64_t frames) const;
  // Frames of such a clip that the 2D VAE takes at once if memory allows: by vae.micro_batch_size.
  std::int64_t frames_asked(std::int64_t frames) const;

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
  std::int64_t micro_batch_ = 0;
  Tensor scaled_2d_, unscaled_2d_, normalised_, denormalised_;
};

// Buffers "scale" and "shift" are spare; query, key, value, proj_attn are old names of to_q, to_k,
// to_v, to_out.0; a 2D VAE by itself has its names without "spatial_vae.module."
// (docs/models/video_vae.md, Spatial VAE).
WeightNames vae_weight_names();
// Logs one warning if the files of a VAE have another scale or shift than the deck, whose values
// are used.
void compare_scale(const ModelSource& source, const VaeDeck& deck);

}  // namespace weft
