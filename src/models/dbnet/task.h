// Training of text detectors: pictures with flags and thresholds for each pixel, three losses, SGD
// (docs/models/dbnet.md, Training).
#pragma once

#include "models/dbnet/dbnet.h"
#include "models/image_task.h"

namespace weft {

class DbnetTask : public ImageTask {
 public:
  // Exit::usage where model.conv2_gain is not 1.
  explicit DbnetTask(const Deck& deck);

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  std::vector<std::string> terms() const override;
  std::vector<TrainDeck> optimizers() const override;

  std::int64_t blocks(const Bucket&) const override { return model_.blocks(); }
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;
  // The loss of normalised pictures [N,1,H,W,3], flags and thresholds u8 [N,H,W] (ops/loss.h); the
  // terms are sums over the pictures. `weight` as in TrainingWork::Part.
  TrainingLoss loss(Tape& tape, const Tensor& images, const Tensor& flags, const Tensor& thresholds,
                    double recompute, float weight);

  // Hmean, precision and recall of pictures as `weft evaluate` has them at
  // postprocess.min_text_score; the loss is 1 - Hmean.
  std::unique_ptr<ValidationSet> validation_set(const HeldOut& data) override;

 private:
  void check(std::span<const Bucket> buckets) override;
  // A backbone alone, or all of it; the rest is drawn.
  std::string load_start() override;
  double flops(std::int64_t height, std::int64_t width) const override {
    return model_.flops(height, width, true);
  }

  Dbnet model_;
};

}  // namespace weft
