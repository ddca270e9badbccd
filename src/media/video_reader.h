// Decodes a video frame by frame, in memory that does not depend on its length; or picks one frame.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "media/media_source.h"

namespace weft {

class YuvRows;

// One frame, RGB, 8 bits. Row y begins at rgb + y * stride.
struct VideoFrame {
  const std::uint8_t* rgb = nullptr;
  std::int64_t stride = 0;  // bytes
  std::int64_t height = 0, width = 0;
  std::int64_t index = 0;  // 0, 1, 2 ... of the frames delivered
  double seconds = 0;      // since the first frame
  double duration = 0;     // seconds that it is shown
  bool cut = false;        // the first behind a cut, where VideoReaderOptions::cuts asks for them
  // With VideoReaderOptions::rows, of most footage: the frame before it is RGB; `rgb` is null then.
  YuvRows* yuv = nullptr;
};

struct VideoReaderOptions {
  // Resample to so many frames a second by dropping or repeating, as `ffmpeg -vf fps=N` does, but
  // for a still picture; 0: as they are.
  double fps = 0;
  int threads = 1;  // of the decoder
  // Whoever takes the frames converts the rows that it needs to RGB itself, as CoverResize does.
  bool rows = false;
  MediaAccess access = {};
  double cuts = 0;  // what FFmpeg's scdet must score of a cut, of 100; 0: none is looked for
};

// Reads a file of a format that contains its own pictures (an image is a video of one frame), or,
// from a deck only, "lavfi:GRAPH", one of FFmpeg's own sources, such as
// "lavfi:testsrc=duration=2:rate=24:size=320x240". Videos are turned and mirrored as their display
// matrix says, pictures as media.orientation and their EXIF say; of several pictures in one file it
// is the first. Throws Exit::data with FFmpeg's reason when it cannot be opened or decoded, exceeds
// the limits of the deck's [media], or ends before nine tenths of the frames that its container
// promises; Exit::stopped when a stop was requested.
class VideoReader {
 public:
  explicit VideoReader(const MediaSource& source, VideoReaderOptions options = {});
  ~VideoReader();

  // The next frame, or nullptr after the last. Valid until the next call.
  const VideoFrame* next();

  double fps() const;           // of what next() delivers; 24 where the file does not say
  double ticks() const;         // a second, of the times of what next() delivers
  std::int64_t height() const;  // as the container says, after rotation; the
  std::int64_t width() const;   //   frames themselves may differ
  std::int64_t frames() const;  // about how many there will be; 0 = unknown
  // How many: where the container has no count, that of its packets, which are all read.
  std::int64_t counted() const;
  std::int64_t damaged() const;  // frames so far whose errors the decoder concealed
  bool is_image() const;         // a still picture

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A small clip held in memory, for tests and conditioning frames.
struct Footage {
  std::vector<std::uint8_t> rgb;  // [T,H,W,3]
  std::int64_t frames = 0, height = 0, width = 0;
  double fps = 24;
};

// The first `max_frames` frames (0 = all), resized and cropped to height x width as
// media/resize.h does (0 = as they are). Throws as VideoReader does, and when there is no frame.
Footage read_frames(const MediaSource& source, std::int64_t max_frames = 0, std::int64_t height = 0,
                    std::int64_t width = 0, VideoReaderOptions options = {});

// One frame of a video: the one that OpenCV's VideoCapture gives, which is what Open-Sora's scores
// of text are made from.
struct PickedFrame {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
  // Why the frame is a stand-in: the first one, or a black one of the container's size, or of
  // 256x256 where that is unknown. Empty: it is the frame that was asked for.
  std::string fault;
};

// Frame `index`, from 0, the last one if there are fewer. Seeks, counts, converts and rotates as
// OpenCV 4.10 does (docs/models/dbnet.md, Frames); the decoder takes one thread. Throws only
// Exit::stopped: whatever is wrong with the video, limits of [media] included, is its fault.
PickedFrame frame_at(const MediaSource& source, std::int64_t index, const MediaAccess& access);

}  // namespace weft
