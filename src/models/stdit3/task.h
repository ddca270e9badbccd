// Training STDiT3 by rectified flow, on pixels or on latents.
#pragma once

#include "checkpoint/adapter.h"
#include "models/lora.h"
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

  ParameterTable& params() override { return model_.params(); }
  std::string describe() const override;
  bool bf16() const override { return deck_.model.dtype == "bf16"; }
  std::vector<TrainDeck> optimizers() const override { return {deck_.train}; }
  void check(std::span<const Bucket> buckets) override;
  void open(std::span<const Bucket> buckets) override;
  std::string start_weights() override;
  // Of a training of adapters: what its checkpoints say of the base, which a restart reads again.
  // Exit::data if it is another.
  std::string state() const override;
  void set_state(const std::string& text) override;
  void share_clips(Communicator* group) override;
  double blocked_seconds() const override { return model_.sequence_group().blocked_seconds; }
  std::vector<std::string> blocks_named() const override {
    return {"spatial_blocks.", "temporal_blocks."};
  }
  std::int64_t blocks(const Bucket&) const override { return 2 * deck_.get<Stdit3Deck>().depth; }
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  double cost_of_micro_batch() const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;

  ClipFacts facts(const Bucket& bucket) override;

  std::unique_ptr<ValidationSet> validation_set(const HeldOut& data) override;
  // f32 [validation.timesteps]: the loss of one held-out clip at t = 1000 k / (timesteps + 1), k =
  // 1, 2, ..., as Open-Sora's eval_loss. Without dropped captions, drop path and frame masks; its
  // noise is a function of (seed, k, sample).
  Tensor held_out_losses(const Bucket& bucket, const LoadedBatch& clip, const Tensor& bytes);

 private:
  void check_text(const Bucket& bucket, const Bucket& first) const;
  bool trains_adapters() const { return deck_.get<LoraDeck>().on(); }
  std::string load_base();

  const Deck& deck_;
  Deck held_out_deck_;  // without what is random in training alone
  Stdit3 model_;
  Communicator* group_ = nullptr;
  std::unique_ptr<TextFeatures> features_;
  ClipLatents latents_;
  AdapterFacts adapters_;  // once the base is loaded
};

}  // namespace weft
