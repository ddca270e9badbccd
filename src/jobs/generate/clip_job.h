// Clips as a list job: the models, and a rank's state while it makes clips.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "jobs/engine/list_job.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/clip_writer.h"
#include "jobs/generate/job.h"
#include "jobs/generate/memory.h"
#include "jobs/generate/parts.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"

namespace weft {

// What makes clips, before its weights are loaded. Exit::usage for a deck whose parts do not fit
// together.
struct ClipModels {
  ClipParts parts;
  ModelSource denoiser_weights;
  std::optional<ModelSource> codec_weights;  // none of a codec without parameters

  ClipModels(const Deck& deck, MPI_Comm world);
  // Stands for the weights in the clips' keys.
  std::string identity() const;
};

class ClipJob : public ListJob {
 public:
  // Collective: loads the weights, and fits batches and the codec's micro-batch to the memory of
  // the engine's missing clips.
  ClipJob(const Deck& deck, const GenerateJob& job, ClipModels& models,
          const PromptFeatures& features, std::shared_ptr<const Watermark> watermark,
          const RankDevice& device, const ListEngine& engine, MPI_Comm world);

  // Which clips are sampled together, costliest first.
  const std::vector<ItemBatch>& batches() const { return batches_; }
  void make(const ItemBatch& clips, ItemResults& results) override;
  void flush(ItemResults& results) override;
  // This rank's numbers for the report: seconds by stage, bytes beside their plans.
  nlohmann::ordered_json share() const;

 private:
  const Deck& deck_;
  ClipModels& models_;
  const bool first_;                        // of its group: decodes and writes
  std::unique_ptr<Communicator> exchange_;  // of the model, with parallel.sp
  std::size_t capacity_, planned_ = 0;      // bytes of the arena
  std::vector<ItemBatch> batches_;
  std::unique_ptr<Arena> arena_;
  std::optional<ArenaScope> scope_;
  FramePlan frames_;
  std::optional<ClipMaker> maker_;
  ItemResults* results_ = nullptr;  // of the engine, from the first batch on
  std::optional<ClipWriter> writer_;
};

// The table of ranks at the end of the log.
void print_clip_table(const ListReport& report);

}  // namespace weft
