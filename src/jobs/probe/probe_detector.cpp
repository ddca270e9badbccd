#include "jobs/probe/probe_detector.h"

#include "core/error.h"
#include "jobs/probe/probe_case.h"
#include "models/dbnet/dbnet.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "train/memory_plan.h"

namespace weft {

int probe_detector(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const bool bf16 = deck.model.dtype == "bf16";
  const DbnetDeck& d = deck.get<DbnetDeck>();
  const bool offsets = has_offsets(WeightFiles::open(request.weights));
  Dbnet model(d, d.deformable == "on" || (d.deformable == "auto" && offsets));
  model.params().allocate_for_inference(bf16);
  load_weights(request.weights, model.params(), dbnet_weight_names());
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

}  // namespace weft
