#include "data/ingest/cut.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "core/error.h"
#include "data/aspect.h"
#include "data/ingest/ingest.h"
#include "media/resize.h"
#include "media/video_reader.h"

namespace weft {
namespace {

// A frame at the clip's size, waiting until its window is full.
struct Waiting {
  std::int64_t index = 0;  // in the video
  double seconds = 0;
  std::vector<std::byte> pixels;
};

class Cutter {
 public:
  Cutter(
      const MediaItem& input, const IngestDeck& deck, VideoReader& reader, ClipSize size,
      const std::function<bool(const Bucket&, std::span<const std::byte>, const ClipInfo&)>& take)
      : input_(input), deck_(deck), reader_(reader), size_(std::move(size)), take_(take) {
    lengths_ = clip_lengths(deck, reader.is_image());
    interval_ = clip_interval(deck, reader.is_image());
    // Strides that are multiples of the interval take every interval-th frame of the video; others
    // need them all.
    sparse_ = deck.stride % interval_ == 0;
    frame_bytes_ = static_cast<std::size_t>(size_.height * size_.width * 3);
  }

  // False when no more clips are wanted.
  bool add(const VideoFrame& frame) {
    seen_ = frame.index + 1;
    if (frame.index >= start_ && (!sparse_ || frame.index % interval_ == 0)) {
      Waiting w;
      if (!spare_.empty()) {
        w = std::move(spare_.back());
        spare_.pop_back();
      }
      w.index = frame.index;
      w.seconds = frame.seconds;
      w.pixels.resize(frame_bytes_);
      resize_(frame, size_.height, size_.width, reinterpret_cast<std::uint8_t*>(w.pixels.data()));
      waiting_.push_back(std::move(w));
    }
    while (seen_ - start_ >= lengths_.front() * interval_)
      if (!emit(lengths_.front())) return false;
    return true;
  }

  // The remainder, which is too short for the longest clip.
  void finish() {
    for (;;) {
      const auto length = std::find_if(lengths_.begin(), lengths_.end(), [&](std::int64_t t) {
        return seen_ - start_ >= t * interval_;
      });
      if (length == lengths_.end() || !emit(*length)) return;
    }
  }

  std::int64_t clips() const { return clips_; }
  std::int64_t shortest() const { return lengths_.back() * interval_; }

 private:
  bool emit(std::int64_t frames) {
    Bucket b;
    b.frames = b.pixel_frames = frames;
    b.height = b.pixel_height = size_.height;
    b.width = b.pixel_width = size_.width;
    b.name = size_.bucket(frames);
    clip_.resize(b.clip_bytes());
    std::size_t filled = 0;
    const Waiting* first = nullptr;
    for (const Waiting& w : waiting_) {
      const std::int64_t at = w.index - start_;
      if (at < 0 || at >= frames * interval_ || at % interval_ != 0) continue;
      if (first == nullptr) first = &w;
      std::memcpy(clip_.data() + filled, w.pixels.data(), frame_bytes_);
      filled += frame_bytes_;
    }
    WEFT_ASSERT(filled == clip_.size());
    ClipInfo info;
    // One frame is an image to the model, whatever it was taken from.
    info.fps =
        frames == 1 ? 120.0f : static_cast<float>(reader_.fps() / static_cast<double>(interval_));
    info.source =
        fmt::format("{} frame {} at {:.3f} s", input_.media.name(), start_, first->seconds);
    info.text = input_.text;
    ++clips_;
    const bool more = take_(b, clip_, info);
    start_ += deck_.stride > 0 ? deck_.stride : frames * interval_;
    while (!waiting_.empty() && waiting_.front().index < start_) {
      spare_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    return more;
  }

  const MediaItem& input_;
  const IngestDeck& deck_;
  VideoReader& reader_;
  ClipSize size_;
  const std::function<bool(const Bucket&, std::span<const std::byte>, const ClipInfo&)>& take_;
  CoverResize resize_;
  std::vector<std::int64_t> lengths_;  // longest first
  std::int64_t interval_ = 1;
  bool sparse_ = true;
  std::size_t frame_bytes_ = 0;
  std::int64_t seen_ = 0;   // frames of the video so far
  std::int64_t start_ = 0;  // of the window being filled
  std::int64_t clips_ = 0;
  std::deque<Waiting> waiting_;
  std::vector<Waiting> spare_;  // their memory is reused
  std::vector<std::byte> clip_;
};

}  // namespace

std::string ClipSize::bucket(std::int64_t frames) const {
  return fmt::format("{}-{}{}{}", resolution, frames, aspect.empty() ? "" : "-", aspect);
}

std::optional<ClipSize> choose_clip_size(const IngestDeck& deck, std::int64_t height,
                                         std::int64_t width) {
  if (deck.height > 0)
    return ClipSize{fmt::format("{}x{}", deck.height, deck.width), "", deck.height, deck.width};
  std::vector<std::string> names = deck.resolutions;
  std::stable_sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return resolution_area(a) > resolution_area(b);
  });
  for (const std::string& name : names) {
    if (!area_suffices(name, height, width)) continue;
    const AspectSize& shape = nearest_aspect(name, height, width);
    return ClipSize{name, shape.key, shape.height, shape.width};
  }
  return std::nullopt;
}

std::vector<std::int64_t> clip_lengths(const IngestDeck& deck, bool still) {
  std::vector<std::int64_t> lengths = deck.frames;
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  // Length 1 next to longer ones is for stills: single frames cut from a video's remainder teach
  // nothing.
  if (lengths.back() == 1 && lengths.front() > 1 && !still)
    lengths.erase(std::find(lengths.begin(), lengths.end(), 1), lengths.end());
  return lengths;
}

std::int64_t clip_interval(const IngestDeck& deck, bool still) {
  return still ? 1 : deck.frame_interval;
}

CutResult cut_video(
    const MediaItem& input, const IngestDeck& deck, const MediaAccess& access, int threads,
    const std::function<bool(const Bucket&, std::span<const std::byte>, const ClipInfo&)>& take,
    const std::function<void(std::int64_t frames)>& tick) {
  CutResult result;
  std::optional<VideoReader> reader;
  std::optional<Cutter> cutter;
  // Catch only the video's own faults, never those of `take`: a full disk is not a broken video.
  const auto next = [&]() -> const VideoFrame* {
    try {
      if (!reader) reader.emplace(input.media, VideoReaderOptions{deck.fps, threads, access});
      const VideoFrame* frame = reader->next();
      result.damaged = reader->damaged();
      return frame;
    } catch (const Error& e) {
      result.broken = fmt::format("{} ({})", e.what(), e.hint());
      return nullptr;
    }
  };
  while (const VideoFrame* frame = next()) {
    if (!cutter) {
      auto size = choose_clip_size(deck, frame->height, frame->width);
      if (!size) {
        result.unused = fmt::format("{}x{} pixels are too few for all requested resolutions",
                                    frame->width, frame->height);
        return result;
      }
      cutter.emplace(input, deck, *reader, std::move(*size), take);
    }
    ++result.frames;
    const bool more = cutter->add(*frame);
    tick(result.frames);
    if (!more) {
      result.clips = cutter->clips();
      return result;
    }
  }
  if (cutter) {
    // After a fault, no further frame is certain to be whole.
    if (result.broken.empty()) cutter->finish();
    result.clips = cutter->clips();
    if (result.clips == 0 && result.broken.empty())
      result.unused = fmt::format("{} frames are fewer than the {} of the shortest clip",
                                  result.frames, cutter->shortest());
  }
  return result;
}

}  // namespace weft
