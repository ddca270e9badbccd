// Text regions of a scored frame as people want them: what share of it they cover, where they lie
// in the picture that the frame was cut from, and drawn into it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/dbnet/boxes.h"

namespace weft {

// Share of the pixels of a frame of side x side that lie in a box at least.
double covered_share(std::span<const TextBox> boxes, std::int64_t side);

// The boxes in pixels of the picture of height x width that the frame of `side` was made of
// (models/dbnet/detector.h): scaled, its middle cut out.
std::vector<TextBox> in_picture(std::span<const TextBox> boxes, std::int64_t height,
                                std::int64_t width, std::int64_t side);

// Draws the boxes' outlines into rgb [side, side, 3].
void draw_boxes(std::span<const TextBox> boxes, std::int64_t side, std::vector<std::uint8_t>& rgb);

}  // namespace weft
