// Where a model that is not trained gets its weights from.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/adapter.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"

namespace weft {

// Whether a key for weights says random:SEED.
bool is_random_source(const std::string& weights);

// Exit::data, naming the deck's key, where there is no such file or folder. `otherwise` ends the
// hint.
void check_weights_exist(const std::string& key, const std::string& weights,
                         const std::string& otherwise = "");

class ModelSource {
 public:
  // Collective. `weights`: a safetensors file, index or folder; a run directory of weft's, whose
  // newest checkpoint is taken, or a checkpoint in it (RUN/best); or "random:SEED", drawn anew with
  // no zeros left, to measure or test without any. Empty: the newest checkpoint of `run_dir` (none:
  // Exit::checkpoint, naming `key`, the deck's key for the weights). `run_dir` empty: Exit::usage.
  ModelSource(const std::string& key, const std::string& weights, const std::string& run_dir,
              bool ema, MPI_Comm world);

  // Collective. Adapters (LoRA) that load() adds to the weights (find_adapter in
  // checkpoint/adapter.h). `key`: the deck's key for them.
  void add_adapters(const std::string& key, const std::vector<std::string>& named, MPI_Comm world);

  // Distinguishes these weights from others: names, sizes and times of files.
  const std::string& identity() const { return identity_; }
  // For the log.
  std::string describe() const;
  RunNotes notes() const;  // the checkpoint's
  // Allocates the table for inference and fills it. A checkpoint of adapters gets its base from the
  // files that it names. Exit::data or Exit::checkpoint if the weights do not fit.
  void load(ParameterTable& table, const WeightNames& names, bool bf16) const;
  // The same of an allocated table.
  void read(ParameterTable& table, const WeightNames& names) const;
  // The files that were named; nullopt for a checkpoint, or for weights drawn at random.
  std::optional<WeightFiles> files() const;

 private:
  void merge(ParameterTable& table, const WeightNames& names) const;

  std::string key_, weights_, identity_;
  bool ema_;
  std::optional<Checkpoint> checkpoint_;
  std::optional<AdapterFacts> of_checkpoint_;  // if it holds adapters
  std::vector<NamedAdapter> adapters_;
  mutable bool base_checked_ = false;  // it belongs to the adapters: weights may be read again
};

}  // namespace weft
