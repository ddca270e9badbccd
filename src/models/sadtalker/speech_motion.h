// From speech to motion: samples to a row of coefficients a video frame
// (docs/models/sadtalker.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "tensor/tensor.h"

namespace weft {

// The blinks of a face that no video shows: how far the eyes are closed in each of `frames` frames,
// 0 to 1: blinks of five frames, the pause before each drawn by the seed from [10, min(frames / 2,
// 70)) frames. A clip of 21 frames or less has none: there is nothing to draw from.
std::vector<float> random_blinks(std::int64_t frames, std::uint64_t seed);

// Smoothing of the head's motion. The window that T frames are smoothed with: 13, or the greatest
// odd number that is not above T.
std::int64_t smoothing_window(std::int64_t frames);

// Savitzky-Golay's filter of order 2 along the rows of values [T,columns], each column by itself:
// a row becomes the value there of the parabola that fits best to the window around it; the first
// and the last half window lie on the parabolas of the outermost windows (scipy's mode "interp").
// Fewer than 3 rows stay as they are: no parabola goes through them.
void smooth_motion(std::span<float> values, std::int64_t columns);

// 25 video frames a second of speech at 16 kHz.
inline constexpr std::int64_t speech_rate = 16000;
inline constexpr std::int64_t speech_samples_per_frame = 640;
inline constexpr double speech_fps = 25;
// The coefficients of a row: expression 64, angle 3, translation 3.
inline constexpr std::int64_t motion_coefficients = 70;
inline constexpr std::int64_t expression_coefficients = 64;

// What moves a face besides the speech.
struct MotionOptions {
  std::uint64_t seed = 0;       // of the blinks and of the head's motion
  std::int64_t pose_style = 0;  // 0 to 45
  // Rows [n,70] of a video's frames, n >= 1, repeated from its start where it is shorter than the
  // speech; empty: none. The first gives the expression around which the speech moves the mouth,
  // and with it the blinks; the second adds its own head motion.
  std::span<const float> eyeblink = {};
  std::span<const float> pose = {};
  // In place of what the seed gives, for tests: z of the pose, a row of 64 a block (see PoseVae),
  // and the eyes' closing [T].
  std::span<const float> z = {};
  std::span<const float> blink = {};
};

class SpeechMotion {
 public:
  // Collective: allocates and reads the weights "audio2exp." and "audio2pose.", on the current
  // device. Exit::data if they are of other networks.
  SpeechMotion(const Deck& deck, const ModelSource& source);
  ~SpeechMotion();
  SpeechMotion(SpeechMotion&&) noexcept;

  // Frames that so many samples make. Exit::data for less than one (40 ms).
  static std::int64_t frames(std::int64_t samples);

  // Rows [T,70], T = frames(samples), of speech at 16 kHz, mono. `source`: the first 70 (or more)
  // coefficients of the face. Frame t does not depend on the device's or the host's threads or on
  // how many frames the networks take at once. In the current arena; memory does not depend on T
  // but for the result and an embedding of a few KB a frame on the host.
  std::vector<float> rows(std::span<const float> samples, std::span<const float> source,
                          const MotionOptions& options = {});
  // Bytes of the arena that this takes, whatever the length.
  MemoryNeed plan(std::size_t capacity = 0);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
