#include "models/sadtalker/speech_motion.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/mel.h"
#include "models/sadtalker/speech_networks.h"

namespace weft {

std::vector<float> random_blinks(std::int64_t frames, std::uint64_t seed) {
  constexpr std::array closed = {0.5f, 0.9f, 1.0f, 0.9f, 0.5f};
  constexpr std::int64_t length = std::ssize(closed), shortest = 10, longest = 70;
  std::vector<float> eyes(frames, 0.0f);
  const std::int64_t pauses = std::min(frames / 2, longest) - shortest;
  if (pauses <= 0) return eyes;
  const Philox random(seed, Purpose::blink, 0, 0);
  std::int64_t at = 0;
  for (std::uint32_t blink = 0;; ++blink) {
    at += shortest + random.below(blink, static_cast<std::uint32_t>(pauses));
    if (at + length > frames - 1) return eyes;
    std::ranges::copy(closed, eyes.begin() + at);
    at += length;
  }
}

namespace {

// What each of the 2m + 1 points contributes to the fitted parabola at point `at` (-m to m), by the
// polynomials that are orthogonal over them: 1, j and j^2 - mean(j^2).
std::vector<double> weights_at(std::int64_t m, std::int64_t at) {
  const auto n = static_cast<double>(2 * m + 1);
  double squares = 0, spread = 0;
  for (std::int64_t j = -m; j <= m; ++j) squares += static_cast<double>(j * j);
  const double mean = squares / n;
  const auto curve = [mean](std::int64_t j) { return static_cast<double>(j * j) - mean; };
  for (std::int64_t j = -m; j <= m; ++j) spread += curve(j) * curve(j);
  std::vector<double> weights;
  for (std::int64_t j = -m; j <= m; ++j)
    weights.push_back(1 / n + static_cast<double>(at * j) / squares +
                      curve(at) * curve(j) / spread);
  return weights;
}

}  // namespace

std::int64_t smoothing_window(std::int64_t frames) {
  constexpr std::int64_t longest = 13;
  return frames >= longest ? longest : (frames - 1) / 2 * 2 + 1;
}

void smooth_motion(std::span<float> values, std::int64_t columns) {
  WEFT_ASSERT(columns > 0 && std::ssize(values) % columns == 0);
  const std::int64_t T = std::ssize(values) / columns;
  if (T < 3) return;
  const std::int64_t m = smoothing_window(T) / 2;
  std::vector<std::vector<double>> weights;
  for (std::int64_t at = -m; at <= m; ++at) weights.push_back(weights_at(m, at));
  const std::vector<float> rough(values.begin(), values.end());
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t centre = std::clamp(t, m, T - 1 - m);
    const std::vector<double>& w = weights[t - centre + m];
    for (std::int64_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::int64_t j = -m; j <= m; ++j)
        sum += w[j + m] * static_cast<double>(rough[(centre + j) * columns + c]);
      values[t * columns + c] = static_cast<float>(sum);
    }
  }
}

namespace {

// Row t of rows [n,70] that begin again after the last.
std::span<const float> looped(std::span<const float> rows, std::int64_t t) {
  const std::int64_t n = std::ssize(rows) / motion_coefficients;
  return rows.subspan(t % n * motion_coefficients, motion_coefficients);
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
  std::vector<float> closed(T, 0.0f);
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
        windows, references, std::span<const float>(closed).subspan(first, count));
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
      float& value = all[t * motion_coefficients + expression_coefficients + i];
      value = poses[t * pose_values + i];
      if (!options.pose.empty()) {
        const auto at = static_cast<std::size_t>(expression_coefficients + i);
        value += looped(options.pose, t)[at] - options.pose[at];
      }
    }
  return all;
}

MemoryNeed SpeechMotion::plan(std::size_t capacity) {
  return memory_of(capacity, [&] {
    const Tensor windows = Tensor::empty({speech_block, 1, mel_bands, mel_window, 1}, DType::f32);
    state_->expression.run(windows,
                           Tensor::empty({speech_block, expression_coefficients + 1}, DType::f32));
    state_->pose.hear(windows);
    state_->pose.decode(Tensor::empty({1, 1, 1, 1, PoseVae::input_values}, DType::f32));
  });
}

}  // namespace weft
