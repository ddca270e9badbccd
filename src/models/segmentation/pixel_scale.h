// What pixels become for a segmentation network (docs/models/segmentation.md, Pixels).
#pragma once

#include "models/segmentation/options.h"
#include "ops/layout.h"

namespace weft {

// By model.preprocessing: ImageNet's statistics of RGB in 0 to 1; or BGR in 0 to 255 less its mean.
inline ops::PixelScale pixel_scale(const SegmentationDeck& deck) {
  if (deck.preprocessing == "bgr")
    return {1.0f, {102.9801f, 115.9465f, 122.7717f}, {1.0f, 1.0f, 1.0f}, true};
  return {255.0f, {0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}, false};
}

}  // namespace weft
