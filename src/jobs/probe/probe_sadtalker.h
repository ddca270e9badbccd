// `weft probe` of SadTalker's renderer. Contract: docs/probe.md.
#pragma once

#include <string>
#include <vector>

#include "jobs/probe/probe.h"

namespace weft {

inline const std::vector<std::string> render_probes = {"sadtalker_kp", "sadtalker_transform",
                                                       "sadtalker_generator", "sadtalker_render"};
int probe_sadtalker(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
