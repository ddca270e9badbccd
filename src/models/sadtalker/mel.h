// The mel spectrogram that SadTalker's networks hear, as librosa 0.9 computes it, and the piece of
// it that each video frame gets (docs/models/sadtalker.md, Speech).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace weft {

inline constexpr std::int64_t mel_bands = 80;
inline constexpr std::int64_t mel_window = 16;  // mel rows that a video frame gets

class Mel {
 public:
  // `samples`: 16 kHz mono, which the caller keeps alive; those past the last whole video frame
  // count for nothing. Nothing is computed yet.
  explicit Mel(std::span<const float> samples);
  ~Mel();
  Mel(const Mel&) = delete;
  Mel& operator=(const Mel&) = delete;

  std::int64_t frames() const;  // of video: samples / 640
  std::int64_t rows() const;    // of mel, one per 200 samples and one more; 0 without a frame

  // Rows [first, first + count) of the spectrogram: [count,80], -4 to 4.
  std::vector<float> rows(std::int64_t first, std::int64_t count) const;
  // Windows [count,80,16] of the video frames [first, first + count). Computes the rows that they
  // need, so that memory depends on `count` alone.
  std::vector<float> windows(std::int64_t first, std::int64_t count) const;

 private:
  struct Plan;
  std::span<const float> samples_;
  std::unique_ptr<Plan> plan_;
};

// First row of the window of video frame `frame`, which may lie before row 0: 3.2 rows a frame,
// truncated towards zero.
constexpr std::int64_t mel_window_start(std::int64_t frame) { return 80 * (frame - 2) / 25; }

}  // namespace weft
