// The trainings that weft bench scaling sets against each other: each on some of the job's ranks,
// all alive at once, one at work.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "bench/scaling_report.h"
#include "train/trainer.h"

namespace weft {

// Collective. Waits, mostly asleep, until every rank is here: idle ranks must not take processor
// time from those being timed. Ranks leave it within a fraction of a millisecond.
void meet(MPI_Comm world);

// A directory of this rank for the run.dir of its trainings, below TMPDIR; gone when the bench
// ends. Exit::usage if there can be none.
class Scratch {
 public:
  Scratch();
  ~Scratch() { clear(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void clear();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// How a training of the bench is made up.
struct ContenderSetup {
  int ranks = 1;
  bool overlap = true;
  bool alone = false;  // every rank trains by itself, all at the same time
};

// A training on the first ranks of the world; the others hold an empty one.
class Contender {
 public:
  // Collective over `world`.
  Contender(Deck deck, const ContenderSetup& setup, std::int64_t micro_batches, std::int64_t steps,
            const Scratch& scratch, MPI_Comm world);
  ~Contender();
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  // Steps; their metrics as this rank sees them. Nothing on ranks that are left out. Afterwards no
  // part of the training is still running.
  std::vector<StepMetrics> run(std::int64_t steps);
  // All weights as the model uses them, one after the other; none on ranks that are left out.
  std::vector<float> weights();
  // Whether all of its ranks hold the same bits. True on ranks that are left out.
  bool same_on_all(const std::vector<float>& values) const;

 private:
  void settle();  // waits for weights in flight from the ranks that updated them

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::unique_ptr<Trainer> trainer_;
};

// Collective over `world`. What the next `steps` of `contender` take: means over its ranks, on rank
// 0 of the world. The step is the median of them where `by_median`, else their mean.
ScalingRound time_round(Contender& contender, std::int64_t steps, bool by_median, MPI_Comm world);

}  // namespace weft
