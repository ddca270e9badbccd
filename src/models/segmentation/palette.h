// Colours of classes (docs/models/segmentation.md, Colours).
#pragma once

#include <cstdint>
#include <vector>

#include "media/writers.h"

namespace weft {

// Black for -1, unlabelled; the original's colours of ADE20K's 150 classes; beyond, others that
// follow from the number alone.
Rgb class_colour(std::int64_t c);

// By label: black for 0, then the colours of the classes.
std::vector<Rgb> label_palette(std::int64_t classes);

}  // namespace weft
