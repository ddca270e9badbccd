// `weft probe segmentation_scores` for model.name "segmentation_evaluation": scores, predictions
// and counts from logits. No weights. Contract: docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_scores(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
