// weft_probe: models, or parts of them, on given weights and inputs, to compare this build or
// device with the original models (tests/probe/README.md).
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/cli.h"
#include "core/error.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "tests/probe/probe.h"

namespace weft {
namespace {

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
      {{"wan"}, {"forward", "loss"}, true, alone(probe_wan)},
      {{"wan"}, {"sample"}, true, alone(probe_wan_sample)},
      {{"wan_vae"}, {"forward"}, true, alone(probe_wan_vae)},
      {{"wan_vae"}, {"condition"}, true, alone(probe_wan_condition)},
      {{"wan"}, {"picture_size"}, false, alone(probe_picture_size)},
      {{"umt5"}, {"forward"}, true, alone(probe_umt5)},
      {{"segmentation"}, {"forward", "loss", "train_steps"}, true, probe_segmentation},
      {{"sync_batch_norm"}, {"sync_batch_norm"}, false, probe_segmentation},
      {{"image_resize"}, {"resize_image"}, false, alone(probe_images)},
      {{"segmentation_data"},
       {"segmentation_batch", "segmentation_scales"},
       false,
       alone(probe_images)},
      {{"dbnet"}, {"forward"}, true, alone(probe_detector)},
      {{"segmentation_evaluation"}, {"segmentation_scores"}, false, alone(probe_scores)},
      {{"sadtalker"},
       {"sadtalker_detect", "sadtalker_fan", "sadtalker_recon"},
       true,
       alone(probe_face)},
      {{"sadtalker"},
       {"sadtalker_crop", "sadtalker_align", "sadtalker_landmarks", "sadtalker_resize"},
       false,
       alone(probe_geometry)},
      {{"sadtalker"}, {"sadtalker_exp", "sadtalker_pose"}, true, alone(probe_speech)},
      {{"sadtalker"}, {"sadtalker_mel"}, false, alone(probe_mel)},
      {{"sadtalker"},
       {"sadtalker_kp", "sadtalker_transform", "sadtalker_generator", "sadtalker_render"},
       true,
       alone(probe_sadtalker)},
      {{"sadtalker"}, {"sadtalker_paste"}, false, alone(probe_paste)},
      {{"sadtalker"}, {"gfpgan", "parsenet"}, true, alone(probe_gfpgan)},
      {{"sadtalker"}, {"gfpgan_paste"}, false, alone(probe_gfpgan_paste)},
      {{}, {"t5_rounds"}, false, alone(probe_t5_rounds)},
      {{}, {"fp8_linear"}, false, alone(probe_fp8_linear)},
      {{}, {"clip"}, false, alone(probe_clip)},
      {{}, {"boxes"}, false, alone(probe_boxes)},
      {{}, {"frames"}, false, alone(probe_frames)},
      {{}, {"video_frames"}, false, alone(probe_video_frames)},
  };
  return table;
}

// Collective.
int probe(const Deck& deck, const ProbeRequest& request, MPI_Comm world) {
  std::vector<std::string> possible, fitting;  // whats of the model; models of the what
  for (const Probe& p : probes()) {
    const bool asked = std::ranges::find(p.whats, request.what) != p.whats.end();
    if (asked && p.models.empty()) return p.run(deck, request, world);
    WEFT_CHECK(!asked || !request.deck.empty(), Exit::usage,
               "name the deck of the model with --deck", "weft_probe {} needs a deck",
               request.what);
    if (asked) fitting.insert(fitting.end(), p.models.begin(), p.models.end());
    if (std::ranges::find(p.models, deck.model.name) == p.models.end()) continue;
    possible.insert(possible.end(), p.whats.begin(), p.whats.end());
    if (!asked) continue;
    WEFT_CHECK(!p.weights || !request.weights.empty(), Exit::usage, "name a file with --weights",
               "weft_probe {} needs weights", request.what);
    return p.run(deck, request, world);
  }
  throw Error(
      Exit::usage,
      fmt::format("weft_probe {} with model.name = \"{}\"", request.what, deck.model.name),
      fmt::format("{} is for model.name = \"{}\"; {}", request.what, fmt::join(fitting, "\", \""),
                  possible.empty() ? "that model has no probe (tests/probe/README.md)"
                                   : fmt::format("that model has {}", fmt::join(possible, ", "))),
      __FILE__, __LINE__);
}

Command probe_command() {
  const auto r = std::make_shared<ProbeRequest>();
  Command c{"", "run a model or a part of one on given weights and inputs",
            [r](const Deck& deck, MPI_Comm world) { return probe(deck, *r, world); }};
  Argument& what = c.option("what", r->what, "what to run (tests/probe/README.md)");
  what.required = true;
  for (const Probe& p : probes())
    for (const std::string& w : p.whats)
      if (std::ranges::find(what.choices, w) == what.choices.end()) what.choices.push_back(w);
  c.arguments.push_back({"--deck", "deck with the [model] table", Argument::DeckFile{&r->deck}});
  c.option("--weights", r->weights, "safetensors");
  c.option("--inputs", r->inputs, "safetensors").required = true;
  c.option("--outputs", r->outputs, "safetensors to write").required = true;
  c.option("--adapter", r->adapters, "FILE=FACTOR, added to the weights (wan, forward)");
  c.option("--backward", r->backward, "also gradients");
  c.key_option<std::string>("--device", "device.kind", "cpu or cuda");
  c.key_option<std::string>("--dtype", "model.dtype", "f32, bf16 or fp8");
  c.overrides();
  return c;
}

// The names of the decks that are for parts of segmentation and of the VAE, and their keys.
void register_tables() {
  add_model({"vae_temporal"});
  add_model({"", condition_probe_tables});
  add_model({"sync_batch_norm", segmentation_probe_tables});
  for (const char* name : {"image_resize", "segmentation_data", "segmentation_evaluation"})
    add_model({name});
  register_deck_tables();
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const weft::Command command = weft::probe_command();
  return weft::run_program(argc, argv,
                           {"weft_probe", command.help, "", {command}, weft::register_tables});
}
