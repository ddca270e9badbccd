#include "data/images/labelled_images.h"

#include <fmt/format.h>

#include "data/images/image_store.h"
#include "data/images/shapes.h"

namespace weft {

std::unique_ptr<LabelledImages> open_labelled_images(const std::string& path, bool verify) {
  return is_shapes(path) ? make_shapes(path) : open_image_store(path, verify);
}

std::string missing_classes(std::span<const std::uint64_t> label_images, std::int64_t num_classes,
                            std::span<const std::string> class_names) {
  if (label_images.empty()) return "";
  std::size_t classes = static_cast<std::size_t>(num_classes), missing = 0;
  for (std::size_t label = 1; num_classes == 0 && label < label_images.size(); ++label)
    if (label_images[label] > 0) classes = label;
  constexpr std::size_t most = 8;
  std::string list;
  for (std::size_t c = 0; c < classes && c + 1 < label_images.size(); ++c) {
    if (label_images[c + 1] > 0) continue;
    if (++missing > most) continue;
    list += fmt::format("{}{}{}", list.empty() ? "" : ", ", c,
                        c < class_names.size() ? " " + class_names[c] : "");
  }
  if (missing > most) list += ", ...";
  if (classes == 0) return "no pixel is labelled";
  // A network that only ever sees one class learns to answer with it.
  if (num_classes == 0 && classes == 1) return "class 0 is the only one that occurs in the labels";
  if (missing == 0) return "";
  return fmt::format("{} of {} classes never {} in the labels: {}", missing, classes,
                     missing == 1 ? "occurs" : "occur", list);
}

}  // namespace weft
