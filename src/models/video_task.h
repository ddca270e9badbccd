// What trainings of denoisers share (a model adds its network, its micro-batch and its loss):
// latents and captions from clips, weights or a base with adapters to start from, and the loss of
// held-out clips.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/adapter.h"
#include "models/interfaces.h"
#include "models/video_training.h"
#include "nn/exchange.h"
#include "train/task.h"

namespace weft {

class VideoTask : public TrainingTask {
 public:
  // The network, which the task of the model has.
  virtual Denoiser& model() = 0;
  virtual const Denoiser& model() const = 0;
  virtual const nn::SequenceGroup& sequence_group() const { return alone_; }

  const ClipLatents& latents() const { return latents_; }

  ParameterTable& params() override { return model().params(); }
  bool bf16() const override { return holds_bf16(deck_.model.dtype); }
  std::vector<TrainDeck> optimizers() const override { return {deck_.train}; }
  void check(std::span<const Bucket> buckets) override;
  void open(std::span<const Bucket> buckets) override;
  std::string start_weights() override;
  // What the checkpoints of a training of adapters say of the base, which a restart reads again.
  // Exit::data if it is another.
  std::string state() const override;
  void set_state(const std::string& text) override;
  void share_clips(Communicator* group) override;
  void join_ranks(MPI_Comm world, Communicator*) override { world_ = world; }
  double blocked_seconds() const override { return sequence_group().blocked_seconds; }
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  double cost_of_micro_batch() const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;
  ClipFacts facts(const Bucket& bucket) override;

  std::unique_ptr<ValidationSet> validation_set(const HeldOut& data) override;
  // Levels of noise that it trains at, lowest and highest.
  virtual std::pair<double, double> noise_range() const { return {0, 1}; }
  // f32 [validation.timesteps]: the loss of one held-out clip at k / (timesteps + 1) of that range,
  // k = 1, 2, ..., as Open-Sora's eval_loss. Without what is random in training alone; its noise is
  // a function of (seed, k, sample).
  Tensor held_out_losses(const Bucket& bucket, const LoadedBatch& clip, const Tensor& bytes);

 protected:
  VideoTask(const Deck& deck, ClipLatents latents, CaptionShape captions,
            std::vector<std::int64_t> patch);

  // A micro-batch and its loss. The loss reads `eps` and `timestep` when it is called.
  struct Flow {
    Tensor x0, eps;   // f32 [B,C,T,H,W]
    Tensor timestep;  // f32 [B], in [0, 1000]
    std::string key;  // as TrainingWork::key
    // f32 [B]; when the tape records, the gradient of weight * sum(loss), weight f32 [1], waits in
    // it.
    std::function<Tensor(Tape& tape, const Tensor& weight)> loss;
  };
  // As prepare(). `held_out`: without dropped captions, masks and weights of the loss; the noise
  // and the timestep are set by the caller.
  virtual Flow make_flow(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                         double recompute, bool held_out) = 0;

  const CaptionShape& captions() const { return captions_; }
  const TextFeatures* features() const { return features_.get(); }
  bool trains_adapters() const;

  const Deck& deck_;

 private:
  void check_text(const Bucket& bucket, const Bucket& first) const;
  std::string load_base();

  nn::SequenceGroup alone_;
  Communicator* group_ = nullptr;
  std::unique_ptr<TextFeatures> features_;
  ClipLatents latents_;
  CaptionShape captions_;
  std::vector<std::int64_t> patch_;
  AdapterFacts adapters_;  // once the base is loaded
  MPI_Comm world_ = MPI_COMM_SELF;
};

}  // namespace weft
