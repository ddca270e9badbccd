// Training of segmentation models: batches of labelled images of any size, batch norm over the
// ranks, deep supervision, SGD with a rate each for encoder and decoder
// (docs/models/segmentation.md, Training).
#pragma once

#include "models/segmentation/segmentation.h"
#include "models/segmentation/train_options.h"
#include "nn/batch_norm.h"
#include "train/task.h"

namespace weft {

class SegmentationTask : public TrainingTask {
 public:
  explicit SegmentationTask(const Deck& deck);

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  bool bf16() const override { return deck_.model.dtype == "bf16"; }
  std::vector<std::string> terms() const override;
  std::vector<TrainDeck> optimizers() const override;
  int model_groups() const override { return 4; }

  void check(std::span<const Bucket> buckets) override;
  void open(std::span<const Bucket> buckets) override { check(buckets); }
  // ImageNet's encoder alone, or both parts, from the deck's files; the rest is drawn.
  std::string start_weights() override;
  void share_clips(Communicator* group) override;
  int lockstep_ranks(int ranks) const override { return static_cast<int>(together(ranks)); }
  void join_ranks(MPI_Comm world) override;
  Communicator* inner_ranks() override { return ranks_.get(); }
  double blocked_seconds() const override { return norm_.blocked_seconds; }

  std::int64_t blocks(const Bucket&) const override { return model_.blocks(); }
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  double share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;
  // Of normalised images [N,1,H,W,3] and labels u8 [N,h,w] (0 is ignored, v is class v - 1); the
  // terms are sums over the images. `weight` as in TrainingWork::Part.
  TrainingLoss loss(Tape& tape, const Tensor& images, const Tensor& labels,
                    const Segmentation::Dropout& drop, double recompute, float weight);
  // Running statistics that the ranks do not share are averaged over them, so that all ranks have
  // and save the same.
  void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) override;

  // Whose statistics the running ones are. Where a run goes on with ranks that share them, their
  // accumulators begin with what a rank alone had.
  std::string state() const override;
  void set_state(const std::string& text) override;

  ClipFacts facts(const Bucket&) override { return {.unit = "images"}; }

 private:
  void check_labels(const Bucket& bucket, const LoadedBatch& clips) const;
  // Of `ranks`, those that share statistics.
  std::int64_t together(int ranks) const;
  // f32 [images, channels]: 0, or 1 / (1 - p).
  Tensor dropout(const LoadedBatch& clips, std::int64_t channels, std::uint32_t stream) const;

  const Deck& deck_;
  const SegmentationTrainDeck& train_;
  Segmentation model_;
  nn::BatchNormGroup norm_;
  std::unique_ptr<Communicator> ranks_;  // that share the statistics of batch norm; null: none
  std::unique_ptr<Communicator> all_;    // over which running statistics are averaged; null: none
};

}  // namespace weft
