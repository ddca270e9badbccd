// What a plan asks of the model that trains, beside what the trainer knows of it (train/task.h): the times of its
// micro-batches, by formulas or measured on this host.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "plan/measure.h"
#include "plan/step_model.h"
#include "train/memory_plan.h"
#include "train/task.h"

namespace weft {

// A plan's micro-batches: [bucket] clips in each, and the memory that they take.
struct PlannedWork {
  std::span<const Bucket> buckets;
  std::vector<std::int64_t> clips;
  std::vector<StepMemory> memory;
};

class PlannedModel {
 public:
  virtual ~PlannedModel() = default;

  virtual TrainingTask& task() = 0;
  // Checks that the model can train on such clips; opens no file. `local`: on this host, whose ranks are measured.
  virtual void check(std::span<const Bucket> buckets, bool local) = 0;
  // What of it follows from the parameters' layout: called when they are allocated.
  virtual std::vector<BucketSchedule> schedule(std::span<const Bucket> buckets) = 0;
  // Bytes of weights that stand in no table of trained parameters.
  virtual std::size_t other_weights() const { return 0; }
  // Bytes that a clip's training reads besides the clip.
  virtual double bytes_beside_clip() const { return 0; }
  // How its work is counted, and how much of it there is in so many clips.
  virtual std::string unit() const = 0;
  virtual std::int64_t units(const Bucket& bucket, std::int64_t clips) = 0;

  // [bucket] By the rates, on one of parallel.sp ranks with links of that many B/s between them.
  virtual std::vector<MicroBatchCost> costs(const PlannedWork& work, const Rates& rates,
                                            double link_bandwidth) = 0;
  // Collective: measured on all ranks of `world` at once.
  virtual LocalMeasurement measure(const PlannedWork& work, MPI_Comm world) = 0;
};

// That of deck.model.name. `deck` outlives it.
std::unique_ptr<PlannedModel> planned_model(const Deck& deck);
std::unique_ptr<PlannedModel> planned_stdit3(const Deck& deck);
std::unique_ptr<PlannedModel> planned_vae(const Deck& deck);

}  // namespace weft
