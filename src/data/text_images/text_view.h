// A picture with text as it is trained on: a square, changed at random or not.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "data/images/labelled_images.h"
#include "data/text_images/text_images.h"

namespace weft {

// Scaled to side / its longer side, padded with black at the right and at the bottom. Regions are
// scaled alike.
void fit_text(const TextImage& in, std::int64_t side, TextImage& out);

// The same after the changes that DBNet was trained with, all random numbers from `draw`:
//   flip     left to right with probability 1/2
//   turn     by -10 to 10 degrees about the middle; the size stays, corners become black; regions
//            are clipped to the picture, and left out where nothing remains
//   scale    by 0.5 to 3. The crop is scaled again to `side`, so this matters where it is below
//            that: such a picture is blurred
//   crop     whole pixels of a box that has at least one region and cuts none: one region is drawn;
//            left and right are drawn from columns before and behind it in which no region lies or
//            which are the picture's first or last, at least a tenth of its width apart; first the
//            run of such columns, then the column. Top and bottom likewise. Regions outside are
//            left out. Without any region, all of the picture
//   fit      as fit_text
//   colour   brightness times 1 - 32/255 to 1 + 32/255, then or before (1/2) saturation times 0.5
//            to 1.5, both cut to 0..255
void change_text(const TextImage& in, std::int64_t side, std::uint64_t draw, TextImage& out);

// How many regions of pictures a text detector learns from, and why not from the others, as
// write_text_targets() finds in the pictures' own pixels.
struct RegionCounts {
  std::int64_t pictures = 0, without = 0;  // without one to learn from
  std::int64_t regions = 0, marked = 0, small = 0, crossing = 0, outside = 0;
  // Adds the regions of a picture; without its size nothing is known to be outside.
  void add(std::span<const TextRegion> all, ImageSize size = {});
  std::string text() const;
};

// What a text detector learns from a picture's regions (docs/models/dbnet.md, Training).
// Writes flags (text_bit, counts_bit, threshold_bit of text_images.h) and thresholds, u8 [H,W]
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
