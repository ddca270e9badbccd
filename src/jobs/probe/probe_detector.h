// `weft probe forward` of a text detector.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_detector(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
