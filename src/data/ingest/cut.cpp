#include "data/ingest/cut.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "core/log.h"
#include "data/aspect.h"
#include "data/ingest/ingest.h"
#include "media/resize.h"
#include "media/video_reader.h"

namespace weft {
namespace {

// A frame that waits at the clip's size until its window is full.
struct Waiting {
  std::int64_t index = 0;  // in the video
  double seconds = 0;
};

// Memory is set aside for a window before its frames are there, as far as this.
constexpr std::size_t most_reserved = std::size_t{1} << 30;

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
    const std::int64_t window = lengths_.front() * (sparse_ ? 1 : interval_), all = reader.frames();
    const auto frames = static_cast<std::size_t>(all > 0 ? std::min(all, window) : window);
    pixels_.reserve(std::min(frames, most_reserved / frame_bytes_) * frame_bytes_);
  }

  // False when no more clips are wanted.
  bool add(const VideoFrame& frame) {
    if (frame.cut) {  // no clip crosses it
      if (!finish()) return false;
      ++cuts_;
      waiting_.clear();
      start_ = frame.index;
    }
    seen_ = frame.index + 1;
    if (frame.index >= start_ && (!sparse_ || (frame.index - start_) % interval_ == 0)) {
      const std::size_t at = waiting_.size() * frame_bytes_;
      if (pixels_.size() < at + frame_bytes_) pixels_.resize(at + frame_bytes_);
      resize_(frame, size_.height, size_.width,
              reinterpret_cast<std::uint8_t*>(pixels_.data() + at));
      waiting_.push_back({frame.index, frame.seconds});
    }
    while (seen_ - start_ >= lengths_.front() * interval_)
      if (!emit(lengths_.front())) return false;
    return true;
  }

  // The remainder, which is too short for the longest clip. False when no more clips are wanted.
  bool finish() {
    for (;;) {
      const auto length = std::find_if(lengths_.begin(), lengths_.end(), [&](std::int64_t t) {
        return seen_ - start_ >= t * interval_;
      });
      if (length == lengths_.end()) return true;
      if (!emit(*length)) return false;
    }
  }

  std::int64_t clips() const { return clips_; }
  std::int64_t cuts() const { return cuts_; }
  std::int64_t shortest() const { return lengths_.back() * interval_; }

 private:
  bool emit(std::int64_t frames) {
    Bucket b;
    b.frames = b.pixel_frames = frames;
    b.height = b.pixel_height = size_.height;
    b.width = b.pixel_width = size_.width;
    b.name = size_.bucket(frames);
    // All frames before the window are gone, so it begins with the first one that waits.
    const std::int64_t apart = sparse_ ? 1 : interval_;
    WEFT_ASSERT(!waiting_.empty() && waiting_.front().index == start_ &&
                std::ssize(waiting_) > (frames - 1) * apart);
    std::span<const std::byte> clip = std::span(pixels_).first(b.clip_bytes());
    if (apart > 1) {
      apart_.resize(b.clip_bytes());
      for (std::int64_t t = 0; t < frames; ++t)
        std::memcpy(apart_.data() + t * frame_bytes_, pixels_.data() + t * apart * frame_bytes_,
                    frame_bytes_);
      clip = apart_;
    }
    ClipInfo info;
    // One frame is an image to the model, whatever it was taken from.
    info.fps =
        frames == 1 ? 120.0f : static_cast<float>(reader_.fps() / static_cast<double>(interval_));
    info.source = fmt::format("{} frame {} at {:.3f} s", input_.media.name(), start_,
                              waiting_.front().seconds);
    info.text = input_.text;
    ++clips_;
    const bool more = take_(b, clip, info);
    start_ += deck_.stride > 0 ? deck_.stride : frames * interval_;
    // Windows that overlap share frames.
    const auto next =
        std::ranges::find_if(waiting_, [&](const Waiting& w) { return w.index >= start_; });
    const auto gone = static_cast<std::size_t>(next - waiting_.begin());
    waiting_.erase(waiting_.begin(), next);
    std::memmove(pixels_.data(), pixels_.data() + gone * frame_bytes_,
                 waiting_.size() * frame_bytes_);
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
  std::int64_t clips_ = 0, cuts_ = 0;
  std::vector<Waiting> waiting_;
  std::vector<std::byte> pixels_;  // of the frames that wait, one behind the other
  std::vector<std::byte> apart_;   // a clip whose frames are not neighbours there
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
      if (!reader)
        reader.emplace(input.media, VideoReaderOptions{deck.fps, threads, true, access, deck.cuts});
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
    result.cuts = cutter->cuts();
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
      result.unused = fmt::format("{}{}, fewer than the {} of the shortest clip",
                                  counted(result.frames, "frame"),
                                  result.cuts > 0 ? ", between cuts" : "", cutter->shortest());
  }
  return result;
}

}  // namespace weft
