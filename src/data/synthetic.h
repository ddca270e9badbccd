// Clips made in memory: a bright disc and a square drifting over a soft gradient. For tests,
// benchmarks and a first run without footage.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/clip_source.h"

namespace weft {

// `spec` is what follows "synthetic:": one bucket a `;`-separated part, each `key=value,...`
// (spaces and line ends do not count):
//   clips=64 frames=5 height=32 width=32   shape and number of clips
//   channels=3                             3 for pixels; any number (default 4) with latent=1
//   latent=1                               f32 [C,T,H,W] in about [-1,1] instead of u8 [T,H,W,3]
//   fps=24                                 told to the model (images, frames=1: 120)
//   seed=42                                another seed, other clips
//   name=256-51-0.57                       the bucket's name; else one made from the shape
// Everything about a clip follows from (seed, sample id, shape). Throws Exit::usage on an unknown
// key (naming the nearest) or a value out of range.
inline constexpr std::string_view synthetic_prefix = "synthetic:";
inline bool is_synthetic(std::string_view path) { return path.starts_with(synthetic_prefix); }
std::unique_ptr<ClipSource> make_synthetic_source(const std::string& spec);

}  // namespace weft
