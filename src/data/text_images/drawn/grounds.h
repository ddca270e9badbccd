// What drawn text stands on, and what a camera does to it.
#pragma once

#include <cstdint>
#include <vector>

#include "data/images/image_sizes.h"
#include "data/text_images/drawn/draws.h"

namespace weft {

struct Picture {
  ImageSize size;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
};

// A picture without text: soft or rough surfaces, stripes, shapes, and things that resemble text
// but are none: bricks, windows, fences, leaves, circles, scribbles.
void paint_ground(Draws& draws, Picture& out);

// A part of `footage`, scaled, as the ground; `out` has its size already.
void take_ground(Draws& draws, const Picture& footage, Picture& out);

// Blur, shake, low resolution, contrast, shade and noise, each now and then.
void photograph(Draws& draws, Picture& picture);

}  // namespace weft
