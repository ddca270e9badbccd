// Open-Sora's VAE v1.2, whole (specs/vae.md 3): frames through the 2D VAE, its latents through the temporal one, chunk by
// chunk, so that memory does not grow with the clip.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "models/vae2d.h"
#include "models/vae_temporal.h"

namespace weft {

class VideoVae {
 public:
  // Registers both models' parameters under their released names ("spatial_vae.module." and "temporal_vae." in front);
  // params().allocate() is the caller's.
  explicit VideoVae(const VaeDeck& config);

  ParameterTable& params() { return params_; }
  const VaeDeck& config() const { return config_; }
  SpatialVae& spatial() { return *spatial_; }
  TemporalVae& temporal() { return *temporal_; }

  // Latent frames of so many pixel frames: 17 -> 5, 18 -> 6, 1 -> 1, chunk by chunk.
  std::int64_t latent_frames(std::int64_t frames) const;
  // Pixels of one side of the latent's: 8 with the released shape.
  std::int64_t pixels_a_latent() const;

  // Where the noise of the two posteriors comes from; the same (seed, sample) gives the same latents at any rank count and
  // micro-batch size. Null in its place takes the means.
  struct Noise {
    std::uint64_t seed = 0, sample = 0;
  };

  // Frames [first, first + count) of a clip, f32 [count,H,W,3] in [-1,1] on this rank's device.
  using FrameSource = std::function<Tensor(std::int64_t first, std::int64_t count)>;
  // Moments of the temporal posterior f32 [1,8,Tl,h,w] (mean, clamped log variance), not normalised, in the current arena.
  // H and W need not be multiples of 8: what is left over is cut off by the model (specs/vae.md 0.7).
  Tensor encode_moments(std::int64_t frames, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise* noise);
  // From moments to the latent that STDiT3 sees, [1,4,Tl,h,w]: drawn (null: the mean), less shift, over scale.
  Tensor draw_latent(const Tensor& moments, const Noise* noise);

  // Decoded frames f32 [count,H,W,3], in order, not clamped; `first` is the number of the first.
  using FrameSink = std::function<void(std::int64_t first, const Tensor& frames)>;
  // latent f32 [1,4,Tl,h,w] as STDiT3 makes it -> `frames` pixel frames.
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink);

  // Peak arena bytes of encoding or decoding a clip of that size with micro-batches of `micro_batch` frames, walked through
  // without computing: the same for any number of frames from two chunks on, but for the latent itself.
  std::size_t plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                          std::int64_t micro_batch);
  std::size_t plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                          std::int64_t micro_batch);
  // Frames that the 2D VAE takes at once from now on (vae.micro_batch_size at first).
  void set_micro_batch(std::int64_t frames) { micro_batch_ = frames; }
  // The greatest number of frames up to vae.micro_batch_size (0: up to a chunk) with which encoding and decoding a clip
  // of that size fit into `capacity` bytes. Exit::usage, with the size that fits, where not even one does.
  std::int64_t fit_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                               std::size_t capacity);

 private:
  VaeDeck config_;
  ParameterTable params_;
  std::unique_ptr<SpatialVae> spatial_;
  std::unique_ptr<TemporalVae> temporal_;
  std::int64_t micro_batch_ = 0;
};

}  // namespace weft
