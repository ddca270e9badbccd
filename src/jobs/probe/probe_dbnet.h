// `weft probe` of the text detector's parts without weights: boxes and frames. Contract:
// docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_boxes(const Deck& deck, const ProbeRequest& request);
int probe_frames(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
