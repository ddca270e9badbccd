// Where training clips come from: a clip store (HDF5) or synthetic clips made in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/error.h"
#include "tensor/dtype.h"

namespace weft {

struct MicroBatch;  // data/step_plan.h
class StepPlan;

// Planes of labels of a picture with text (data/text_images/text_images.h).
inline constexpr std::int64_t text_label_bytes = 2;

// Clips of one shape. Pixels are u8 [T,H,W,3]; latents are f32 or f16 [C,T,H,W], either as the
// model sees them, or as the moments of the VAE's posterior, from which latents are drawn. Labelled
// images (data/images/) have no one shape: the bucket's is the largest that they are trained at.
struct Bucket {
  std::string name;  // "144p-51-0.56": resolution, frames, aspect key
  std::int64_t frames = 0, height = 0, width = 0, channels = 3;
  DType dtype = DType::u8;
  std::int64_t clips = 0;
  std::int64_t pixel_frames = 0, pixel_height = 0,
               pixel_width = 0;  // of the footage, also for latents

  // The channels are means, then log variances (clamped, not normalised): a latent of half as many
  // channels is drawn from them, minus shift, divided by scale.
  bool moments = false;
  std::vector<float> scale, shift;  // the VAE's, one a channel of the latent; empty where unknown

  // The captions' text features; 0 channels: the store has none.
  std::int64_t text_channels = 0, longest_text = 0;
  DType text_dtype = DType::f32;  // or f16, bf16

  // Images with a label for each square of that many pixels, u8 [H/rate, W/rate] behind the pixels:
  // 0 is unlabelled, v is class v - 1. 0: clips.
  std::int64_t label_rate = 0;
  std::int64_t label_bytes = 1;    // of each square, in planes; pictures with text have two
  std::int64_t label_classes = 0;  // classes that the labels may have; 0: not known
  std::string class_names;         // a line each; "" where they have no names

  bool holds_text() const { return label_bytes == text_label_bytes; }

  // The parts say which of its clips are whose, in their order, and how often they are trained on,
  // where there are several stores, or data.keep (data/mixed_source.h). Empty: one store, each clip
  // once an epoch. Whoever leaves clips out lowers `clips`, here and in the part, and moves the
  // parts behind.
  struct Part {
    int store = 0;
    std::int64_t begin = 0, clips = 0;  // indices within the bucket
    std::int64_t first_sample = 0;      // permanent id of its first clip (SampleId)
    double samples = 0;                 // of an epoch; 0: none is trained on
  };
  std::vector<Part> parts;
  // The one that holds a clip; there are parts.
  const Part& part_of(std::int64_t index) const {
    std::size_t p = 0;
    while (p + 1 < parts.size() && index >= parts[p + 1].begin) ++p;
    return parts[p];
  }

  // The channels of a clip as the model sees it.
  std::int64_t model_channels() const { return moments ? channels / 2 : channels; }
  std::size_t clip_bytes() const { return clip_bytes(height, width); }
  std::size_t clip_bytes(std::int64_t h, std::int64_t w) const {
    const std::int64_t labels =
        label_rate == 0 ? 0 : label_bytes * (h / label_rate) * (w / label_rate);
    return static_cast<std::size_t>(frames * h * w * channels) * size_of(dtype) +
           static_cast<std::size_t>(labels);
  }
};

// Samples in a micro-batch of that bucket: a bucket with fewer clips makes smaller ones, whereas
// images come again until a micro-batch is full. 0: the bucket is not trained on.
inline std::int64_t samples_in_batch(const Bucket& bucket, std::int64_t batch_size) {
  if (bucket.label_rate > 0) return batch_size;
  std::int64_t clips = bucket.parts.empty() ? bucket.clips : 0;
  for (const Bucket::Part& p : bucket.parts)
    if (p.samples > 0) clips += p.clips;
  return std::min(batch_size, clips);
}

// Its micro-batches of `size` samples in an epoch, on average.
inline double micro_batches_of(const Bucket& bucket, std::int64_t size) {
  if (size == 0) return 0;
  if (bucket.parts.empty()) return static_cast<double>(bucket.clips / size);
  double samples = 0;
  for (const Bucket::Part& p : bucket.parts) samples += p.samples;
  return samples / static_cast<double>(size);
}

// Exit::usage for labelled images, which are no clips.
inline void check_holds_clips(const Bucket& bucket) {
  WEFT_CHECK(bucket.label_rate == 0, Exit::usage, "name a clip store in data.path",
             "data.path holds labelled images (bucket {}), and this takes clips", bucket.name);
}

struct ClipInfo {
  float fps = 24;            // 120 for an image
  std::string source, text;  // where the clip was cut from; its caption ("" = none)
};

// A clip whose hash is wrong: the bytes read differ from those written. Other read errors may be
// transient, this one is permanent.
struct DamagedClip : Error {
  using Error::Error;
};

class ClipSource {
 public:
  virtual ~ClipSource() = default;
  virtual const std::vector<Bucket>& buckets() const = 0;
  virtual ClipInfo info(int bucket, std::int64_t index) const = 0;
  // Distinguishes the clips from others as many and as large, without reading them: the same
  // wherever the files lie and whenever they were copied. "": not known.
  virtual std::string content_id() const { return {}; }
  // Reads one whole clip (clip_bytes()) into `out`. Safe from several threads at once. Throws
  // Exit::data, naming file, bucket and clip, when it cannot be read; DamagedClip when its hash is
  // wrong.
  virtual void read(int bucket, std::int64_t index, std::span<std::byte> out) const = 0;
  // Reads sample `i` of a micro-batch as it is trained on, into its clip_bytes(): images are
  // resized to their view (data/step_plan.h). As read() otherwise.
  virtual void read_sample(const MicroBatch& what, std::size_t i, std::span<std::byte> out) const;
  std::size_t clip_bytes(const MicroBatch& what) const;
  // Puts the bucket's next clip in the place of sample `i`, which is damaged; of several stores
  // the next of the same one.
  virtual void take_next(MicroBatch& what, std::size_t i) const;
  // The name of each of several stores, by Bucket::Part::store; empty where there is one.
  virtual std::vector<std::string> store_names() const { return {}; }

  // A clip's permanent id: its running number over all buckets, also where the source is a part of
  // another.
  virtual std::int64_t sample_id(int bucket, std::int64_t index) const;

  // Which samples the steps of a run train on: for clips a StepPlanner. `batch_sizes`: [bucket]
  // samples in a micro-batch; `micro_batches` a step.
  virtual std::unique_ptr<StepPlan> plan_steps(std::vector<std::int64_t> batch_sizes,
                                               std::int64_t micro_batches,
                                               std::uint64_t seed) const;

  // Text features of a clip's caption, valid tokens only: their number, 0 if the clip has no
  // caption or the bucket no features; and the features [tokens, text_channels], converted to f32.
  // As thread-safe, and as strict, as read().
  virtual std::int64_t text_tokens(int bucket, std::int64_t index) const { return 0; }
  virtual std::vector<float> read_text(int bucket, std::int64_t index) const { return {}; }
};

// `path` is a clip store, a store of labelled images (data/images/image_store.h), or made in
// memory: "synthetic:key=value,..." (data/synthetic.h), deterministic moving shapes, or
// "shapes:..." (data/images/labelled_images.h), labelled ones; or pictures with text
// (data/text_images/text_images.h, is_text_list), whose files `limits` bounds. `verify` checks the
// XXH3 of every clip that is read. Several paths, and data.keep or data.prompt_prefixes, give a mix
// of stores of clips (data/mixed_source.h).
std::unique_ptr<ClipSource> open_clip_source(const DataDeck& data, const MediaDeck& limits = {});
inline std::unique_ptr<ClipSource> open_clip_source(const std::string& path, bool verify) {
  DataDeck data;
  data.path = path;
  data.verify = verify;
  return open_clip_source(data);
}

}  // namespace weft
