// `weft evaluate DECK`: how well a model does on images whose truth is known: the classes of their
// pixels (segmentation), or the text in them (dbnet); or on the held-out clips of a training.
#pragma once

#include <mpi.h>

#include <functional>

#include "config/command.h"
#include "jobs/engine/list_job.h"
#include "jobs/evaluate/scores.h"
#include "train/validation.h"

namespace weft {

// The table [evaluate] of the deck (EvaluateDeck, train/validation.h).
DeckTable evaluate_table();

// Write the page of an evaluation to a file.
using SegmentationPage =
    std::function<void(const SegmentationScores&, const std::filesystem::path&)>;
using DetectionPage = std::function<void(const DetectionScores&, const std::filesystem::path&)>;
struct EvaluationPages {
  SegmentationPage segmentation;
  DetectionPage detection;
};

// Collective. Writes OUTPUT/evaluation.json, .txt and .html once all images are evaluated. Returns
// the exit code: 0, 3 if images failed, 75 if asked to stop. The same command evaluates what is
// missing.
int evaluate(const Deck& deck, const EvaluationPages& pages, MPI_Comm world);
Command evaluate_command(EvaluationPages pages);

// ---- One for each kind of model: collective, as evaluate() ----

int evaluate_segmentation(const Deck& deck, const ListStart& start, const SegmentationPage& page,
                          MPI_Comm world);
int evaluate_detection(const Deck& deck, const ListStart& start, const DetectionPage& page,
                       MPI_Comm world);

// Evaluates models of clips, by the held-out loss of a training; without a page.
int evaluate_held_out(const Deck& deck, const ListStart& start, MPI_Comm world);

// ---- What they share ----

// evaluate.data, or else what [validation] holds out; nothing of both: all of data.path.
HeldOutChoice evaluated_samples(const Deck& deck);
// Where these are.
const std::string& evaluated_data(const Deck& deck);
// That data in the key of a result: a file or folder by its identity, others as they are named.
std::string data_identity(const Deck& deck);
ListSettings evaluation_settings(const Deck& deck);
// No result may replace the deck, what it names, or one of `pictures`.
void check_results(const Deck& deck, const std::vector<std::string>& pictures);
// Rank 0, once all images are evaluated: adds each one's line by `add`, its seconds and picture,
// the machine to the facts, and the pace of this start, or, if it evaluated nothing, what
// evaluation.json tells of an earlier one. Removes pictures and predictions of images that an
// earlier evaluation in this folder had, and this one has not. `name`: of an image.
void add_results(EvaluationRecord& record, const Deck& deck, const ListEngine& engine,
                 const ListReport& report, const std::function<std::string(std::int64_t)>& name,
                 const std::function<void(const nlohmann::ordered_json&)>& add);
// Writes evaluation.json and .txt, prints the table, and calls `page` for evaluation.html.
void write_results(const EvaluationRecord& record, const nlohmann::ordered_json& json,
                   const std::string& table,
                   const std::function<void(const std::filesystem::path&)>& page);

}  // namespace weft
