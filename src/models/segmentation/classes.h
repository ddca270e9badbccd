// Names and colours of classes, for people; and weights of classes by how often they occur.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/images/labelled_images.h"
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
// The same for model.num_classes classes, where model.palette comes first: a list of "#rrggbb", or
// a file with one a line, or with lines "R G B". Exit::usage for other numbers of colours and for
// what is no colour, Exit::data for a file that cannot be read.
std::vector<Rgb> label_palette(const Deck& deck, std::span<const std::uint8_t> of_data = {});
// A line for the key of a result that is drawn in the deck's colours; "" where it names none.
std::string describe_palette(const Deck& deck);
// "#rrggbb"
std::string css_colour(Rgb colour);

// In the folder of pictures that are drawn in these colours.
inline constexpr const char* legend_file = "legend.svg";
// A picture (SVG) of every class: its colour, number and name. `palette` as label_palette().
std::string legend_svg(std::span<const std::string> names, std::span<const Rgb> palette);

// Weights of `classes` classes (docs/models/segmentation.md, Training) from the counts of pixels of
// a store, by "median_frequency" or "inverse_frequency"; 1 for a class that does not occur.
// Exit::usage where the data has no counts.
std::vector<float> frequency_weights(const LabelledImages& images, std::int64_t classes,
                                     const std::string& by);

}  // namespace weft
