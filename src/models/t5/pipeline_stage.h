// A rank's work while captions pass through the text encoder: receives activations, computes its
// layers, sends the result on; rank 0 writes the features as they arrive.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "models/t5/job.h"
#include "models/t5/options.h"
#include "models/t5/pipeline.h"
#include "models/t5/t5.h"

namespace weft {

// The features file, F32 [tokens, channels] for each text, as micro-batches are done.
class FeatureFile {
 public:
  FeatureFile(const std::filesystem::path& file, std::vector<std::int64_t> tokens,
              std::int64_t channels, std::map<std::string, std::string> metadata);

  // Rows of a micro-batch, text behind text: bf16 where `low`, else f32.
  void write(const TextBatch& batch, std::span<const std::byte> rows, bool low);
  void finish() { writer_->finish(); }

 private:
  std::int64_t channels_;
  std::vector<std::int64_t> tokens_;
  std::optional<SafetensorsWriter> writer_;
};

class PipelineStage {
 public:
  // `part`: this rank's layers, or null; `file`: on rank 0. The current arena is that of the
  // activations. The first part calls `stop`, if given, between micro-batches: once it returns
  // true, the part begins no other and ends the stream, which tells the parts behind it.
  PipelineStage(const T5Deck& config, const T5Job& job, T5Encoder* part, FeatureFile* file,
                const std::function<bool()>& stop, MPI_Comm comm);

  // All micro-batches, or those before the stop: the file is not finished then. `ids` of all texts,
  // at the first part; `tokens` of each, everywhere. Whether all are done, as far as this rank
  // knows; the first part knows.
  bool run(const std::vector<std::vector<std::int32_t>>& ids,
           const std::vector<std::int64_t>& tokens);

 private:
  bool step(const TextBatch& batch, const std::vector<std::vector<std::int32_t>>& ids,
            const std::vector<std::int64_t>& tokens);
  void meanwhile();
  void take_results();
  void take_result();

  const T5Job& job_;
  T5Encoder* part_;
  FeatureFile* file_;
  const std::function<bool()>& stop_;
  bool low_;
  std::int64_t width_;
  std::optional<RowStream> in_, out_, results_;
  std::size_t written_ = 0;  // micro-batches
};

}  // namespace weft
