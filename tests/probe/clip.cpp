#include "models/clip/clip.h"
#include "core/error.h"
#include "models/clip/clip_tokenizer.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {

int probe_clip(const Deck& deck, const ProbeRequest& request) {
  const RankDevice device = choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  const ClipDeck& clip = deck.get<ClipDeck>();
  WeightFiles files = WeightFiles::open(clip.weights);
  const ClipShape shape = clip_shape(files);
  const ClipImageEncoder image(files, shape);
  const ClipTextEncoder text(files, shape);
  const ClipTokenizer tokenizer = open_clip_tokenizer(clip.merges, clip.weights, shape.vocabulary);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;

  std::vector<std::uint8_t> pixels;
  std::int64_t count = 0;
  for (; inputs.has(fmt::format("image.{}", count)); ++count) {
    const std::string name = fmt::format("image.{}", count);
    const Shape size = inputs.shape(name, 3);
    WEFT_CHECK(size[2] == 3, Exit::data, probe_hint, "input \"{}\" is not [H,W,3]", name);
    const std::vector<std::uint8_t> rgb = inputs.u8(name);
    const auto shown = clip_pixels({rgb.data(), size[0], size[1], 3 * size[1]}, shape.side());
    pixels.insert(pixels.end(), shown.begin(), shown.end());
  }
  WEFT_CHECK(count > 0, Exit::data, probe_hint, "input \"image.0\" is not there");
  outputs.add("pixels", pixels, {count, shape.side(), shape.side(), 3});
  const std::vector<float> features = image.encode(pixels);
  outputs.add("image_features", features, {count, shape.channels});
  if (!clip.aesthetic.empty()) {
    std::vector<float> unit;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto one = unit_length(std::span(features).subspan(
          static_cast<std::size_t>(i * shape.channels), static_cast<std::size_t>(shape.channels)));
      unit.insert(unit.end(), one.begin(), one.end());
    }
    const AestheticPredictor predictor(clip.aesthetic, shape.channels);
    outputs.add(
        "aesthetic",
        predictor.score(Tensor::from_host(std::span<const float>(unit), {count, shape.channels})),
        {count});
  }
  std::vector<std::vector<std::int32_t>> captions;
  for (int i = 0; inputs.has(fmt::format("text.{}", i)); ++i) {
    const std::vector<std::uint8_t> bytes = inputs.u8(fmt::format("text.{}", i));
    captions.push_back(tokenizer.encode(std::string(bytes.begin(), bytes.end()), shape.positions));
    outputs.add(fmt::format("tokens.{}", i), captions.back(), {std::ssize(captions.back())});
  }
  if (!captions.empty()) outputs.add("text_features", text.forward(captions));
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
