// Colours of classes (docs/models/segmentation.md, Colours).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "media/writers.h"

namespace weft {

// Black for -1, unlabelled; the original's colours of ADE20K's 150 classes; beyond, others that
// follow from the number alone.
Rgb class_colour(std::int64_t c);

// By label: black for 0, then the colours of the classes. `of_data`: RGB by label, as
// LabelledImages::palette(); it is taken where it tells the classes apart: they all have colours,
// different ones, that are not all grey.
std::vector<Rgb> label_palette(std::int64_t classes, std::span<const std::uint8_t> of_data = {});
// "#rrggbb"
std::string css_colour(Rgb colour);

}  // namespace weft
