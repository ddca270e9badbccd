// Writes results: MP4 clips and PNG images. A file appears whole (WholeFile, core/file.h): what was
// not finished is removed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "media/media_source.h"

namespace weft {

// Pixels [T,H,W,3] that their owner keeps alive.
struct ClipView {
  const std::uint8_t* rgb = nullptr;
  std::int64_t frames = 0, height = 0, width = 0;
};

struct Mp4Options {
  double fps = 24;  // 0 < fps <= 1000
  // One of the segments of a clip, frames [a,b) as an MP4 of its own, for join_mp4(): the
  // same frames give the same bytes, whichever library or time writes them into the file's
  // metadata otherwise.
  bool segment = false;
  // Times a second at which a frame of add(frame, seconds, duration) may begin; 0: frames are
  // evenly spaced.
  double ticks = 0;
};

// An MP4 written while its frames are made, in memory that does not depend on its length (the
// encoder looks some dozens of frames ahead). H.264 (libx264, nearly lossless) if FFmpeg has it,
// otherwise MPEG-4 part 2; yuv420p, so that every player shows it. Chroma needs even sizes: an odd
// height or width grows by one, repeating its last row or column. Throws Exit::data with FFmpeg's
// reason.
class Mp4Writer {
 public:
  // Exit::usage where fps is out of range.
  Mp4Writer(const std::string& path, std::int64_t height, std::int64_t width,
            const Mp4Options& options);
  Mp4Writer(const std::string& path, std::int64_t height, std::int64_t width, double fps)
      : Mp4Writer(path, height, width, Mp4Options{fps}) {}
  ~Mp4Writer();
  Mp4Writer(const Mp4Writer&) = delete;
  Mp4Writer& operator=(const Mp4Writer&) = delete;

  // The next frames, of the size that was said.
  void add(const ClipView& frames);
  // One frame, where ticks are given: when it begins, later than the one before, and for how long
  // it is shown if it is the last.
  void add(const ClipView& frame, double seconds, double duration);
  // After one frame or more: the file is whole.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes a clip that is complete in memory.
void write_mp4(const std::string& path, const ClipView& clip, double fps);

// `rgb` is [height, width, 3]. Throws Exit::data.
void write_png(const std::string& path, std::int64_t height, std::int64_t width,
               std::span<const std::uint8_t> rgb);
// The content of that file.
std::string png_bytes(std::int64_t height, std::int64_t width, std::span<const std::uint8_t> rgb);

struct Rgb {
  std::uint8_t r = 0, g = 0, b = 0;
  bool operator==(const Rgb&) const = default;
};
// 8-bit indices [height, width] into a palette of at most 256 colours. Throws Exit::data.
void write_palette_png(const std::string& path, std::int64_t height, std::int64_t width,
                       std::span<const std::uint8_t> indices, std::span<const Rgb> palette);

// What is heard: a file's sound, at its own rate and in mono or stereo as it is there, or samples.
struct Mp4Sound {
  std::string file = {};
  std::span<const float> samples = {};  // mono, where no file is named; empty: a silent clip
  std::int64_t rate = 16000;            // of samples
};

// Joins segments written by Mp4Writer (Mp4Options::segment) into `output`: their pictures are
// copied packet by packet, in the order given, and the sound is encoded as AAC (FFmpeg's own
// encoder; rates that AAC lacks become 48 kHz). The sound is cut to the length of the pictures; a
// shorter one ends before them. The same segments and sound give the same bytes. Memory does not
// depend on the length. Returns the frames of the clip. Throws Exit::data: a segment that is
// missing, damaged or encoded differently from the first (size, settings), at another rate, or a
// sound that cannot be read.
std::int64_t join_mp4(const std::vector<std::string>& segments, const Mp4Sound& sound, double fps,
                      const std::string& output, const MediaAccess& access = {});

}  // namespace weft
