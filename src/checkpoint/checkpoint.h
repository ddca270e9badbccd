// Checkpoints of the training state (docs/checkpoints.md). A checkpoint is a directory RUN/step_N
// with one shard a rank and a manifest; RUN/latest names the newest that is complete. After any
// crash at any instruction `latest` names a checkpoint that loads, whose every byte is verified.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config/deck.h"
#include "nn/parameters.h"
#include "tensor/device.h"

namespace weft {

// One flat array of the state, such as "master" or "exp_avg": the same length, cuts and meaning on
// every rank. `cuts` (ends of stretches, growing, the last = length; empty: one stretch) says who
// writes what: rank r of n writes part_of(stretch, r, n) of each stretch (core/parts.h). A load
// reads whatever ranges it needs, at any rank count.
struct FlatArray {
  std::string name;
  std::int64_t length = 0;  // elements, over all ranks
  std::vector<std::int64_t> cuts;
  // This rank's parts, one a stretch in order: host memory, or a GPU's. They may lie anywhere, in
  // one tensor or in many.
  std::vector<std::span<float>> parts;
  DeviceKind device = DeviceKind::cpu;
};

// One named piece of the flat arrays, so that readers can find a tensor by its released name.
struct TensorRange {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // in elements
};

// What a run leaves in its checkpoints for a restart to check or to go on with. "": not in the
// file.
struct RunNotes {
  std::string classes;        // names of the data's classes, one a line
  std::string costs;          // measured times (train/cost_table.h)
  std::string data, data_id;  // the training data: clips per bucket, and ClipSource::content_id()
  std::string kept;           // what a step keeps of its activations (train/memory_plan.h)
  std::string run;            // the run's id (train/metrics/run_facts.h)
  std::string task;           // TrainingTask::state()
  std::string text_encoder;   // that of the captions
  std::string validation;     // ValidationHistory
};
// By their names in the file, in its order.
constexpr std::pair<const char*, std::string RunNotes::*> note_names[] = {
    {"classes", &RunNotes::classes},
    {"costs", &RunNotes::costs},
    {"data", &RunNotes::data},
    {"data_id", &RunNotes::data_id},
    {"kept", &RunNotes::kept},
    {"run", &RunNotes::run},
    {"task", &RunNotes::task},
    {"text_encoder", &RunNotes::text_encoder},
    {"validation", &RunNotes::validation}};

struct CheckpointInfo {
  std::int64_t step = 0;  // steps done
  std::string deck;       // the effective deck, TOML
  std::string build;      // weft's version and commit
  std::vector<TensorRange> tensors;
  RunNotes notes;
};

class CheckpointWriter {
 public:
  // Collective. Proves at once that the run directory can be written (Exit::checkpoint if not),
  // clears remains of saves that a crash cut off. `keep` >= 2.
  CheckpointWriter(std::filesystem::path run_dir, MPI_Comm comm, int keep);
  ~CheckpointWriter();  // waits for the save in flight

  // Collective. Copies this rank's share (the cut, the only stall) and returns; a thread writes
  // step_N.tmp/, fsyncs, gathers hashes, writes the manifest, renames, reads back, marks verified,
  // moves `latest`, and deletes older ones beyond `keep`. Waits first for a save still in flight.
  // `best`: once it is verified, RUN/best names it, and it is kept until another is.
  // Returns the seconds that the caller was stalled.
  double save(const CheckpointInfo& info, std::span<const FlatArray> arrays, bool best = false);
  // Collective. Waits until nothing is in flight. A save that failed (disk full, quota) is one
  // ERROR line naming path, bytes and reason; the older checkpoints stay and the run goes on:
  // returns false. Three failures in a row throw Exit::checkpoint at the next save().
  bool wait();
  // Collective. Checks that a checkpoint of these arrays has room now: this rank's shard within the
  // file size limit (ulimit -f), all shards in the file system's free space. Exit::checkpoint if
  // not.
  void check_room(std::span<const FlatArray> arrays);
  // The seconds for which this rank has been writing its part of a save; nullopt if it is not.
  // Ranks may differ: they must agree before they act on it.
  std::optional<double> writing_for() const;
  // Seconds from the cut to the verified checkpoint of the longest save so far; 0 before the first.
  double longest_save() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class Checkpoint {
 public:
  // Collective. Finds the newest usable checkpoint of a run: `latest` first, then older ones. Every
  // damaged one is named in a WARN line (file, block, tensor), and so is one of another run than
  // `run` (its note; "": any). nullopt when the run has never saved any; Exit::checkpoint when
  // there are some and none is usable.
  static std::optional<Checkpoint> newest(const std::filesystem::path& run_dir, MPI_Comm comm,
                                          const std::string& run = "");
  // Opens one checkpoint directory and verifies every byte of it; throws Exit::checkpoint. Not
  // collective.
  static Checkpoint open(const std::filesystem::path& dir);

  const CheckpointInfo& info() const { return info_; }
  const std::filesystem::path& dir() const { return dir_; }
  // Names and lengths (elements) of its flat arrays.
  const std::map<std::string, std::int64_t>& arrays() const { return arrays_; }
  // Reads elements [begin, begin + out.size()) of an array, whatever the rank count that wrote it.
  void read(const std::string& array, std::int64_t begin, std::span<float> out) const;
  // Text for `weft inspect`: step, build, deck, tensors, shards, hashes.
  std::string describe() const;

 private:
  struct Placement;  // where every element is
  struct Loader;
  std::filesystem::path dir_;
  CheckpointInfo info_;
  std::map<std::string, std::int64_t> arrays_;
  std::shared_ptr<const Placement> placement_;
  std::string files_;  // of describe(): cuts, one line a shard file, and the hash of the state
};

// The description that a checkpoint stores of this state after `steps_done` steps.
CheckpointInfo describe_state(const Deck& deck, ParameterTable& table, std::int64_t steps_done);

// The flat arrays of the state, master, exp_avg, exp_avg_sq, ema and fixed, as rank `rank` of
// `ranks` saves them. The first of several moving averages is "ema", the others bear their decays:
// "ema_0.9999".
std::vector<FlatArray> flat_arrays(ParameterTable& table, const OptimizerState& state, int rank,
                                   int ranks);

// Which of a checkpoint's tensors a table may lack; null: none.
using MayLack = std::function<bool(const std::string& tensor)>;

// Reads the weights of a checkpoint into the table, which may be one that is only run
// (allocate_for_inference). Tensors are found by their released names, so the layout may differ,
// and so may what is trained (vae_train.freeze_spatial). Exit::checkpoint names the first tensor
// that does not fit, and tensors that the table lacks.
void restore_state(const Checkpoint& checkpoint, ParameterTable& table,
                   const MayLack& lacks = nullptr);
// To resume training: reads the masters, moments and EMAs that this rank holds, and the untrained
// parameters, which must be the same as in the run. An average whose decay the checkpoint does not
// have goes on from the checkpoint's first. The caller then spreads the weights that other ranks
// hold (DataParallel::spread_weights).
void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state);

// As above, but the weights are the EMA's: the first, or that of `decay`. Exit::usage names the
// decays that there are.
void restore_ema(const Checkpoint& checkpoint, ParameterTable& table,
                 std::optional<double> decay = std::nullopt, const MayLack& lacks = nullptr);
// The array of that average.
std::string ema_array(const Checkpoint& checkpoint, std::optional<double> decay);

}  // namespace weft
