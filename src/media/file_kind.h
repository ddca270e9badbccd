// How the picture in a file lies, by its bytes, before anything decodes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/file_kind.h"

namespace weft {

// How the picture in a file lies, as EXIF numbers it from 1 (upright) to 8: of a JPEG, PNG, WebP or
// TIFF, from its first EXIF block. 1 where the file has none, or one that makes no sense.
int exif_orientation(std::span<const std::byte> file);

// Whether it is a TIFF of which FFmpeg makes a black or a pale picture: one compressed as JPEG, or
// in YCbCr of the full range, which is the default.
bool is_misread_tiff(std::span<const std::byte> file);

// Whether setting it upright swaps height and width.
constexpr bool is_sideways(int orientation) { return orientation >= 5; }

// How to walk over stored pixels so that they come upright: the byte of the first pixel, and the
// steps in bytes along a row of the upright picture and down its columns.
struct UprightWalk {
  std::int64_t first = 0, along = 0, down = 0;
};
// The walk over a picture [height, width, 3] as stored, whose rows begin `stride` bytes apart.
UprightWalk upright_walk(int orientation, std::int64_t height, std::int64_t width,
                         std::int64_t stride);

}  // namespace weft
