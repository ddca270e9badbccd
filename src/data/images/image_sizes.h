// At which size a labelled image is trained on and evaluated: sides in pixels throughout.
#pragma once

#include <cstdint>
#include <span>

#include "data/step_plan.h"

namespace weft {

struct ImageSize {
  std::int64_t height = 0, width = 0;
  bool operator==(const ImageSize&) const = default;
};

// Portraits and landscapes are batched apart: 1 of a portrait, else 0.
constexpr std::size_t orientation_of(ImageSize size) { return size.height > size.width ? 1 : 0; }

// n rounded up to a multiple of `multiple`.
constexpr std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The image scaled, in double, by min(short_side / its shorter side, max_side / its longer one);
// sides are cut to whole pixels, 1 at least.
ImageSize training_size(ImageSize image, std::int64_t short_side, std::int64_t max_side);

// The size of a micro-batch: the greatest height and width of its views, rounded up to multiples of
// `padding`.
ImageSize micro_batch_size(std::span<const ImageView> views, std::int64_t padding);

// An evaluation stretches the image to training_size with both sides rounded up to multiples of
// `padding`, and pads nothing.
ImageSize evaluation_size(ImageSize image, std::int64_t short_side, std::int64_t max_side,
                          std::int64_t padding);

}  // namespace weft
