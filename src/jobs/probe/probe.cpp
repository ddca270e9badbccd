#include "jobs/probe/probe.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "jobs/probe/probe_case.h"
#include "jobs/probe/probe_dbnet.h"
#include "jobs/probe/probe_face.h"
#include "jobs/probe/probe_gfpgan.h"
#include "jobs/probe/probe_images.h"
#include "jobs/probe/probe_paste.h"
#include "jobs/probe/probe_sadtalker.h"
#include "jobs/probe/probe_scores.h"
#include "jobs/probe/probe_segmentation.h"
#include "jobs/probe/probe_speech.h"
#include "jobs/probe/probe_vae.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {

namespace {

int probe_stdit3(const Deck& deck, const ProbeRequest& request) {
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
      s.sizes.push_back({static_cast<double>(height[static_cast<std::size_t>(b)]),
                         static_cast<double>(width[static_cast<std::size_t>(b)]),
                         frames[0] == 1 ? 1 : frames[static_cast<std::size_t>(b)]});
    outputs.add("samples",
                flow_sample(model, deck.get<SamplerDeck>(), deck.get<DiffusionDeck>(), s));
  }
  outputs.write(request.outputs);
  return 0;
}

// What can be asked of which models; none: it needs neither a model nor a deck. `weights`: the case
// has some.
struct Probe {
  std::vector<std::string> models, whats;
  bool weights;
  std::function<int(const Deck&, const ProbeRequest&, MPI_Comm)> run;
};

// `run` on the first rank alone.
auto alone(int (*run)(const Deck&, const ProbeRequest&)) {
  return [run](const Deck& deck, const ProbeRequest& request, MPI_Comm world) {
    int rank = 0;
    MPI_Comm_rank(world, &rank);
    return rank == 0 ? run(deck, request) : 0;
  };
}

const std::vector<Probe>& probes() {
  static const std::vector<Probe> table = {
      {{"stdit3"}, {"forward", "loss", "sample"}, true, alone(probe_stdit3)},
      {{"vae", "vae_temporal"}, {"forward"}, true, alone(probe_vae)},
      {{"segmentation"}, {"forward", "loss", "train_steps"}, true, probe_segmentation},
      {{"sync_batch_norm"}, {"sync_batch_norm"}, false, probe_segmentation},
      {{"image_resize"}, {"resize_image"}, false, alone(probe_images)},
      {{"segmentation_data"},
       {"segmentation_batch", "segmentation_scales"},
       false,
       alone(probe_images)},
      {{"dbnet"}, {"forward"}, true, alone(probe_detector)},
      {{"segmentation_evaluation"}, {"segmentation_scores"}, false, alone(probe_scores)},
      {{"sadtalker"}, face_probes, true, alone(probe_face)},
      {{"sadtalker"}, geometry_probes, false, alone(probe_geometry)},
      {{"sadtalker"}, speech_probes, true, alone(probe_speech)},
      {{"sadtalker"}, {"sadtalker_mel"}, false, alone(probe_mel)},
      {{"sadtalker"}, render_probes, true, alone(probe_sadtalker)},
      {{"sadtalker"}, {"sadtalker_paste"}, false, alone(probe_paste)},
      {{"sadtalker"}, restore_probes, true, alone(probe_gfpgan)},
      {{"sadtalker"}, {"gfpgan_paste"}, false, alone(probe_gfpgan_paste)},
      {{}, {"boxes"}, false, alone(probe_boxes)},
      {{}, {"frames"}, false, alone(probe_frames)},
      {{}, {"video_frames"}, false, alone(probe_video_frames)},
  };
  return table;
}

}  // namespace

int probe(const Deck& deck, const ProbeRequest& request, MPI_Comm world) {
  std::vector<std::string> possible, fitting;  // whats of the model; models of the what
  for (const Probe& p : probes()) {
    const bool asked = std::ranges::find(p.whats, request.what) != p.whats.end();
    if (asked && p.models.empty()) return p.run(deck, request, world);
    WEFT_CHECK(!asked || !request.deck.empty(), Exit::usage,
               "name the deck of the model with --deck", "weft probe {} needs a deck",
               request.what);
    if (asked) fitting.insert(fitting.end(), p.models.begin(), p.models.end());
    if (std::ranges::find(p.models, deck.model.name) == p.models.end()) continue;
    possible.insert(possible.end(), p.whats.begin(), p.whats.end());
    if (!asked) continue;
    WEFT_CHECK(!p.weights || !request.weights.empty(), Exit::usage, "name a file with --weights",
               "weft probe {} needs weights", request.what);
    return p.run(deck, request, world);
  }
  throw Error(
      Exit::usage,
      fmt::format("weft probe {} with model.name = \"{}\"", request.what, deck.model.name),
      fmt::format("{} is for model.name = \"{}\"; {}", request.what, fmt::join(fitting, "\", \""),
                  possible.empty() ? "that model has no probe (docs/probe.md)"
                                   : fmt::format("that model has {}", fmt::join(possible, ", "))),
      __FILE__, __LINE__);
}

Command probe_command() {
  const auto r = std::make_shared<ProbeRequest>();
  Command c{"probe", "run a model or a part of one on given weights and inputs",
            [r](const Deck& deck, MPI_Comm world) { return probe(deck, *r, world); }};
  Argument& what = c.option("what", r->what, "what to run (docs/probe.md)");
  what.required = true;
  for (const Probe& p : probes())
    for (const std::string& w : p.whats)
      if (std::ranges::find(what.choices, w) == what.choices.end()) what.choices.push_back(w);
  c.arguments.push_back({"--deck", "deck with the [model] table", Argument::DeckFile{&r->deck}});
  c.option("--weights", r->weights, "safetensors");
  c.option("--inputs", r->inputs, "safetensors").required = true;
  c.option("--outputs", r->outputs, "safetensors to write").required = true;
  c.option("--backward", r->backward, "also gradients");
  c.key_option<std::string>("--device", "device.kind", "cpu or cuda");
  c.key_option<std::string>("--dtype", "model.dtype", "f32 or bf16");
  c.overrides();
  return c;
}

}  // namespace weft
