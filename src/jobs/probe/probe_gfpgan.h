// `weft probe` of what restores faces: both networks, and the way of a face out of a frame and back
// into it. Contract: docs/probe.md.
#pragma once

#include <string>
#include <vector>

#include "jobs/probe/probe.h"

namespace weft {

inline const std::vector<std::string> restore_probes = {"gfpgan", "parsenet"};
int probe_gfpgan(const Deck& deck, const ProbeRequest& request);
// Without weights: "gfpgan_paste".
int probe_gfpgan_paste(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
