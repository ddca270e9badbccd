// How much two polygons have in common.
#pragma once

#include "data/text_images/polygon.h"

namespace weft {

// Area in pixels that both cover, whatever their shapes; inside is what a polygon winds around. By
// Clipper, on a grid of 1/256 pixel. Exit::data for coordinates beyond 1e6 pixels.
double common_area(std::span<const Point> a, std::span<const Point> b);

}  // namespace weft
