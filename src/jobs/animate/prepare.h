// The preparation of a clip: its face, and its motion.
#pragma once

#include "jobs/animate/networks.h"
#include "jobs/animate/prepared.h"
#include "media/media_source.h"

namespace weft {

// Seconds of a rank by stage.
struct StageSeconds {
  double prepare = 0, speech = 0, render = 0, paste = 0, enhance = 0, encode = 0, join = 0;
  double waited = 0;  // for what another rank makes
};

// What draws of a clip start from: of its seed and its name, so that clips of a list differ.
std::uint64_t draws_of(const ClipRequest& clip);

// In the current arena. Exit::data for a picture without a face, speech of less than a frame, and
// whatever else is wrong with the files; more than one face is a WARN.
PreparedClip prepare_clip(const ClipRequest& clip, AnimateNetworks& networks,
                          const MediaAccess& access, StageSeconds& seconds);

}  // namespace weft
