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

int probe_wan(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  Wan model(wan_config(deck));
  model.params().allocate(1 << 22, model.bf16(), request.backward);
  load_weights(request.weights, model.params(), model.weight_names());
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
  plain.timestep = inputs.f32("timestep", {B});
  plain.captions = upload(pack_captions(mask, L, B, false), context);
  const WanInput in = model.complete(plain);

  Tape tape(request.backward ? Tape::Mode::record : Tape::Mode::infer);
  model.params().begin_step([](int) {});
  if (request.what == "forward") {
    const Var x_var = make_var(x), y_var = make_var(context);
    const Var out = model.forward(tape, in, x_var, y_var);
    outputs.add("out", out->value);
    if (request.backward) {
      out->grad = inputs.f32("cotangent", out->value.shape());
      tape.backward();
      model.params().finish_step();
      outputs.add("grad.x", x_var->grad);
      outputs.add("grad.context", zeroed_grad(y_var));
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
