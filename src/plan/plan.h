// Predicts what a deck needs on a described machine: memory by kind, the time of a step and where
// it goes, communication, data, checkpoints. One predictor for every model and job: a dry run of
// its own code counts memory, operations and bytes (train/step_cost.h), the machine's rates turn
// them into seconds, and closed formulas add what ranks wait for (plan/step_model.h).
#pragma once

#include <mpi.h>

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "config/command.h"
#include "data/step_plan.h"
#include "plan/step_model.h"
#include "train/memory_plan.h"

namespace weft {

struct PlanRequest {
  int gpus = 0;  // ranks; 0: those of the world
  double memory_gb =
      0;               // of a rank's device, 1e9 bytes; 0 on local: what the host has for each rank
  int per_node = 0;    // ranks; 0: 8
  std::string fabric;  // as described_machine() takes it, or "local"; empty: default_fabric()
  std::string gpu;     // as find_gpu() takes it (plan/step_model.h): memory, links, rates
  std::string rates;   // a file of measured rates; empty: those of `gpu`, or targets
  double mtbf_hours = 50000;  // of one device: mean hours between failures

  int ranks_a_node() const { return per_node > 0 ? per_node : 8; }
  // A card of 400 Gb/s a GPU.
  std::string default_fabric() const { return std::to_string(ranks_a_node()) + "x400"; }
  // Adds the options of the machine, of which commands have the same.
  void add_options(Command& c);
  // Checks them, and takes the memory that was not given from the GPU's.
  void complete();
};

// A place among ranks that are not here, for dry runs, which ask for rank and size alone
// (TrainingTask::share_clips, Denoiser::set_sequence_group).
class AbsentRanks : public Communicator {
 public:
  AbsentRanks(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Ticket all_reduce_sum(Tensor, CommDtype) override { refuse(); }
  Ticket reduce_scatter_sum(Tensor, CommDtype) override { refuse(); }
  Ticket all_gather(Tensor) override { refuse(); }
  Ticket all_to_all(Tensor, std::span<const std::int64_t>, Tensor,
                    std::span<const std::int64_t>) override {
    refuse();
  }
  double wait(Ticket) override { refuse(); }
  void progress(std::int64_t, Phase) override {}
  void set_timeout(double) override {}
  void check() override {}
  std::string describe() const override { return "none"; }

 private:
  [[noreturn]] static void refuse();
  int rank_, size_;
};

// A deck's training, laid out for dry runs: parameters have shapes and buckets, but no values.
struct PlannedTraining {
  // On so many ranks, which decide the buckets of gradients (bucket_elements). `here`: on this
  // host's, so that it can also be run; opens what training reads. Exit::usage where the deck's
  // model cannot be trained so.
  PlannedTraining(const Deck& deck, int ranks, bool here);

  const std::vector<Bucket>& buckets() const { return source->buckets(); }

  std::shared_ptr<const ClipSource> source;
  std::vector<std::int64_t> batch_sizes;  // [bucket], as the deck has them
  std::uint64_t seed;
  // The last of the ranks that share clips: it has the largest share.
  AbsentRanks sharing;
  std::unique_ptr<TrainingTask> task;
};

// A deck's buckets of gradients on any number of ranks, by dry runs; those of one size once.
class SchedulesByRanks {
 public:
  SchedulesByRanks(const Deck& deck, DeviceKind device, Rates rates)
      : deck_(deck), device_(device), rates_(std::move(rates)) {}
  const std::vector<BucketSchedule>& on(int ranks);
  void add(int ranks, std::vector<BucketSchedule> schedule);  // known already

 private:
  Deck deck_;
  DeviceKind device_;
  Rates rates_;
  std::map<std::int64_t, std::vector<BucketSchedule>> by_size_;  // elements of a bucket
};

struct BucketPlan {
  std::string name;
  std::int64_t batch = 0, tokens = 0;  // of a micro-batch; tokens of STDiT3, latents of the VAE
  StepMemory memory;
  MicroBatchCost cost;
  double share = 0;  // of all micro-batches
  std::int64_t equal_cost_batch =
      0;  // clips with which all buckets would cost about the same; 0: no suggestion
};

struct Plan {
  Machine machine;
  std::string model, unit;  // what trains, and what its work is counted in
  std::string rates_origin;
  int ranks = 1;
  std::int64_t parameters = 0, trained = 0;
  MemoryKinds memory;
  std::size_t capacity = 0;  // of the arena
  std::vector<BucketPlan> buckets;
  std::vector<BucketSchedule> schedule;
  StepTime step;         // of the slowest rank, mean over the sampled steps
  double seconds = 0;    // a step
  double imbalance = 0;  // share of a step that the mean rank waits for the slowest
  double tokens_a_step = 0, flops_a_step = 0;  // over all ranks
  std::vector<std::pair<int, double>>
      efficiency;                  // ranks, throughput a rank against one rank alone
  double optimizer_bandwidth = 0;  // B/s, in units of optimizer_bytes_an_element
  double bytes_sent = 0;           // a rank and step
  double flat_seconds = 0, hierarchical_seconds = 0;  // the whole reduction and gathering
  double data_bandwidth = 0;                          // B/s from storage, all ranks
  double checkpoint_bytes = 0;                        // all ranks
  double checkpoint_stall = 0, checkpoint_write = 0;  // seconds
  double young_daly = 0;                              // seconds between two
  double checkpoint_interval = 0;                     // the same, but no shorter than makes sense
};

// What an efficiency of more than one means, for readers of the tables.
inline constexpr const char* above_one_rank =
    "  (above 100 %: one rank alone updates all of the optimizer's state, which several share)";

// Collective for fabric "local", which times micro-batches of each bucket; alone otherwise.
// Exit::usage for what does not fit, naming the largest that does.
Plan make_plan(const Deck& deck, const PlanRequest& request, MPI_Comm world);

// `weft plan DECK --job encode | generate | animate`: memory of a rank by stage, and times where
// rates are known. Nothing is loaded and nothing is run. Prints the tables; `json`, if not empty,
// names a file for the same. Exit::usage for what does not fit, naming the largest that does.
int plan_job(const Deck& deck, const PlanRequest& request, const std::string& job,
             const std::string& json, int world_ranks);
struct ClipParts;

// What the sample clips of a training take ([samples]).
class SamplesPlan {
 public:
  explicit SamplesPlan(const Deck& deck);
  // Bytes of the weights of the model and the codec, beside the training's.
  std::size_t weights() const { return weights_; }
  // The peak of the arena. Exit::usage where a clip does not fit.
  std::size_t arena(std::size_t capacity) const;

 private:
  Deck deck_;
  std::shared_ptr<const ClipParts> parts_;
  std::size_t weights_ = 0;
};

// The part of animate: adds what it finds to `j`. Reads the list, its pictures and speeches, and
// draws networks of the deck's shapes.
void plan_animate(const Deck& deck, const PlanRequest& request, int ranks,
                  nlohmann::ordered_json& j);
// The rates of the request, or the targets. `f32`: of a model in f32; files and targets know one
// format. `dtype`: model.dtype, of which "fp8" has a note on rates that nobody has measured.
Rates rates_of(const PlanRequest& request, bool f32 = false, const std::string& dtype = {});
// The machine that the request describes.
Machine machine_of(const PlanRequest& request);

Command plan_command();

}  // namespace weft
