// What a text detector learns from a picture's regions (docs/models/dbnet.md, Training).
#pragma once

#include <cstdint>
#include <span>

#include "data/images/image_sizes.h"
#include "data/text_images/text_images.h"

namespace weft {

// Writes flags (text_bit, counts_bit, threshold_bit of text_source.h) and thresholds, u8 [H,W]
// each, of a picture of that size:
//   ignored      regions marked so, those whose area is below 1 or whose least rectangle has a side
//                below 8 pixels, and those of which shrinking leaves nothing or several pieces
//   text         within a region whose corners are cut to whole pixels and which is then shrunk by
//                int(A (1 - 0.4^2) / (P + 0.001) + 0.5), A its area, P its perimeter
//   counts       everywhere but within ignored regions
//   threshold    within a region grown by D = A (1 - 0.4^2) / P
// A pixel (x, y) of an area is one that OpenCV's fillPoly fills, edges included. Its threshold is
// 1 - min(1, d / D) as 0..255, with d the distance to the region's nearest edge, the greatest over
// all regions that are not ignored; 0 where the threshold does not count.
void write_text_targets(std::span<const TextRegion> regions, ImageSize size,
                        std::span<std::uint8_t> flags, std::span<std::uint8_t> thresholds);

}  // namespace weft
