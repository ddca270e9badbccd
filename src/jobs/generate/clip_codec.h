// Converts between a model's latents and visible frames: by the VAE, or not at all for a model that
// works on pixels (model.in_channels = 3), whose latents are the frames themselves, in [-1,1].
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "jobs/generate/options.h"
#include "models/video_vae/video_vae.h"

namespace weft {

// Collective. The deck, with vae.scale and vae.shift as the latents of data.path have them where it
// leaves them empty.
Deck with_scale_of_latents(const Deck& deck, MPI_Comm world);

class ClipCodec {
 public:
  using Part = VideoVae::Part;

  // For a job, still without weights. Exit::usage where the model's latents are neither pixels nor
  // the VAE's, or the VAE has no scale.
  explicit ClipCodec(const Deck& deck);
  // Only for sizes.
  ClipCodec(VideoVae& vae) : vae_(&vae) {}

  // Collective: finds the VAE's weights. Exit::usage, Exit::checkpoint.
  void open_weights(const Deck& deck, MPI_Comm world);
  // Identifies the weights, "" for pixels.
  std::string identity() const { return source_ ? source_->identity() : ""; }
  std::string describe() const {
    return source_ ? source_->describe() : "none, the model works on pixels";
  }
  void load_weights();
  std::size_t weight_bytes() const;

  bool has_vae() const { return vae_ != nullptr; }
  std::int64_t latent_frames(std::int64_t frames) const {
    return vae_ != nullptr ? vae_->latent_frames(frames) : frames;
  }
  std::int64_t pixels_a_latent() const { return vae_ != nullptr ? vae_->pixels_a_latent() : 1; }
  // The part of a clip that holds latent frames [first, last), as VideoVae::part_with.
  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const;
  // Pixel and latent frames of a chunk, the least that loops can overlap by; 0 pixel frames: there
  // are no chunks.
  std::int64_t chunk_pixels() const;
  std::int64_t chunk_latents() const;
  // Operations of decoding a frame, about.
  double decoding_flops(double height, double width) const;

  // `frames` of a clip of height x width -> f32 [1,C,part.latents,h,w] as the model sees them. In
  // the current arena.
  Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                const VideoVae::FrameSource& source, const VideoVae::Noise& noise) const;
  // As VideoVae::decode: f32 [1,C,T,h,w] -> `frames` pixel frames, not clamped.
  void decode(const Tensor& latent, std::int64_t frames, const VideoVae::FrameSink& sink) const;

  // Frames of a clip of `frames` that are coded at once: as set in the deck, and as set now.
  std::int64_t frames_asked(std::int64_t frames) const;
  std::int64_t frames_at_once(std::int64_t frames) const;
  void set_frames_at_once(std::int64_t frames);
  // The most frames at once, up to frames_asked(), that fit an arena of `capacity` bytes.
  // Exit::usage if not even one fits.
  std::int64_t fit_frames_at_once(std::int64_t frames, std::int64_t height, std::int64_t width,
                                  std::size_t capacity) const;
  // Peak arena bytes of coding with so many frames at once: dry runs.
  std::size_t plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                          std::int64_t at_once) const;
  std::size_t plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                          std::int64_t at_once) const;

 private:
  std::unique_ptr<VideoVae> own_;
  VideoVae* vae_ = nullptr;
  std::optional<ModelSource> source_;
  std::int64_t pixel_frames_ = 16;  // at once, where there is no VAE
};

}  // namespace weft
