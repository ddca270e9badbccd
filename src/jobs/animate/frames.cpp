#include "jobs/animate/frames.h"

#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "jobs/animate/sources.h"
#include "models/sadtalker/face/crop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

std::span<const float> source_row(const ClipRequest& clip, const PreparedClip& prepared) {
  const auto columns = static_cast<std::size_t>(clip.sadtalker.coefficients());
  return std::span(prepared.source).first(std::min(columns, prepared.source.size()));
}

}  // namespace

std::string frame_file(std::int64_t frame) { return fmt::format("{:06d}.png", frame); }

ClipInHand::ClipInHand(const ClipRequest& clip, PreparedClip prepared, const Renderer& renderer,
                       const MediaDeck& limits)
    : clip_(clip),
      renderer_(renderer),
      prepared_(std::move(prepared)),
      rows_(driving_rows(clip.sadtalker, prepared_.motion, source_row(clip, prepared_))),
      source_(renderer.prepare(prepared_.crop, source_row(clip, prepared_))) {
  if (!is_full(clip)) return;
  picture_ = read_picture(clip.animate.picture, limits);
  const PixelBox& p = prepared_.place;
  pasting_.emplace(picture_, p);
}

ImageFile ClipInHand::shaped(ImageFile frame) const {
  const auto [height, width] = frame_size(prepared_, clip_.sadtalker);
  ImageFile sized = frame.height == height && frame.width == width
                        ? std::move(frame)
                        : resize_bilinear(frame, height, width);
  return pasting_ ? pasting_->paste(sized) : sized;
}

// A segment on its way. Its destructor waits for the threads, which use it.
struct SegmentMaker::Segment {
  const ClipInHand& clip;
  fs::path file, pictures;
  std::int64_t next = 0;  // frame to be written, in the clip
  std::optional<Mp4Writer> writer;
  std::future<Batch> shaping;
  std::future<double> encoding;

  ~Segment() {
    if (shaping.valid()) shaping.wait();
    if (encoding.valid()) encoding.wait();
  }

  Batch shape(const std::vector<std::uint8_t>& rendered, std::int64_t count) const {
    Batch batch;
    const double begin = now_seconds();
    const std::int64_t side = clip.clip().sadtalker.size;
    const std::int64_t bytes = side * side * 3;
    for (std::int64_t i = 0; i < count; ++i)
      batch.frames.push_back(clip.shaped(
          {side, side, {rendered.begin() + i * bytes, rendered.begin() + (i + 1) * bytes}}));
    batch.seconds = now_seconds() - begin;
    return batch;
  }

  double encode(const std::vector<ImageFile>& frames) {
    const double begin = now_seconds();
    for (const ImageFile& f : frames) {
      if (!writer)
        writer.emplace(file.string(), f.height, f.width,
                       Mp4Options{.fps = speech_fps, .segment = true});
      writer->add({f.values.data(), 1, f.height, f.width});
      if (!pictures.empty())
        write_png((pictures / frame_file(next)).string(), f.height, f.width, f.values);
      ++next;
    }
    return now_seconds() - begin;
  }
};

bool SegmentMaker::make(const ClipInHand& clip, std::int64_t first, std::int64_t count,
                        const fs::path& file, const fs::path& pictures,
                        const std::function<bool()>& go_on) {
  Segment segment{clip, file, pictures, first, {}, {}, {}};
  const auto encoded = [&] {
    if (segment.encoding.valid()) seconds_.encode += segment.encoding.get();
  };
  const auto hand_on = [&](Batch batch) {
    seconds_.paste += batch.seconds;
    if (is_enhanced(clip.clip())) {
      const double begin = now_seconds();
      const auto scale = static_cast<int>(clip.clip().animate.enhancer_scale);
      for (ImageFile& frame : batch.frames)
        frame = networks_.enhancer().enhance(frame, scale, draws_of(clip.clip()));
      seconds_.enhance += now_seconds() - begin;
    }
    encoded();
    segment.encoding = encoding_.start(
        [&segment, frames = std::move(batch.frames)] { return segment.encode(frames); });
  };
  const std::int64_t together = clip.clip().sadtalker.batch_size;
  for (std::int64_t at = first; at < first + count; at += together) {
    if (!go_on()) return false;
    const double begin = now_seconds();
    const std::int64_t n = std::min(together, first + count - at);
    std::vector<std::uint8_t> rendered = clip.render(at, n);
    seconds_.render += now_seconds() - begin;
    std::future<Batch> next = shaping_.start(
        [&segment, n, rendered = std::move(rendered)] { return segment.shape(rendered, n); });
    std::swap(segment.shaping, next);
    if (next.valid()) hand_on(next.get());
  }
  hand_on(segment.shaping.get());
  encoded();
  const double begin = now_seconds();
  segment.writer->finish();
  seconds_.encode += now_seconds() - begin;
  return true;
}

}  // namespace weft
