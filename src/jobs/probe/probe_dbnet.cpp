#include "jobs/probe/probe_dbnet.h"

#include "core/error.h"
#include "jobs/probe/probe_case.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/frame.h"
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
               Exit::data, "see docs/probe.md for the inputs of each probe",
               "input \"{}\" is no picture of {} dimensions", name, rank);
    f(number, inputs.u8(name), shape);
  }
  WEFT_CHECK(count > 0, Exit::data, "see docs/probe.md for the inputs of each probe",
             "the inputs have no {}.000", prefix);
}

template <class T>
void add(ProbeOutputs& outputs, const std::string& name, const std::vector<T>& values,
         const Shape& shape) {
  outputs.add(name, Tensor::from_host(std::span<const T>(values), shape));
}

}  // namespace

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
  add(outputs, "kept", kept, {std::ssize(kept)});
  add(outputs, "count", count, {std::ssize(count)});
  add(outputs, "quads", quads, {std::ssize(scores), 4, 2});
  add(outputs, "scores", scores, {std::ssize(scores)});
  outputs.write(request.outputs);
  return 0;
}

int probe_frames(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  constexpr std::int64_t side = 1024;
  for_each_input(
      inputs, "image", 3, [&](const std::string& number, const auto& rgb, const auto& shape) {
        add(outputs, "crop." + number,
            detector_frame({rgb.data(), shape[0], shape[1], shape[1] * 3}, side), {side, side, 3});
      });
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
