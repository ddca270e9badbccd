// Where training clips come from: a clip store (HDF5) or synthetic clips made in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "tensor/dtype.h"

namespace weft {

// Clips of one shape. Pixels are u8 [T,H,W,3]; latents are f32 or f16 [C,T,H,W], either as the
// model sees them, or as the moments of the VAE's posterior, from which latents are drawn.
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

  // Of the captions' text features; 0 channels: the store has none.
  std::int64_t text_channels = 0, longest_text = 0;
  DType text_dtype = DType::f32;  // or f16, bf16

  // Of a clip as the model sees it.
  std::int64_t model_channels() const { return moments ? channels / 2 : channels; }
  std::size_t clip_bytes() const {
    return static_cast<std::size_t>(frames * height * width * channels) * size_of(dtype);
  }
};

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
  // Reads one whole clip (clip_bytes()) into `out`. Safe from several threads at once. Throws
  // Exit::data, naming file, bucket and clip, when it cannot be read; DamagedClip when its hash is
  // wrong.
  virtual void read(int bucket, std::int64_t index, std::span<std::byte> out) const = 0;

  // Text features of a clip's caption, valid tokens only: their number, 0 if the clip has no
  // caption or the bucket no features; and the features [tokens, text_channels], converted to f32.
  // As thread-safe, and as strict, as read().
  virtual std::int64_t text_tokens(int bucket, std::int64_t index) const { return 0; }
  virtual std::vector<float> read_text(int bucket, std::int64_t index) const { return {}; }
};

// `path` is a clip store, or "synthetic:key=value,..." (data/synthetic.h): deterministic moving
// shapes.
// `verify` checks the XXH3 of every clip that is read.
std::unique_ptr<ClipSource> open_clip_source(const std::string& path, bool verify);

}  // namespace weft
