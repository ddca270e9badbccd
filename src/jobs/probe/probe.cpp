#include "jobs/probe/probe.h"

#include "checkpoint/weights.h"
#include "core/error.h"
#include "jobs/probe/probe_case.h"
#include "jobs/probe/probe_images.h"
#include "jobs/probe/probe_vae.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {

int probe(Deck deck, const ProbeRequest& request) {
  if (is_image_probe(request.what)) return probe_images(deck, request);
  WEFT_CHECK(!request.weights.empty(), Exit::usage, "give --weights FILE.safetensors",
             "weft probe {} needs weights", request.what);
  if (deck.model.name != "stdit3") return probe_vae(std::move(deck), request);
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  Stdit3 model(stdit3_config(deck));
  model.params().allocate(1 << 22, deck.model.dtype == "bf16", request.backward);
  load_weights(request.weights, model.params());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  ProbeCase c = read_case(inputs, stdit3_config(deck));
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
    outputs.add("loss", flow_loss(tape, model, c.x, noise, c.in, 1.0f / static_cast<float>(B)));
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
      s.sizes.push_back({static_cast<double>(height[static_cast<std::size_t>(b)]),
                         static_cast<double>(width[static_cast<std::size_t>(b)]),
                         frames[0] == 1 ? 1 : frames[static_cast<std::size_t>(b)]});
    outputs.add("samples",
                flow_sample(model, deck.get<SamplerDeck>(), deck.get<DiffusionDeck>(), s));
  }
  outputs.write(request.outputs);
  return 0;
}

Command probe_command() {
  const auto r = std::make_shared<ProbeRequest>();
  Command c{"probe", "run one forward, loss or sample on given weights and inputs",
            [r](const Deck& deck, MPI_Comm) { return probe(deck, *r); }};
  c.first_rank_only = true;
  Argument& what = c.option("what", r->what, "what to run: docs/probe.md");
  what.required = true;
  what.choices = {
      "forward", "loss", "sample", "resize_image", "segmentation_batch", "segmentation_scales"};
  c.deck_file("--deck", "deck with the [model] table");
  c.option("--weights", r->weights, "safetensors; those of the model, if it has any");
  c.option("--inputs", r->inputs, "safetensors").required = true;
  c.option("--outputs", r->outputs, "safetensors to write").required = true;
  c.option("--backward", r->backward, "also gradients");
  c.key_option<std::string>("--device", "device.kind", "cpu or cuda");
  c.key_option<std::string>("--dtype", "model.dtype", "f32 or bf16");
  c.overrides();
  return c;
}

}  // namespace weft
