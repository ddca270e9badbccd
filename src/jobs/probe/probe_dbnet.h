// `weft probe` of the text detector: forward, and boxes, frames and video_frames, which take no
// weights. Contract: docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_detector(const Deck& deck, const ProbeRequest& request);
int probe_boxes(const Deck& deck, const ProbeRequest& request);
int probe_video_frames(const Deck& deck, const ProbeRequest& request);
int probe_frames(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
