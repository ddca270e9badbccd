// How a picture of any size is shown to a text detector (docs/models/dbnet.md, Evaluation).
#pragma once

#include <cstdint>
#include <vector>

#include "data/images/labelled_images.h"
#include "media/resize.h"

namespace weft {

// Sides in pixels. The picture, scaled, is in the top left corner of the network's input.
struct ViewSize {
  ImageSize scaled, padded;
  bool operator==(const ViewSize&) const = default;
};
// Both sides times min(short_side / the shorter, long_side / the longer), halves up; a short_side
// of 0 keeps them. Padded to multiples of Dbnet::stride.
ViewSize view_size(ImageSize picture, std::int64_t short_side, std::int64_t long_side);

// The picture at that size: u8 [padded.height, padded.width, 3], bilinear by OpenCV; the padding is
// the mean colour, which the network sees as 0.
std::vector<std::uint8_t> detector_view(const RgbView& picture, const ViewSize& size);

}  // namespace weft
