// Sample clips while a model trains ([samples], docs/train.md): the clips that `weft generate`
// makes of the same prompts from the checkpoint of that step.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/deck_table.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/job.h"
#include "jobs/generate/texts.h"

namespace weft {

// The table [samples] of the deck; all else about the clips is in [generate].
struct SamplesDeck {
  std::vector<std::string> prompts;
  std::int64_t every = 0;
};
DeckTable samples_table();
// The deck of the `weft generate` that makes them: [generate] as it is, but with these prompts
// alone. Exit::usage for a model that makes no clips.
Deck samples_deck(const Deck& deck);

class TrainingSamples {
 public:
  // Collective. Encodes the prompts' texts into RUN/samples, and takes memory for a second copy of
  // the model's weights, and for the codec's, which it reads. Exit::usage where the deck does not
  // fit together, as in `weft generate`.
  TrainingSamples(const Deck& deck, MPI_Comm world);

  // Collective. Bytes of the arena that make() takes; Exit::usage where `capacity` is too small.
  std::size_t plan(std::size_t capacity);

  std::filesystem::path folder(std::int64_t step) const;
  // Whether make() has ended for that step.
  bool made(std::int64_t step) const;
  // Collective, in the current arena, after plan(). Clips from the newest checkpoint of run.dir,
  // which is that of `step`, divided over the ranks, into folder(step). A clip that fails is a WARN
  // line. `progress` is called between batches.
  void make(std::int64_t step, const std::function<void()>& progress);

  std::string describe() const;  // for the log

 private:
  Deck deck_;  // of `weft generate`
  std::filesystem::path run_dir_;
  MPI_Comm world_;
  ClipParts parts_;
  GenerateJob job_;
  std::unique_ptr<Communicator> exchange_;  // of the model, with parallel.sp
  MPI_Comm group_ = MPI_COMM_NULL;          // the same ranks
  int rank_ = 0, group_number_ = 0, groups_ = 1;
  bool first_ = true;  // of its group: decodes and writes
  std::unique_ptr<PromptFeatures> features_;
  std::vector<ClipBatch> batches_;
  FramePlan frames_;
};

}  // namespace weft
