// Cuts one video into clips.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "data/ingest/ingest.h"
#include "data/ingest/inputs.h"

namespace weft {

struct CutResult {
  std::int64_t frames = 0;  // decoded
  std::int64_t clips = 0;
  std::int64_t damaged = 0;  // frames whose errors the decoder concealed
  std::string unused;        // why an intact video gave no clip: too small, too short
  std::string broken;        // why it could not be read to the end
};

// Calls `take` for each clip, in order of time; `take` returns false when it wants no more. `tick`
// is called after each frame with the number of frames so far. Faults of the video are reported in
// the result, faults of `take` are thrown. Memory: the frames of the longest clip, at the clip's
// size.
CutResult cut_video(
    const IngestInput& input, const IngestDeck& deck, const MediaAccess& access, int threads,
    const std::function<bool(const Bucket&, std::span<const std::byte>, const ClipInfo&)>& take,
    const std::function<void(std::int64_t frames)>& tick);

}  // namespace weft
