// Runs a deck's model dry, as it would run on a GPU: each of its convolutions is asked for
// (ask.cu).
//   dry_runs DECK.toml [section.key=value ...] --height H --width W [--batch N] [--frames T]
//   [--code]
// A model that trains takes a micro-batch of N clips or images, forward and backward; a codec
// (--code) codes a clip both ways; sadtalker animates a picture of that size.
#include "checkpoint/model_source.h"
#include "cli/cli.h"
#include "jobs/animate/networks.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

struct Request {
  bool code = false;  // the codec of a model that trains too
  std::int64_t height = 256, width = 256, batch = 1, frames = 1;
};

bool for_a_gpu = false;  // from here on dry runs are; weights are the host's

void train(const Deck& deck, const Request& r) {
  const auto task = make_task(deck);
  Bucket b;
  b.name = "planned";
  b.frames = r.frames;
  b.height = r.height;
  b.width = r.width;
  b.clips = r.batch;
  if (deck.model.name == "segmentation") b.label_rate = deck.data.label_rate;
  if (deck.model.name == "dbnet") {
    b.label_rate = 1;
    b.label_bytes = text_label_bytes;
  }
  task->check({&b, 1});
  {
    const auto untouched = Arena::planning();
    const ArenaScope scope(*untouched);
    task->params().allocate(1 << 20, task->bf16(), true);
  }
  for_a_gpu = true;
  plan_step_memory(*task, b, r.batch, 0, DeviceKind::cuda);
}

void animate(const Deck& deck, const Request& r, MPI_Comm world) {
  const ClipRequest clip{"planned", "the deck", deck.get<AnimateDeck>(), deck.get<SadtalkerDeck>()};
  AnimateNetworks networks(deck, {clip}, world);
  networks.load({&clip}, {&clip});
  for_a_gpu = true;
  networks.plan(clip, {r.frames, r.height, r.width}, true);
}

void code(const Deck& deck, const Request& r) {
  const auto codec = make_codec(deck);
  {
    const auto untouched = Arena::planning();
    const ArenaScope scope(*untouched);
    codec->params().allocate_for_inference(codec->bf16());
  }
  for_a_gpu = true;
  codec->plan_encode(r.frames, r.height, r.width, codec->frames_asked(r.frames));
  codec->plan_decode(r.frames, r.height, r.width, codec->frames_asked(r.frames));
}

Command dry_run() {
  const auto r = std::make_shared<Request>();
  Command c{"", "asks for the convolutions of a deck's model",
            [r](const Deck& deck, MPI_Comm world) {
              if (deck.model.name == "sadtalker")
                animate(deck, *r, world);
              else if (!r->code && find_model(deck.model.name) != nullptr)
                train(deck, *r);
              else
                code(deck, *r);
              return 0;
            }};
  c.takes_deck();
  c.option("--code", r->code, "the model's codec");
  c.option("--height", r->height, "of pictures");
  c.option("--width", r->width, "of pictures");
  c.option("--batch", r->batch, "clips or images of a micro-batch");
  c.option("--frames", r->frames, "of a clip");
  return c;
}

}  // namespace

Device this_device() { return {for_a_gpu ? DeviceKind::cuda : DeviceKind::cpu, 0}; }

}  // namespace weft

int main(int argc, char** argv) {
  const weft::Command command = weft::dry_run();
  return weft::run_program(argc, argv,
                           {"dry_runs", command.help, "", {command}, weft::register_deck_tables});
}
