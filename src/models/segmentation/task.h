// Training of segmentation models: batches of labelled images of any size, batch norm over the
// ranks, deep supervision, weights of classes, Dice and OHEM, SGD with a rate each for encoder and
// decoder
// (docs/models/segmentation.md, Training).
#pragma once

#include "models/image_task.h"
#include "models/segmentation/segmentation.h"

namespace weft {

class SegmentationTask : public ImageTask {
 public:
  explicit SegmentationTask(const Deck& deck);

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  std::vector<std::string> terms() const override;
  std::vector<TrainDeck> optimizers() const override;
  int model_groups() const override { return 4; }

  int lockstep_ranks(int ranks) const override { return static_cast<int>(together(ranks)); }
  void open(std::span<const Bucket> buckets) override;
  void join_ranks(MPI_Comm world, Communicator* whole) override;
  Communicator* inner_ranks() override { return ranks_.get(); }
  double blocked_seconds() const override { return norm_.blocked_seconds; }

  std::int64_t blocks(const Bucket&) const override { return model_.blocks(); }
  double share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;
  // The loss of normalised images [N,1,H,W,3] and labels u8 [N,h,w] (0 is ignored, v is class
  // v - 1); the terms are sums over the images. `weight` as in TrainingWork::Part. `class_weights`
  // f32 [classes].
  TrainingLoss loss(Tape& tape, const Tensor& images, const Tensor& labels,
                    const Segmentation::Dropout& drop, double recompute, float weight,
                    const Tensor& class_weights);
  // The weights of the classes, as a tensor of the current arena.
  Tensor class_weights() const;

  // Whose statistics the running ones are. Where a run goes on with ranks that share them, their
  // accumulators begin with what a rank alone had.
  std::string state() const override;
  void set_state(const std::string& text) override;

  // Mean IoU and accuracy of images as `weft evaluate` has them; the loss is 1 - mean IoU.
  std::unique_ptr<ValidationSet> validation_set(const HeldOut& data) override;

 private:
  void check(std::span<const Bucket> buckets) override;
  // ImageNet's encoder alone, or both parts; the rest is drawn.
  std::string load_start() override;
  double flops(std::int64_t height, std::int64_t width) const override {
    return model_.flops(height, width, true);
  }
  void check_labels(const Bucket& bucket, const LoadedBatch& clips) const;
  // How many of `ranks` ranks share statistics.
  std::int64_t together(int ranks) const;
  // f32 [images, channels]: 0, or 1 / (1 - p).
  Tensor dropout(const LoadedBatch& clips, std::int64_t channels, std::uint32_t stream) const;

  const SegmentationTrainDeck& train_;
  Segmentation model_;
  std::vector<float> class_weights_;
  std::unique_ptr<Communicator> ranks_;  // that share the statistics of batch norm; null: none
};

}  // namespace weft
