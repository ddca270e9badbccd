// Labelled pictures drawn in memory: shapes over a textured ground. For tests, benchmarks and a
// first run without data.
#pragma once

#include <memory>
#include <string>

#include "data/images/labelled_images.h"

namespace weft {

// `path` is "shapes:key=value,..." (spaces and line ends do not count):
//   images=400               how many
//   classes=6                2 to 8: ground, disc, square, triangle, ring, stripes, cross, checks
//   height=96..160           of each picture: drawn from this range, or one number
//   width=96..160
//   hues=0                   1: each class in shades of a colour of its own, which is learnt fast
//   seed=1                   another seed, other pictures: training and held-out ones differ by it
// Without hues every class occurs in every colour, so that only shape and texture tell them apart;
// a network learns that slowly. Pictures have noise, and shapes overlap; a margin of a few pixels
// at some sides is unlabelled. Everything about picture i follows from (seed, i). Throws
// Exit::usage on an unknown key (naming the nearest) or a value out of range.
inline constexpr const char* shapes_prefix = "shapes:";
inline bool is_shapes(const std::string& path) { return path.starts_with(shapes_prefix); }
std::unique_ptr<LabelledImages> make_shapes(const std::string& path);

}  // namespace weft
