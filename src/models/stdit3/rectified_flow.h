// What a micro-batch of STDiT3's training is made of, and its loss: from clips, as a store holds
// them, to latents, captions, timesteps and frame masks, and the loss of rectified flow
// (docs/models/stdit3.md, Rectified flow; opensora/schedulers/rf at v1.2.0). Its sampler is
// models/flow_sampler.h. Everything random is a function of (seed, step, sample id), so any rank
// makes the same batch of the same samples.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>

#include "checkpoint/safetensors.h"
#include "config/deck.h"
#include "data/clip_source.h"
#include "data/prefetch.h"
#include "models/flow_sampler.h"
#include "models/stdit3/options.h"
#include "models/stdit3/stdit3.h"
#include "models/video_vae/video_vae.h"

namespace weft {

// From clips, as a store holds them, to what STDiT3 trains on: pixels as they are, latents as they
// are or drawn from stored moments, or pixels that a VAE encodes on the way.
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

// Precomputed T5 features of the captions of a clip source: a safetensors file with one tensor a
// clip, named by its sample id ("0", "1", ...), [tokens, caption_channels] in F32, F16 or BF16,
// valid tokens only.
class TextFeatures {
 public:
  // Exit::data unless every one of `clips` clips has a caption of `channels` channels and 1 to
  // `max_length` tokens.
  TextFeatures(const std::filesystem::path& path, std::int64_t clips, std::int64_t channels,
               std::int64_t max_length);

  std::int64_t length(std::int64_t sample) const { return entry(sample).shape[0]; }
  // The features of one caption, length(sample) * channels floats.
  std::vector<float> read(std::int64_t sample) const { return file_.read_f32(entry(sample)); }

 private:
  const SafetensorEntry& entry(std::int64_t sample) const {
    return file_.at(std::to_string(sample));
  }
  SafetensorsFile file_;
};

// The timestep that sample `sample` trains at in step `step`: a function of (seed, step, sample).
float draw_timestep(const DiffusionDeck& d, const ClipSize& size, std::uint64_t seed,
                    std::uint64_t step, std::uint64_t sample);

// The frame mask of a sample, 1 = denoise (docs/models/stdit3.md, Frame masks): n latent frames,
// never all 0. Short clips on which the original fails (quarter masks below 4 frames,
// image_head_tail of 2) keep one frame to denoise.
std::vector<std::uint8_t> draw_frame_mask(const MaskDeck& d, std::int64_t n, std::uint64_t seed,
                                          std::uint64_t step, std::uint64_t sample);
bool masks_wanted(const MaskDeck& d);

// Loss of each sample, f32 [B]: mean squared error of the velocity over the frames to denoise
// (Training loss). in.timestep and in.x_mask are set; in.x is made here. When the tape records, the
// gradient of weight * sum(loss), weight f32 [1], waits in the tape, and tape.backward() sends it
// to the parameters.
Tensor flow_loss(Tape& tape, Stdit3& model, const Tensor& x0, const Tensor& eps, Stdit3Input in,
                 const Tensor& weight);

struct TrainingBatch {
  Tensor x0, eps;  // f32 [B,C,T,H,W]
  Stdit3Input in;  // all but x
};

// `bytes` u8 holds the clips on this rank's device (train/step_work.h). Captions come with the
// clips if their bucket has text features, or from `features` if the deck names any, else every
// caption is the null caption. While planning, `clips` holds nothing but its number of clips,
// `bytes` is undefined and `features` is not asked.
TrainingBatch make_batch(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                         const Tensor& bytes, const TextFeatures* features,
                         const ClipLatents& latents);

}  // namespace weft
