// Where training clips come from: a clip store (HDF5) or synthetic clips made in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace weft {

// Clips of one shape. Pixels are u8 [T,H,W,3]; given latents are f32 or f16 [C,T,H,W].
struct Bucket {
  std::string name;  // "144p-51-0.56": resolution, frames, aspect key
  std::int64_t frames = 0, height = 0, width = 0, channels = 3;
  DType dtype = DType::u8;
  std::int64_t clips = 0;
  std::int64_t pixel_frames = 0, pixel_height = 0,
               pixel_width = 0;  // of the footage, also for latents

  std::size_t clip_bytes() const {
    return static_cast<std::size_t>(frames * height * width * channels) * size_of(dtype);
  }
};

struct ClipInfo {
  float fps = 24;            // 120 for an image
  std::string source, text;  // where the clip was cut from; its caption ("" = none)
};

class ClipSource {
 public:
  virtual ~ClipSource() = default;
  virtual const std::vector<Bucket>& buckets() const = 0;
  virtual ClipInfo info(int bucket, std::int64_t index) const = 0;
  // Reads one whole clip (clip_bytes()) into `out`. Safe from several threads at once. Throws
  // Exit::data, naming file, bucket and clip, when it cannot be read or its hash is wrong.
  virtual void read(int bucket, std::int64_t index, std::span<std::byte> out) const = 0;
};

// `path` is a clip store, or "synthetic:key=value,..." (data/synthetic.h): deterministic moving
// shapes.
// `verify` checks the XXH3 of every clip that is read.
std::unique_ptr<ClipSource> open_clip_source(const std::string& path, bool verify);

}  // namespace weft
