// Training of text detectors: pictures with flags and thresholds for each pixel, three losses, SGD
// (docs/models/dbnet.md, Training).
#pragma once

#include "models/dbnet/dbnet.h"
#include "models/dbnet/train_options.h"
#include "nn/batch_norm.h"
#include "train/task.h"

namespace weft {

class DbnetTask : public TrainingTask {
 public:
  // Exit::usage where model.conv2_gain is not 1.
  explicit DbnetTask(const Deck& deck);

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  bool bf16() const override { return deck_.model.dtype == "bf16"; }
  std::vector<std::string> terms() const override;
  std::vector<TrainDeck> optimizers() const override;
  int model_groups() const override { return model_.params().groups(); }

  void check(std::span<const Bucket> buckets) override;
  void open(std::span<const Bucket> buckets) override { check(buckets); }
  // A backbone alone, or all of it, from the deck's file; the rest is drawn.
  std::string start_weights() override;
  void share_clips(Communicator* group) override;
  void join_ranks(MPI_Comm world) override;
  Communicator* inner_ranks() override { return all_.get(); }

  std::int64_t blocks(const Bucket&) const override { return model_.blocks(); }
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;
  // Of normalised pictures [N,1,H,W,3], flags and thresholds u8 [N,H,W] (ops/text_loss.h); the
  // terms are sums over the pictures. `weight` as in TrainingWork::Part.
  TrainingLoss loss(Tape& tape, const Tensor& images, const Tensor& flags, const Tensor& thresholds,
                    double recompute, float weight);
  // Each rank has statistics of its own; the running ones are averaged over the ranks, so that all
  // have and save the same.
  void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) override;

  ClipFacts facts(const Bucket&) override { return {.unit = "images"}; }

 private:
  const Deck& deck_;
  Dbnet model_;
  nn::BatchNormGroup norm_;
  std::unique_ptr<Communicator> all_;  // over which running statistics are averaged; null: none
};

}  // namespace weft
