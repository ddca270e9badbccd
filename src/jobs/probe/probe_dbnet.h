// `weft probe` of a text detector: its network (forward), and its parts without weights, boxes and
// frames. Contract: docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_detector(const Deck& deck, const ProbeRequest& request);
int probe_boxes(const Deck& deck, const ProbeRequest& request);
int probe_frames(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
