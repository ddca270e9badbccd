#include "data/images/labelled_images.h"

#include "data/images/image_store.h"
#include "data/images/shapes.h"

namespace weft {

std::unique_ptr<LabelledImages> open_labelled_images(const std::string& path, bool verify) {
  return is_shapes(path) ? make_shapes(path) : open_image_store(path, verify);
}

}  // namespace weft
