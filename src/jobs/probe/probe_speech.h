// `weft probe` of SadTalker's way from speech to motion: sadtalker_exp, sadtalker_pose, and
// sadtalker_mel, which has no weights. Contract: docs/probe.md.
#pragma once

#include <string>
#include <vector>

#include "jobs/probe/probe.h"

namespace weft {

inline const std::vector<std::string> speech_probes = {"sadtalker_exp", "sadtalker_pose"};
int probe_speech(const Deck& deck, const ProbeRequest& request);
int probe_mel(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
