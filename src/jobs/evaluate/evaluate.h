// `weft evaluate DECK`: how well a model does on images whose truth is known: the classes of their
// pixels (segmentation), or the text in them (dbnet).
#pragma once

#include <mpi.h>

#include <functional>

#include "config/command.h"
#include "jobs/evaluate/detection_scores.h"
#include "jobs/evaluate/segmentation_scores.h"

namespace weft {

// The table [evaluate] of the deck.
struct EvaluateDeck {
  std::string data;
  std::string output = "evaluation";
  std::int64_t pictures = 12;
  bool predictions = false;
  bool ema = false;
  std::int64_t short_side = 736, long_side = 1333;
};
DeckTable evaluate_table();

// Make the page of an evaluation, as HTML; null: there is none.
using SegmentationPage = std::function<std::string(const SegmentationScores&)>;
using DetectionPage = std::function<std::string(const DetectionScores&)>;
struct EvaluationPages {
  SegmentationPage segmentation;
  DetectionPage detection;
};

// Collective. Writes OUTPUT/evaluation.json, .txt and .html once all images are evaluated. Returns
// the exit code: 0, 3 if images failed, 75 if asked to stop. The same command evaluates what is
// missing.
int evaluate(const Deck& deck, const EvaluationPages& pages, MPI_Comm world);
Command evaluate_command(EvaluationPages pages);

}  // namespace weft
