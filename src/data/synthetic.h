// Data made in memory: clips ("synthetic:"), and how the keys of "shapes:" and "text:" are read.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "data/clip_source.h"

namespace weft {

struct NumberRange {
  std::int64_t low = 0, high = 0;
};
struct NumberKey {
  const char* name;
  NumberRange* target;
  std::int64_t least, most;
  bool range;  // LOW..HIGH is allowed as well as one number
};
struct TextKey {
  const char* name;
  std::string* target;
};

// Sets the targets of the keys in `spec`; blanks around an item and line ends do not count, and
// text holds no comma. `kind` is "shapes" or "text", for messages; `hint` is an example. Returns
// the values of `numbers`, however `spec` is written. Throws Exit::usage for an unknown key, naming
// the nearest, and for a value out of range.
std::string read_keys(std::string_view spec, std::string_view kind, const std::string& hint,
                      std::span<const NumberKey> numbers, std::span<const TextKey> texts = {});

// Clips made in memory: a bright disc and a square drifting over a soft gradient. For tests,
// benchmarks and a first run without footage.

// `spec` is what follows "synthetic:": one bucket a `;`-separated part, each `key=value,...`
// (spaces and line ends do not count):
//   clips=64 frames=5 height=32 width=32   shape and number of clips
//   channels=3                             3 for pixels; any number (default 4) with latent=1
//   latent=1                               f32 [C,T,H,W] in about [-1,1] instead of u8 [T,H,W,3]
//   fps=24                                 told to the model (images, frames=1: 120)
//   seed=42                                another seed, other clips
//   tokens=0 text_channels=0               noise as captions' features: tokens, channels
//   name=256-51-0.57                       the bucket's name; else one made from the shape
// Everything about a clip follows from (seed, sample id, shape). Throws Exit::usage on an unknown
// key (naming the nearest) or a value out of range.
inline constexpr std::string_view synthetic_prefix = "synthetic:";
inline bool is_synthetic(std::string_view path) { return path.starts_with(synthetic_prefix); }
std::unique_ptr<ClipSource> make_synthetic_source(const std::string& spec);

}  // namespace weft
