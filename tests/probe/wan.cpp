#include <numeric>

#include "checkpoint/adapter.h"
#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/wan/dit.h"
#include "models/wan/options.h"
#include "models/wan/task.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// The timesteps of samples, [B], or of tokens, [B,N]; of a first frame that is given, a mask.
void add_times(const ProbeInputs& inputs, std::int64_t B, WanInput& in) {
  const std::vector<std::int64_t> shape = inputs.shape("timestep");
  if (shape.size() == 2) {
    in.times = inputs.f32("timestep", Shape(std::span<const std::int64_t>(shape)))
                   .view({shape[0] * shape[1]});
    std::vector<std::int32_t> rows(static_cast<std::size_t>(in.times.numel()));
    std::iota(rows.begin(), rows.end(), 0);
    in.rows = Tensor::from_host(std::span<const std::int32_t>(rows), {in.times.numel()});
    return;
  }
  in.timestep = inputs.f32("timestep", {B});
  if (!inputs.has("first_frame")) return;
  std::vector<std::uint8_t> mask;
  for (const std::int64_t given : inputs.i64("first_frame"))
    for (std::int64_t t = 0; t < in.x.dim(2); ++t) mask.push_back(t > 0 || given == 0);
  in.x_mask = Tensor::from_host(std::span<const std::uint8_t>(mask), {B, in.x.dim(2)});
}

}  // namespace

int probe_wan(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  Wan model(wan_config(deck));
  model.params().allocate(1 << 22, model.bf16(), request.backward);
  load_weights(request.weights, model.params(), model.weight_names());
  std::vector<WeightedAdapter> adapters;
  for (const std::string& text : request.adapters) {
    const NamedAdapter named = find_adapter("--adapter", text, MPI_COMM_SELF);
    adapters.push_back({named.read(false), named.factor});
  }
  if (!adapters.empty()) merge_adapters(model.params(), adapters, model.weight_names());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;

  const Tensor x = inputs.f32("x", inputs.shape("x", 5));
  const std::int64_t B = x.dim(0), L = inputs.shape("context", 3)[1];
  const Tensor context = inputs.f32("context", {B, L, model.caption_channels()});
  const std::vector<std::int64_t> lengths = inputs.i64("context_lens");
  WEFT_CHECK(std::ssize(lengths) == B, Exit::data, "context_lens is [B]",
             "input \"context_lens\" has {} elements", lengths.size());
  std::vector<std::int64_t> mask;  // [B, L]
  for (const std::int64_t length : lengths)
    for (std::int64_t l = 0; l < L; ++l) mask.push_back(l < length);
  DenoiserInput plain;
  plain.x = x;
  if (inputs.has("y")) plain.condition = inputs.f32("y", inputs.shape("y", 5));
  plain.captions = upload(pack_captions(mask, L, B, false), context);
  WanInput in = model.complete(plain);
  add_times(inputs, B, in);

  Tape tape(request.backward ? Tape::Mode::record : Tape::Mode::infer);
  model.params().begin_step([](int) {});
  if (request.what == "forward") {
    Wan::Inputs of{make_var(x), nullptr, make_var(context)};
    if (in.condition.defined()) of.condition = make_var(in.condition);
    const Var out = model.forward(tape, in, of);
    outputs.add("out", out->value);
    if (request.backward) {
      out->grad = inputs.f32("cotangent", out->value.shape());
      tape.backward();
      model.params().finish_step();
      outputs.add("grad.x", of.x->grad);
      if (of.condition) outputs.add("grad.y", of.condition->grad);
      outputs.add("grad.context", zeroed_grad(of.captions));
      outputs.add_gradients(model.params());
    }
  } else {
    const float share = 1.0f / static_cast<float>(B);
    const Tensor weight = Tensor::from_host(std::span<const float>(&share, 1), {1});
    outputs.add("loss",
                wan_loss(tape, model, x, inputs.f32("noise", x.shape()), in, Tensor(), weight));
    if (request.backward) {
      tape.backward();
      model.params().finish_step();
      outputs.add_gradients(model.params());
    }
  }
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
