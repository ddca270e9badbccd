// Cuts one video into clips.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "data/ingest/ingest.h"
#include "data/lists/lists.h"

namespace weft {

// The size of a video's clips.
struct ClipSize {
  std::string resolution, aspect;
  std::int64_t height = 0, width = 0;

  std::string bucket(std::int64_t frames) const;
};
// The largest listed resolution that the picture is big enough for; none if it is too small for
// all.
std::optional<ClipSize> choose_clip_size(const IngestDeck& deck, std::int64_t height,
                                         std::int64_t width);
// The lengths in frames that a video, or a still picture, is cut into, the longest first.
std::vector<std::int64_t> clip_lengths(const IngestDeck& deck, bool still);

// Frames from one of a clip to the next: a still picture skips ingest.frame_interval, as
// ingest.fps.
std::int64_t clip_interval(const IngestDeck& deck, bool still);

struct CutResult {
  std::int64_t frames = 0;  // decoded
  std::int64_t clips = 0;
  std::int64_t cuts = 0;     // with ingest.cuts: at which clips began anew
  std::int64_t damaged = 0;  // frames whose errors the decoder concealed
  std::string unused;        // why an intact video gave no clip: too small, too short
  std::string broken;        // why it could not be read to the end
};

// Calls `take` for each clip, in order of time; `take` returns false when it wants no more. `tick`
// is called after each frame with the number of frames so far. Faults of the video are reported in
// the result, faults of `take` are thrown. Memory: the frames of the longest clip, at the clip's
// size.
CutResult cut_video(
    const MediaItem& input, const IngestDeck& deck, const MediaAccess& access, int threads,
    const std::function<bool(const Bucket&, std::span<const std::byte>, const ClipInfo&)>& take,
    const std::function<void(std::int64_t frames)>& tick);

}  // namespace weft
