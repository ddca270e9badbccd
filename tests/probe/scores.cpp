#include "jobs/evaluate/scores.h"
#include "core/error.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/options.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// Classes, -1 for none, as labels in bytes.
std::vector<std::uint8_t> labels_of(const ProbeInputs& inputs, const std::string& name,
                                    std::int64_t classes) {
  std::vector<std::uint8_t> bytes;
  for (const std::int64_t v : inputs.i64(name)) {
    WEFT_CHECK(v >= -1 && v < classes, Exit::data, probe_hint, "input \"{}\" has a class {} of {}",
               name, v, classes);
    bytes.push_back(static_cast<std::uint8_t>(v + 1));
  }
  return bytes;
}

// [1,C,h,w] -> [1,1,h,w,C].
Tensor read_logits(const ProbeInputs& inputs, const std::string& name, std::int64_t classes) {
  const Shape s = inputs.shape(name, 4);
  const Tensor x = inputs.f32(name, {1, classes, s[2], s[3]});
  Tensor y = Tensor::empty({1, 1, s[2], s[3], classes}, DType::f32);
  ops::to_channels_last(x.view({1, classes, 1, s[2], s[3]}), y);
  return y;
}

void add_whole(ProbeOutputs& outputs, const std::string& name,
               const std::vector<std::int64_t>& values, const Shape& shape) {
  outputs.add(name, Tensor::from_host(std::span<const std::int64_t>(values), shape));
}
void add_number(ProbeOutputs& outputs, const std::string& name, double value) {
  const float v[] = {static_cast<float>(value)};
  outputs.add(name, Tensor::from_host(std::span<const float>(v), {1}));
}

void add_colours(ProbeOutputs& outputs, const std::string& name,
                 const std::vector<std::int64_t>& classes, Shape shape) {
  std::vector<std::uint8_t> rgb;
  for (const std::int64_t c : classes) {
    const Rgb colour = class_colour(c);
    rgb.insert(rgb.end(), {colour.r, colour.g, colour.b});
  }
  outputs.add(name, Tensor::from_host(std::span<const std::uint8_t>(rgb), {shape[0], shape[1], 3}));
}

// Intersection and union by class.
void add_classes(ProbeOutputs& outputs, const std::string& prefix, const SegmentationScores& e) {
  std::vector<std::int64_t> intersection, joined;
  for (const ClassScore& c : e.classes) {
    intersection.push_back(c.intersection);
    joined.push_back(c.joined());
  }
  const Shape shape{std::ssize(e.classes)};
  add_whole(outputs, prefix + "intersection", intersection, shape);
  add_whole(outputs, prefix + "union", joined, shape);
}

}  // namespace

int probe_scores(const Deck& deck, const ProbeRequest& request) {
  const RankDevice device = choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const std::int64_t C = deck.get<SegmentationDeck>().num_classes;
  const std::vector<std::string> names(C);
  SegmentationScores all(names);
  for (std::int64_t i = 0; inputs.has(fmt::format("image{}.label", i)); ++i) {
    const std::string image = fmt::format("image{}.", i);
    std::vector<Tensor> logits;
    for (std::int64_t s = 0; inputs.has(fmt::format("{}scale{}.logits", image, s)); ++s)
      logits.push_back(read_logits(inputs, fmt::format("{}scale{}.logits", image, s), C));
    WEFT_CHECK(!logits.empty(), Exit::data, probe_hint, "input \"{}scale0.logits\" is not there",
               image);
    const Shape size = inputs.shape(image + "label", 2);
    const std::vector<std::uint8_t> labels = labels_of(inputs, image + "label", C);
    const std::vector<std::int64_t> zeros(3 * C);
    Tensor prediction = Tensor::empty(size, DType::u8);
    Tensor counts = Tensor::from_host(std::span<const std::int64_t>(zeros), {3, C});
    Tensor scores = Tensor::empty({C, size[0], size[1]}, DType::f32);
    ops::predict_classes(prediction, logits,
                         Tensor::from_host(std::span<const std::uint8_t>(labels), size), counts,
                         scores);
    const Tensor host_counts = counts.to_host(), host = prediction.to_host();
    SegmentationScores one(names);
    one.add(host_counts.span<std::int64_t>());
    all.add(host_counts.span<std::int64_t>());
    const auto found = host.span<std::uint8_t>();
    const std::vector<std::int64_t> classes(found.begin(), found.end());
    outputs.add(image + "scores", scores.view({1, C, size[0], size[1]}));
    add_whole(outputs, image + "prediction", classes, size);
    add_colours(outputs, image + "colours", classes, size);
    add_number(outputs, image + "accuracy", one.accuracy());
    add_whole(outputs, image + "pixels", {one.pixels}, {1});
    add_classes(outputs, image, one);
  }
  WEFT_CHECK(all.images > 0, Exit::data, probe_hint, "input \"image0.label\" is not there");
  add_classes(outputs, "", all);
  std::vector<float> iou;
  for (const ClassScore& c : all.classes) iou.push_back(static_cast<float>(c.iou()));
  outputs.add("iou", Tensor::from_host(std::span<const float>(iou), {C}));
  add_number(outputs, "mean_iou", all.mean_iou());
  add_number(outputs, "accuracy", all.accuracy());
  if (inputs.has("colour_map"))
    add_colours(outputs, "colour_map.colours", inputs.i64("colour_map"),
                inputs.shape("colour_map", 2));
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
