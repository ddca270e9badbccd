// Training STDiT3 by rectified flow, on pixels or on latents.
#pragma once

#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "models/stdit3/stdit3.h"
#include "train/task.h"

namespace weft {

class Stdit3Task : public TrainingTask {
 public:
  explicit Stdit3Task(const Deck& deck);

  Stdit3& model() { return model_; }
  const ClipLatents& latents() const { return latents_; }
  // Exit::usage unless the model can train on such clips, their tokens shared by `sp` ranks.
  void check(const Bucket& bucket, int sp) const;

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  bool bf16() const override { return deck_.model.dtype == "bf16"; }
  std::vector<TrainDeck> optimizers() const override { return {deck_.train}; }
  void open(std::span<const Bucket> buckets) override;
  std::string start_weights() override;
  void share_clips(Communicator* group) override;
  double blocked_seconds() const override { return model_.sequence_group().blocked_seconds; }
  std::int64_t blocks(const Bucket&) const override { return 2 * deck_.get<Stdit3Deck>().depth; }
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  double cost_of_micro_batch() const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;

  // By closed formulas (models/stdit3/cost.h), or measured with one and two pairs of blocks.
  void check_plan(std::span<const Bucket> buckets, bool local) override;
  std::size_t other_weights() const override;
  double bytes_beside_clip() const override;
  std::string unit() const override { return "tokens"; }
  std::int64_t units(const Bucket& bucket, std::int64_t clips) override;
  std::vector<BucketSchedule> schedule(std::span<const Bucket> buckets) override;
  std::vector<MicroBatchCost> costs(const PlannedWork& work, const Rates& rates,
                                    double link_bandwidth) override;
  MeasuredWork measure(const PlannedWork& work, MPI_Comm world) override;

 private:
  void check_text(const Bucket& bucket, const Bucket& first) const;

  const Deck& deck_;
  Stdit3 model_;
  Communicator* group_ = nullptr;
  std::unique_ptr<TextFeatures> features_;
  ClipLatents latents_;
  bool encodes_ = false;  // pixels to latents while training; known from check_plan() on
};

}  // namespace weft
