// Pieces of a clip's frames, from its preparation to segments of MP4.
#pragma once

#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "jobs/animate/networks.h"
#include "jobs/animate/prepare.h"
#include "jobs/animate/worker.h"
#include "media/writers.h"
#include "models/sadtalker/face/paste.h"

namespace weft {

// The name of a frame that is kept, in the folder of its clip's frames.
std::string frame_file(std::int64_t frame);

// A clip whose pieces a rank makes: what they share is computed once.
class ClipInHand {
 public:
  // In the current arena, where the source's features stay.
  ClipInHand(const ClipRequest& clip, PreparedClip prepared, const Renderer& renderer,
             const MediaDeck& limits);
  ClipInHand(const ClipInHand&) = delete;
  ClipInHand& operator=(const ClipInHand&) = delete;

  const ClipRequest& clip() const { return clip_; }
  std::int64_t frames() const { return rows_.frames; }
  std::vector<std::uint8_t> render(std::int64_t first, std::int64_t count) const {
    return renderer_.render(source_, rows_, first, count);
  }
  // A rendered frame at its final size and, in the full modes, in its picture. Thread-safe.
  ImageFile shaped(ImageFile frame) const;

 private:
  const ClipRequest& clip_;
  const Renderer& renderer_;
  PreparedClip prepared_;
  DrivingRows rows_;
  Renderer::Source source_;
  ImageFile picture_;  // in the full modes
  std::optional<Pasting> pasting_;
};

// Makes segments. The network's thread renders and enhances; beside it one thread shapes frames and
// another one encodes them, so that a few batches of frames are in memory, whatever the length.
class SegmentMaker {
 public:
  SegmentMaker(AnimateNetworks& networks, StageSeconds& seconds)
      : networks_(networks), seconds_(seconds) {}

  // Frames [first, first + count) to `file`, which is there only once it is whole. `pictures`: a
  // folder for them as PNG too, which is there; empty: none. False if `go_on`, asked before each
  // batch, said no.
  bool make(const ClipInHand& clip, std::int64_t first, std::int64_t count,
            const std::filesystem::path& file, const std::filesystem::path& pictures,
            const std::function<bool()>& go_on);

 private:
  struct Batch {
    std::vector<ImageFile> frames;
    double seconds = 0;
  };
  struct Segment;

  AnimateNetworks& networks_;
  StageSeconds& seconds_;
  Worker shaping_, encoding_;
};

}  // namespace weft
