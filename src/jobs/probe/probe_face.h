// `weft probe` of what SadTalker does to a picture before it moves: sadtalker_detect, sadtalker_fan
// and sadtalker_recon run networks; sadtalker_crop, _align, _landmarks and _resize have no weights.
// Contract: docs/probe.md.
#pragma once

#include <string>
#include <vector>

#include "jobs/probe/probe.h"

namespace weft {

inline const std::vector<std::string> face_probes = {"sadtalker_detect", "sadtalker_fan",
                                                     "sadtalker_recon"};
inline const std::vector<std::string> geometry_probes = {"sadtalker_crop", "sadtalker_align",
                                                         "sadtalker_landmarks", "sadtalker_resize"};
int probe_face(const Deck& deck, const ProbeRequest& request);
int probe_geometry(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
