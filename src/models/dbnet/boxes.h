// Text regions of a probability map: the post-processing of mmocr's DBPostprocessor
// (docs/models/dbnet.md, Post-processing).
#pragma once

#include <array>
#include <span>
#include <vector>

#include "data/text_images/polygon.h"
#include "models/dbnet/dbnet.h"

namespace weft {

struct TextBox {
  std::array<float, 8> corners = {};  // x, y of four corners, in pixels of the map
  float score = 0;                    // mean probability within the region
};

// probability f32 [height, width]. Safe from several threads at once; takes one thread.
std::vector<TextBox> find_text_boxes(std::span<const float> probability, std::int64_t height,
                                     std::int64_t width, const PostprocessDeck& deck);

// How many of them count as text: those with a score above min_text_score.
std::int64_t count_text(std::span<const TextBox> boxes, const PostprocessDeck& deck);

// Area in pixels that both cover, whatever their shapes; inside is what a polygon winds around. By
// Clipper, on a grid of 1/256 pixel. Exit::data for coordinates beyond 1e6 pixels.
double common_area(std::span<const Point> a, std::span<const Point> b);

}  // namespace weft
