#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {

int probe_stdit3(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  Stdit3 model(stdit3_config(deck));
  model.params().allocate(1 << 22, holds_bf16(deck.model.dtype), request.backward);
  load_weights(request.weights, model.params());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  StepInputs c = read_step_inputs(inputs, stdit3_config(deck));
  const std::int64_t B = c.x.dim(0);
  Tape tape(request.backward ? Tape::Mode::record : Tape::Mode::infer);
  model.params().begin_step([](int) {});

  if (request.what == "forward") {
    c.in.x = c.x;
    c.in.timestep = inputs.f32("timestep", {B});
    const Var x = make_var(c.x), y = make_var(c.y);
    const Var out = model.forward(tape, c.in, x, y);
    outputs.add("out", out->value);
    if (request.backward) {
      out->grad = inputs.f32("cotangent", out->value.shape());
      tape.backward();
      model.params().finish_step();
      outputs.add("grad.x", x->grad);
      outputs.add("grad.y", zeroed_grad(y));
      outputs.add_gradients(model.params());
    }
  } else if (request.what == "loss") {
    c.in.timestep = inputs.f32("timestep", {B});
    const Tensor noise = inputs.f32("noise", c.x.shape());
    const float share = 1.0f / static_cast<float>(B);
    const Tensor weight = Tensor::from_host(std::span<const float>(&share, 1), {1});
    outputs.add("loss", flow_loss(tape, model, c.x, noise, c.in, weight));
    if (request.backward) {
      tape.backward();
      model.params().finish_step();
      outputs.add_gradients(model.params());
    }
  } else {
    SampleRequest s;
    s.z = c.x;
    s.y = c.y;
    s.captions = c.captions;
    s.fps = inputs.numbers("fps", B);
    s.size = {c.in.height, c.in.width, 1};
    const std::vector<float> height = inputs.numbers("height", B),
                             width = inputs.numbers("width", B);
    const std::vector<std::int64_t> frames = inputs.i64("num_frames");
    WEFT_CHECK(static_cast<std::int64_t>(frames.size()) == B, Exit::data, "num_frames is [B]",
               "input \"num_frames\" has {} elements", frames.size());
    // The first sample decides whether the batch is of images, as in the original.
    for (std::int64_t b = 0; b < B; ++b)
      s.sizes.push_back({static_cast<double>(height[b]), static_cast<double>(width[b]),
                         frames[0] == 1 ? 1 : frames[b]});
    outputs.add("samples",
                flow_sample(model, deck.get<SamplerDeck>(), deck.get<DiffusionDeck>(), s));
  }
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
