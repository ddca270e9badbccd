// `weft probe` of what happens to labelled images before a network sees them: resize_image
// (model.name "image_resize"), segmentation_batch and segmentation_scales ("segmentation_data").
// No weights. Contract: docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

// Whether `what` is one of these.
bool is_image_probe(const std::string& what);
int probe_images(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
