// Polygons around text in pictures: x to the right, y down, in pixels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/images/labelled_images.h"
#include "media/writers.h"

namespace weft {

struct Point {
  double x = 0, y = 0;
  bool operator==(const Point&) const = default;
};
using Polygon = std::vector<Point>;  // closed: the last point joins the first

double polygon_area(std::span<const Point> polygon);  // not below 0
double polygon_length(std::span<const Point> polygon);

// The polygon grown by `distance`, or shrunk where it is below 0, by Clipper: round joins, arc
// tolerance 0.25, points rounded to whole pixels (towards zero on the way in, as pyclipper does).
// None: nothing is left. Several: it falls apart or has holes; in Clipper's order.
std::vector<Polygon> offset_polygon(std::span<const Point> polygon, double distance);

// Rectangle of least area around the points (OpenCV's minAreaRect): its four corners, as boxPoints
// gives them, and its shorter side. Three points or more.
struct AreaRect {
  float corners[4][2] = {};
  float shorter_side = 0;
};
AreaRect min_area_rect(std::span<const Point> points);

// Draws the polygon's edges into rgb [height, width, 3], `thickness` pixels wide. What lies outside
// the picture is left out, and so is a polygon with a corner that is not finite.
void draw_outline(std::vector<std::uint8_t>& rgb, ImageSize size, std::span<const Point> polygon,
                  Rgb colour, int thickness);

}  // namespace weft
