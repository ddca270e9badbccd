// Polygons drawn into pictures, for people to look at.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/images/image_sizes.h"
#include "data/text_images/polygon.h"
#include "media/writers.h"

namespace weft {

// Draws the polygon's edges into rgb [height, width, 3], `thickness` pixels wide. What lies outside
// the picture is left out, and so is a polygon with a corner that is not finite.
void draw_outline(std::vector<std::uint8_t>& rgb, ImageSize size, std::span<const Point> polygon,
                  Rgb colour, int thickness);

}  // namespace weft
