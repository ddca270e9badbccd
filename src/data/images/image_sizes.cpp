#include "data/images/image_sizes.h"

#include <algorithm>

#include "core/error.h"

namespace weft {

ImageSize training_size(ImageSize image, std::int64_t short_side, std::int64_t max_side) {
  WEFT_ASSERT(image.height > 0 && image.width > 0 && short_side > 0 && max_side > 0);
  const auto [shorter, longer] = std::minmax(image.height, image.width);
  const double scale = std::min(static_cast<double>(short_side) / static_cast<double>(shorter),
                                static_cast<double>(max_side) / static_cast<double>(longer));
  const auto scaled = [&](std::int64_t side) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(side) * scale));
  };
  return {scaled(image.height), scaled(image.width)};
}

ImageSize micro_batch_size(std::span<const ImageView> views, std::int64_t padding) {
  ImageSize size;
  for (const ImageView& v : views) {
    size.height = std::max(size.height, rounded_up(v.height, padding));
    size.width = std::max(size.width, rounded_up(v.width, padding));
  }
  return size;
}

ImageSize evaluation_size(ImageSize image, std::int64_t short_side, std::int64_t max_side,
                          std::int64_t padding) {
  const ImageSize scaled = training_size(image, short_side, max_side);
  return {rounded_up(scaled.height, padding), rounded_up(scaled.width, padding)};
}

}  // namespace weft
