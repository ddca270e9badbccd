// Sound of any file that weft reads, as samples.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "media/media_source.h"

namespace weft {

struct AudioOptions {
  std::int64_t rate = 16000;  // samples a second to deliver; 0: as the file has them
  // Channels to deliver: 1 is the mean of the file's; 0: as the file has them, more than two mixed
  // down to stereo.
  int channels = 1;
  MediaAccess access = {};
};

// Decodes the best sound stream of a file block by block, in memory that does not depend on its
// length: wav, mp3, flac, ogg, m4a, aac ..., or the sound of a video. As for pictures, files are
// not trusted: the formats are those that contain their own sound, and nothing else is opened
// (media/open_media.h). Throws Exit::data with FFmpeg's reason when a file cannot be opened or
// decoded, has no sound, exceeds the deck's [media], claims a rate below 1 or above 768 kHz, has a
// sample that is not finite or beyond 1000, or ends before nine tenths of what its container
// promises (an estimate of FFmpeg's is no promise); Exit::stopped when a stop was requested.
// Samples are in [-1, 1] but for files of floats, which may be louder.
class AudioReader {
 public:
  explicit AudioReader(const MediaSource& source, AudioOptions options = {});
  ~AudioReader();
  AudioReader(const AudioReader&) = delete;
  AudioReader& operator=(const AudioReader&) = delete;

  // The next samples [n, channels()], n of any size; empty after the last. Valid until the next
  // call. N samples of the file's rate become ceil(N * rate / file's rate) in all.
  std::span<const float> next();

  std::int64_t rate() const;  // of what next() delivers
  int channels() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The whole of a file as mono samples f32 of that rate. The result's memory alone grows with the
// length, 64 KB a second, up to media.max_hours. Throws as AudioReader does, and when the stream
// has no samples.
std::vector<float> read_speech(const std::string& path, std::int64_t rate = 16000,
                               const MediaAccess& access = {});

}  // namespace weft
