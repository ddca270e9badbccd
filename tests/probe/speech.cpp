#include <algorithm>

#include "core/error.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/mel.h"
#include "models/sadtalker/options.h"
#include "models/sadtalker/speech_motion.h"
#include "models/sadtalker/speech_networks.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

constexpr std::int64_t window = mel_bands * mel_window;

// T of windows [T,80,16].
std::int64_t frames_of(const ProbeInputs& inputs) {
  const auto& s = inputs.shape("windows");
  WEFT_CHECK(s.size() == 3 && s[0] > 0 && s[1] == mel_bands && s[2] == mel_window, Exit::data,
             probe_hint, "input \"windows\" is {}", Shape(std::span<const std::int64_t>(s)).str());
  return s[0];
}

// An input of that shape, on the host.
std::vector<float> values(const ProbeInputs& inputs, const std::string& name, const Shape& shape) {
  const Tensor host = inputs.f32(name, shape).to_host();
  return {host.span<float>().begin(), host.span<float>().end()};
}

// f(frame, count) for the frames of each block.
template <class F>
void for_each_block(std::int64_t frames, F f) {
  for (std::int64_t first = 0; first < frames; first += speech_block)
    f(first, std::min(speech_block, frames - first));
}
std::span<const float> part(const std::vector<float>& all, std::int64_t first, std::int64_t count,
                            std::int64_t each) {
  return std::span(all).subspan(first * each, count * each);
}

template <class Net>
void load(Net& net, ParameterTable& table, const ProbeRequest& request) {
  table.allocate_for_inference(false);
  load_weights(request.weights, table, sadtalker_weight_names({Net::prefix}, PoseVae::unused()));
  net.fold();
}

void probe_expressions(const ProbeRequest& request, const ProbeInputs& inputs,
                       ProbeOutputs& outputs) {
  ParameterTable table;
  ExpNet net(table);
  load(net, table, request);
  const std::int64_t T = frames_of(inputs);
  const std::vector<float> windows = values(inputs, "windows", {T, mel_bands, mel_window}),
                           references = values(inputs, "ref", {T, motion_coefficients}),
                           closed = values(inputs, "ratio", {T});
  std::vector<float> all;
  for_each_block(T, [&](std::int64_t first, std::int64_t count) {
    const std::vector<float> some = net.expressions(
        part(windows, first, count, window), part(references, first, count, motion_coefficients),
        part(closed, first, count, 1));
    all.insert(all.end(), some.begin(), some.end());
  });
  outputs.add("exp", all, {T, expression_coefficients});
}

void probe_poses(const Deck& deck, const ProbeRequest& request, const ProbeInputs& inputs,
                 ProbeOutputs& outputs) {
  ParameterTable table;
  PoseVae net(table);
  load(net, table, request);
  const std::int64_t T = frames_of(inputs);
  const std::vector<float> windows = values(inputs, "windows", {T, mel_bands, mel_window}),
                           reference = values(inputs, "ref", {motion_coefficients});
  // One frame does not move, and takes no z.
  std::vector<float> z;
  if (T > 1) z = values(inputs, "z", {pose_calls(T), pose_latent});
  std::vector<float> heard;
  for_each_block(T, [&](std::int64_t first, std::int64_t count) {
    const std::vector<float> some = net.heard(part(windows, first, count, window));
    heard.insert(heard.end(), some.begin(), some.end());
  });
  std::vector<float> poses = net.poses(heard, std::span(reference).last(pose_values), z,
                                       deck.get<SadtalkerDeck>().pose_style);
  outputs.add("pose", poses, {T, pose_values});
  smooth_motion(poses, pose_values);
  outputs.add("pose_smooth", poses, {T, pose_values});
}

}  // namespace

int probe_speech(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  if (request.what == "sadtalker_exp")
    probe_expressions(request, inputs, outputs);
  else
    probe_poses(deck, request, inputs, outputs);
  outputs.write(request.outputs);
  return 0;
}

int probe_mel(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const auto& s = inputs.shape("wav");
  WEFT_CHECK(s.size() == 1, Exit::data, probe_hint, "input \"wav\" is {}",
             Shape(std::span<const std::int64_t>(s)).str());
  const std::vector<float> samples = values(inputs, "wav", {s[0]});
  const std::int64_t T = SpeechMotion::frames(s[0]);
  const Mel mel(samples);
  std::vector<float> windows;
  for_each_block(T, [&](std::int64_t first, std::int64_t count) {
    const std::vector<float> some = mel.windows(first, count);
    windows.insert(windows.end(), some.begin(), some.end());
  });
  ProbeOutputs outputs;
  outputs.add("mel", mel.rows(0, mel.rows()), {mel.rows(), mel_bands});
  outputs.add("windows", windows, {T, mel_bands, mel_window});
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
