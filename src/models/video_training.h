// What a micro-batch of clips is made of when a denoiser trains on it: from clips, as a store holds
// them, to latents, captions and noise, for any video codec. What is random is a function of (seed,
// step, sample id), so any rank makes the same batch of the same samples.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "config/deck.h"
#include "data/clip_source.h"
#include "data/prefetch.h"
#include "models/interfaces.h"
#include "nn/nn.h"

namespace weft {

// What a training takes of a posterior: a draw, anew in each step, or its mean.
enum class Posterior { draw, mean };

// From clips, as a store holds them, to what a denoiser trains on: pixels as they are, latents as
// they are or taken from stored moments, or pixels that a codec encodes on the way.
class ClipLatents {
 public:
  // `channels`: of the model's input. If they are the codec's, and its weights are named, buckets
  // of pixels are encoded. Enough to plan with.
  ClipLatents(const Deck& deck, std::int64_t channels, std::unique_ptr<VideoCodec> codec,
              Posterior posterior);
  // Exit::usage unless the bucket, as the model sees it, has the model's channels.
  void check(const Bucket& bucket) const;
  // Reads the codec's weights if one of the buckets needs it.
  void load(std::span<const Bucket> buckets);

  // Whether its clips are pixels that the codec encodes, and the bytes of the codec's weights.
  bool encodes(const Bucket& b) const { return can_encode() && b.dtype == DType::u8; }
  std::size_t weight_bytes() const;

  // The bucket as the model sees it: frames, height, width and channels of the latents.
  Bucket seen(const Bucket& bucket) const;

  // Writes x0 f32 [C,T,H,W] from `clip`, u8, a whole clip's bytes on this rank's device. A codec's
  // own noise is a function of (seed, sample), as in `weft encode`, that of a drawn latent of
  // (seed, step, sample): the same whether moments were stored or are made here. While planning,
  // `clip` may be undefined.
  void make(const Bucket& bucket, const Tensor& clip, std::uint64_t step, std::uint64_t sample,
            Tensor& x0) const;

 private:
  bool takes_latents() const { return codec_ != nullptr && codec_->channels() == channels_; }
  bool can_encode() const { return takes_latents() && !codec_->weights().value.empty(); }

  std::uint64_t seed_;
  std::int64_t channels_;
  std::unique_ptr<VideoCodec> codec_;
  Posterior posterior_;
  VideoCodec::Normalisation encoded_;  // of what the codec encodes
};

// What a model takes of captions.
struct CaptionShape {
  std::int64_t channels = 0, max_length = 0;
  std::string keys;  // of the deck, that say so
  double drop = 0;   // share of samples that train without their caption
};

// Precomputed text features of the captions of a clip source: a safetensors file with one tensor a
// clip, named by its sample id ("0", "1", ...), [tokens, channels] in F32, F16 or BF16, valid
// tokens only. What `weft text` writes also says of which captions.
class TextFeatures {
 public:
  // Exit::data unless every caption is of that shape and has 1 token or more.
  TextFeatures(const std::filesystem::path& path, const CaptionShape& shape);
  // Exit::data unless there are as many as captions, and they were made of these, by clip. A file
  // that does not say of which gives a WARN.
  void check_captions(const std::vector<std::string>& captions,
                      const std::vector<std::string>& stores) const;

  // The features of one caption, tokens * channels floats.
  std::vector<float> read(std::int64_t sample) const { return file_.read_f32(entry(sample)); }

 private:
  const SafetensorEntry& entry(std::int64_t sample) const {
    return file_.at(std::to_string(sample));
  }
  SafetensorsFile file_;
};

// The captions of a batch of clips, on the host.
struct ClipCaptions {
  Tensor y;  // f32 [B, max_length, channels] on this rank's device; undefined: the data have none
  std::vector<std::int64_t> lengths;  // [B] tokens; 0: the clip has no caption
  std::vector<bool> dropped;          // [B] the sample trains without its caption
};
// From the clips if their bucket has text features, or from `features` if the deck names any. A dry
// run gets captions of full length.
ClipCaptions captions_of(const Deck& deck, const CaptionShape& shape, const Bucket& bucket,
                         const LoadedBatch& clips, const TextFeatures* features);

// A dry run asks for the largest batch of that many clips: nothing is known of its samples.
inline bool is_planned(const LoadedBatch& clips) { return clips.what.samples.empty(); }

// Clean latents and their noise, f32 [B,C,T,H,W]. `bytes` u8 holds the clips on this rank's device
// (train/step_work.h); while planning it is undefined, and `clips` holds nothing but its number of
// clips.
struct NoisyClips {
  Tensor x0, eps;
};
NoisyClips make_clips(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                      const Tensor& bytes, const ClipLatents& latents);

// The loss of rectified flow, f32 [B]: the mean of (v - (x0 - eps))^2 over the frames with mask 1
// (undefined: all), where `velocity` makes v of x = (1 - s) x0 + s eps, s = timestep / 1000. When
// the tape records, the gradient of weight * sum(loss), weight f32 [1], waits in it.
Tensor velocity_loss(Tape& tape, const Tensor& x0, const Tensor& eps, const Tensor& timestep,
                     const Tensor& mask, const Tensor& weight,
                     const std::function<Var(const Tensor& x)>& velocity);

// The size of a batch of latents in tokens of patches of that size.
std::int64_t count_tokens(const Tensor& x, std::span<const std::int64_t> patch);

// The number in [0, 1] that the noise level of sample `sample` in step `step` is made of: uniform,
// or the logistic function of a normal one. `again`: the one after so many others.
double draw_level(const std::string& method, double mean, double deviation, std::uint64_t seed,
                  std::uint64_t step, std::uint64_t sample, std::uint32_t again = 0);

}  // namespace weft
