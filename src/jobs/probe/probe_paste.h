// `weft probe sadtalker_paste`: rendered frames pasted back into the picture. No weights. Contract:
// docs/probe.md.
#pragma once

#include <string>
#include <vector>

#include "jobs/probe/probe.h"

namespace weft {

int probe_paste(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
