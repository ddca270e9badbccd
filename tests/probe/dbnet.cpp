#include "models/dbnet/dbnet.h"
#include "core/error.h"
#include "media/video_reader.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// f(name's number, values, shape) for each input PREFIX.000, PREFIX.001, ... of `rank` dimensions.
template <class F>
void for_each_input(const ProbeInputs& inputs, const std::string& prefix, std::size_t rank, F f) {
  int count = 0;
  for (;; ++count) {
    const std::string number = fmt::format("{:03}", count), name = prefix + "." + number;
    if (!inputs.has(name)) break;
    const std::vector<std::int64_t>& shape = inputs.shape(name);
    // Pixels are counted by int in the parts that are probed.
    WEFT_CHECK(shape.size() == rank && shape[0] > 0 && shape[1] > 0 &&
                   shape[0] < (1 << 28) / shape[1] && (rank == 2 || shape[2] == 3),
               Exit::data, probe_hint, "input \"{}\" is no picture of {} dimensions", name, rank);
    f(number, inputs.u8(name), shape);
  }
  WEFT_CHECK(count > 0, Exit::data, probe_hint, "the inputs have no {}.000", prefix);
}

}  // namespace

int probe_detector(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const bool bf16 = deck.model.dtype == "bf16";
  const DbnetDeck& d = deck.get<DbnetDeck>();
  const bool offsets = has_offsets(WeightFiles::open(request.weights));
  Dbnet model(d, d.deformable == "on" || (d.deformable == "auto" && offsets));
  model.params().allocate_for_inference(bf16);
  load_weights(request.weights, model.params());
  model.scale_conv2(static_cast<float>(d.conv2_gain));
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const auto& s = inputs.shape("image");
  WEFT_CHECK(s.size() == 4 && s[1] == 3 && s[2] % Dbnet::stride == 0 && s[3] % Dbnet::stride == 0,
             Exit::data, "give [B,3,H,W] whose H and W are multiples of 32",
             "input \"image\" is {}", Shape(std::span<const std::int64_t>(s)).str());
  Tensor last = Tensor::empty({s[0], 1, s[2], s[3], 3}, DType::f32);
  ops::to_channels_last(
      inputs.f32("image", Shape(std::span<const std::int64_t>(s))).view({s[0], 3, 1, s[2], s[3]}),
      last);
  Tensor image = Tensor::empty(last.shape(), bf16 ? DType::bf16 : DType::f32);
  ops::convert(last, image);
  Tape tape(Tape::Mode::infer);
  nn::BatchNormGroup norm;
  norm.use_running = true;
  const Var map =
      model.forward({tape, model.params()}, make_var(image, false), norm, false).probability;
  Tensor logits = Tensor::empty({s[0], s[2], s[3]}, DType::f32);
  ops::convert(map->value.view(logits.shape()), logits);
  Tensor probability = Tensor::empty(logits.shape(), DType::f32);
  ops::sigmoid_forward(logits, probability);
  outputs.add("logits", logits);
  outputs.add("probability", probability);
  outputs.write(request.outputs);
  return 0;
}

int probe_boxes(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const auto& postprocess = deck.get<PostprocessDeck>();
  std::vector<std::int64_t> kept, count;
  std::vector<float> quads, scores;
  for_each_input(inputs, "q", 2, [&](const std::string&, const auto& values, const auto& shape) {
    std::vector<float> probability;
    for (const std::uint8_t q : values) probability.push_back(static_cast<float>(q) / 255.0f);
    const std::vector<TextBox> boxes =
        find_text_boxes(probability, shape[0], shape[1], postprocess);
    for (const TextBox& b : boxes) {
      quads.insert(quads.end(), b.corners.begin(), b.corners.end());
      scores.push_back(b.score);
    }
    kept.push_back(std::ssize(boxes));
    count.push_back(count_text(boxes, postprocess));
  });
  ProbeOutputs outputs;
  outputs.add("kept", kept, {std::ssize(kept)});
  outputs.add("count", count, {std::ssize(count)});
  outputs.add("quads", quads, {std::ssize(scores), 4, 2});
  outputs.add("scores", scores, {std::ssize(scores)});
  outputs.write(request.outputs);
  return 0;
}

int probe_video_frames(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const std::vector<std::int64_t> indices = inputs.i64("index");
  ProbeOutputs outputs;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::vector<std::uint8_t> path = inputs.u8(fmt::format("path.{:03}", i));
    WEFT_CHECK(indices[i] >= 0 && indices[i] < (std::int64_t{1} << 40), Exit::data,
               "give the number of a frame, from 0", "input \"index\" has {}", indices[i]);
    const PickedFrame frame = frame_at({{path.begin(), path.end()}}, indices[i], {deck.media, {}});
    const std::vector<std::uint8_t> fault(frame.fault.begin(), frame.fault.end());
    outputs.add(fmt::format("frame.{:03}", i), frame.rgb, {frame.height, frame.width, 3});
    outputs.add(fmt::format("fault.{:03}", i), fault, {std::ssize(fault)});
  }
  outputs.write(request.outputs);
  return 0;
}

int probe_frames(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  constexpr std::int64_t side = 1024;
  for_each_input(inputs, "image", 3,
                 [&](const std::string& number, const auto& rgb, const auto& shape) {
                   outputs.add("crop." + number,
                               detector_frame({rgb.data(), shape[0], shape[1], shape[1] * 3}, side),
                               {side, side, 3});
                 });
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
