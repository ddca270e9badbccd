#include "jobs/evaluate/evaluate.h"

#include "config/deck_table.h"
#include "core/error.h"
#include "core/host.h"
#include "jobs/evaluate/detection.h"
#include "jobs/evaluate/segmentation.h"
#include "parallel/rank_device.h"
#include "train/stop.h"

namespace weft {

int evaluate(const Deck& deck, const EvaluationPages& pages, MPI_Comm world) {
  watch_stop_signals();
  WEFT_CHECK(!deck.get<EvaluateDeck>().output.empty(), Exit::usage,
             "set evaluate.output = \"evaluation\"", "evaluate.output is empty");
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  if (deck.model.name == "dbnet") return evaluate_detection(deck, device, pages.detection, world);
  return evaluate_segmentation(deck, device, pages.segmentation, world);
}

namespace {

void evaluate_rows(Rows& r, EvaluateDeck& d) {
  r.text("data", d.data,
         "Images whose truth is known, as in data.path: a store of labelled images or shapes:..., "
         "or for a text detector a list with polygons or text:...; empty takes data.path.");
  r.text("output", d.output, "Folder of the results.");
  r.number("pictures", d.pictures, 0, 10000,
           "Of so many images, the first ones, the page shows picture, truth and prediction.");
  r.flag("predictions", d.predictions,
         "Write what is predicted for every image: a PNG of labels (class + 1), or the boxes and "
         "their scores in images.jsonl.");
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
  r.number("short_side", d.short_side, 0, 65536,
           "Text detector: short side in pixels that a picture is scaled to; 0 keeps its size.");
  r.number("long_side", d.long_side, 32, 65536,
           "Text detector: longest side in pixels that a picture is scaled to.");
}

}  // namespace

DeckTable evaluate_table() { return deck_table("evaluate", evaluate_rows); }

Command evaluate_command(EvaluationPages pages) {
  Command c{"evaluate",
            "measure how well a model does: IoU of classes and accuracy, or Hmean of text",
            [pages = std::move(pages)](const Deck& deck, MPI_Comm world) {
              return evaluate(deck, pages, world);
            }};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
