// A picture with text as it is trained on: a square, changed at random or not.
#pragma once

#include <cstdint>

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

}  // namespace weft
