#include "models/segmentation/class_names.h"

#include "core/error.h"
#include "data/ingest/ingest_images.h"
#include "models/segmentation/options.h"
#include "text/utf8.h"

namespace weft {

std::vector<std::string> class_names(const Deck& deck, const std::vector<std::string>& of_data) {
  const SegmentationDeck& model = deck.get<SegmentationDeck>();
  std::vector<std::string> names = of_data;
  if (!model.class_names.empty()) {
    names = read_class_names(model.class_names, deck.media);
    WEFT_CHECK(std::ssize(names) == model.num_classes, Exit::usage,
               "name a file with a line for each class",
               "model.class_names = \"{}\" has {} names, and model.num_classes = {}",
               model.class_names, names.size(), model.num_classes);
  }
  names.resize(static_cast<std::size_t>(model.num_classes));
  for (std::size_t c = 0; c < names.size(); ++c) {
    check_utf8(names[c], fmt::format("the name of class {}", c));
    for (char& letter : names[c])  // they are printed
      if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) letter = '_';
    if (names[c].empty()) names[c] = fmt::format("class {}", c);
  }
  return names;
}

}  // namespace weft
