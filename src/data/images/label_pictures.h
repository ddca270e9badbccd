// Pictures of labels and predictions, for people.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/images/labelled_images.h"
#include "media/writers.h"

namespace weft {

// Colours of labels u8 [height, width] (0 for none, v for class v - 1): [height, width, 3].
std::vector<std::uint8_t> coloured(std::span<const std::uint8_t> labels,
                                   std::span<const Rgb> palette);
// Classes as such labels.
std::vector<std::uint8_t> as_labels(std::span<const std::uint8_t> classes);
// Half the picture, half the colours.
std::vector<std::uint8_t> blended(std::span<const std::uint8_t> rgb,
                                  std::span<const std::uint8_t> colours);
// The picture, dark, with the pixels white whose labels differ; darker still where none is wanted.
std::vector<std::uint8_t> differences(std::span<const std::uint8_t> rgb,
                                      std::span<const std::uint8_t> wanted,
                                      std::span<const std::uint8_t> found);
// Panels [height, width, 3] from left to right.
std::vector<std::uint8_t> side_by_side(const std::vector<std::span<const std::uint8_t>>& panels,
                                       ImageSize size);

}  // namespace weft
