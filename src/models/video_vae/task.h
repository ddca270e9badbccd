// Training Open-Sora's VAE: the stages of docs/models/video_vae.md, Training stages, as [vae_train]
// puts them together. Clips of pixels are shortened by draws of their own, so each is a part of its
// micro-batch (train/task.h).
#pragma once

#include <optional>

#include "core/philox.h"
#include "models/video_vae/options.h"
#include "models/video_vae/vae_loss.h"

namespace weft {

class VaeTask : public TrainingTask {
 public:
  // Exit::usage where [vae_train] asks for nothing that could be learnt.
  explicit VaeTask(const Deck& deck);

  VideoVae& model() { return vae_; }

  ParameterTable& params() override { return vae_.params(); }
  std::string describe() const override;
  bool bf16() const override { return deck_.get<VaeDeck>().dtype == "bf16"; }
  std::vector<std::string> terms() const override { return VaeLoss::names(); }
  // The discriminator has a learning rate of its own.
  std::vector<TrainDeck> optimizers() const override;
  // Also lays out what the losses need.
  void check(std::span<const Bucket> buckets) override;
  void open(std::span<const Bucket> buckets) override;
  // vae.weights may hold the 2D VAE alone: the temporal one then starts at random, as stage 1 does.
  std::string start_weights() override;
  void share_clips(Communicator* group) override;
  std::int64_t blocks(const Bucket& bucket) const override;
  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  double share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const override;
  TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                       double recompute, float weight) override;

  // Frames of a clip that the 2D VAE and LPIPS take at once.
  std::int64_t frames_at_once(const Bucket& bucket) const { return loss_->group(bucket.frames); }

  ClipFacts facts(const Bucket& bucket) override;

  // Reconstruction of whole clips: pixel, perceptual, kl and latent, of which the loss sums up
  // those that [vae_train] trains for.
  std::unique_ptr<ValidationSet> validation_set(const HeldOut& data) override;

  // LeCam's running averages follow the steps, and are the task's state.
  void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) override;
  std::string state() const override;
  void set_state(const std::string& text) override;

  // Frames of a clip of `frames` that sample `sample` trains with in that step: a function of
  // (seed, step, sample).
  std::int64_t frames_drawn(std::int64_t frames, std::int64_t step, SampleId sample) const;

 private:
  VaeSample make_sample(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                        std::int64_t index);
  // Frames `bytes` (undefined while planning) with noise of (seed, step, sample), of the two
  // posteriors by a purpose each.
  struct NoiseOf {
    Purpose spatial, temporal;
    std::uint64_t spatial_step, temporal_step;
    SampleId sample;
  };
  VaeSample sample_of(const Bucket& bucket, const Tensor& bytes, std::int64_t frames,
                      const NoiseOf& noise);

  const Deck& deck_;
  VideoVae vae_;
  std::optional<PatchGan> gan_;
  std::optional<Lpips> lpips_;
  std::unique_ptr<VaeLoss> loss_;
};

}  // namespace weft
