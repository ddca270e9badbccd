#include "models/sadtalker/speech/speech_motion.h"

#include <algorithm>

#include "core/error.h"
#include "models/sadtalker/speech/blink.h"
#include "models/sadtalker/speech/exp_net.h"
#include "models/sadtalker/speech/mel.h"
#include "models/sadtalker/speech/pose_vae.h"
#include "models/sadtalker/speech/smoothing.h"
#include "models/sadtalker/weights.h"

namespace weft {
namespace {

// Row t of rows [n,70] that begin again after the last.
std::span<const float> looped(std::span<const float> rows, std::int64_t t) {
  const std::int64_t n = std::ssize(rows) / motion_coefficients;
  return rows.subspan(static_cast<std::size_t>(t % n * motion_coefficients), motion_coefficients);
}

void check_rows(std::span<const float> rows) {
  WEFT_ASSERT(rows.size() % motion_coefficients == 0);
}

}  // namespace

struct SpeechMotion::State {
  ParameterTable table;
  ExpNet expression{table};
  PoseVae pose{table};
};

// Always f32: beside the renderer the networks cost next to nothing.
SpeechMotion::SpeechMotion(const Deck&, const ModelSource& source)
    : state_(std::make_unique<State>()) {
  source.load(state_->table,
              sadtalker_weight_names({ExpNet::prefix, PoseVae::prefix}, PoseVae::unused()), false);
  state_->expression.fold();
  state_->pose.fold();
}
SpeechMotion::~SpeechMotion() = default;
SpeechMotion::SpeechMotion(SpeechMotion&&) noexcept = default;

std::int64_t SpeechMotion::frames(std::int64_t samples) {
  const std::int64_t T = samples / speech_samples_per_frame;
  WEFT_CHECK(T > 0, Exit::data, "give longer speech",
             "the speech has {} samples at {} Hz, a frame of video takes {} (40 ms)", samples,
             speech_rate, speech_samples_per_frame);
  return T;
}

std::vector<float> SpeechMotion::rows(std::span<const float> samples, std::span<const float> source,
                                      const MotionOptions& options) {
  const std::int64_t T = frames(std::ssize(samples));
  WEFT_ASSERT(std::ssize(source) >= motion_coefficients);
  WEFT_CHECK(options.pose_style >= 0 && options.pose_style < pose_styles, Exit::usage,
             "choose 0 to 45", "pose_style = {}", options.pose_style);
  check_rows(options.eyeblink);
  check_rows(options.pose);
  const std::span<const float> own = source.first(motion_coefficients);
  std::vector<float> closed(static_cast<std::size_t>(T), 0.0f);
  if (!options.blink.empty())
    closed.assign(options.blink.begin(), options.blink.end());
  else if (options.eyeblink.empty())
    closed = random_blinks(T, options.seed);
  WEFT_ASSERT(std::ssize(closed) == T);

  const Mel mel(samples);
  std::vector<float> heard, all(static_cast<std::size_t>(T * motion_coefficients));
  for (std::int64_t first = 0; first < T; first += speech_block) {
    const std::int64_t count = std::min(speech_block, T - first);
    const std::vector<float> windows = mel.windows(first, count);
    std::vector<float> references;
    for (std::int64_t t = first; t < first + count; ++t) {
      const auto row = options.eyeblink.empty() ? own : looped(options.eyeblink, t);
      references.insert(references.end(), row.begin(), row.end());
    }
    const std::vector<float> expressions = state_->expression.expressions(
        windows, references,
        std::span<const float>(closed).subspan(static_cast<std::size_t>(first),
                                               static_cast<std::size_t>(count)));
    for (std::int64_t i = 0; i < count; ++i)
      std::copy_n(expressions.begin() + i * expression_coefficients, expression_coefficients,
                  all.begin() + (first + i) * motion_coefficients);
    const std::vector<float> some = state_->pose.heard(windows);
    heard.insert(heard.end(), some.begin(), some.end());
  }

  const std::vector<float> drawn =
      options.z.empty() ? draw_pose_latents(T, options.seed) : std::vector<float>();
  std::vector<float> poses = state_->pose.poses(
      heard, own.last(pose_values), options.z.empty() ? drawn : options.z, options.pose_style);
  smooth_motion(poses, pose_values);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < pose_values; ++i) {
      float& value =
          all[static_cast<std::size_t>(t * motion_coefficients + expression_coefficients + i)];
      value = poses[static_cast<std::size_t>(t * pose_values + i)];
      if (!options.pose.empty()) {
        const auto at = static_cast<std::size_t>(expression_coefficients + i);
        value += looped(options.pose, t)[at] - options.pose[at];
      }
    }
  return all;
}

MemoryNeed SpeechMotion::plan(std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const Tensor windows = Tensor::empty({speech_block, 1, mel_bands, mel_window, 1}, DType::f32);
  state_->expression.run(windows,
                         Tensor::empty({speech_block, expression_coefficients + 1}, DType::f32));
  state_->pose.hear(windows);
  state_->pose.decode(Tensor::empty({1, 1, 1, 1, PoseVae::input_values}, DType::f32));
  return arena->need();
}

}  // namespace weft
