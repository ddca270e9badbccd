// Names and colours of classes, for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "media/writers.h"

namespace weft {

// model.num_classes names: of the file model.class_names (data/ingest/ingest_images.h) if the deck
// has it, else those of the data; "class 17" where there is none. Exit::usage for a file of another
// number of names, Exit::data for one that cannot be read, and names that are not UTF-8.
std::vector<std::string> class_names(const Deck& deck,
                                     const std::vector<std::string>& of_data = {});

// Colours (docs/models/segmentation.md, Colours). Black for -1, unlabelled; the original's colours
// of ADE20K's 150 classes; beyond, others that follow from the number alone.
Rgb class_colour(std::int64_t c);

// By label: black for 0, then the colours of the classes. `of_data`: RGB by label, as
// LabelledImages::palette(); it is taken where it tells the classes apart: they all have colours,
// different ones, that are not all grey.
std::vector<Rgb> label_palette(std::int64_t classes, std::span<const std::uint8_t> of_data = {});
// "#rrggbb"
std::string css_colour(Rgb colour);

}  // namespace weft
