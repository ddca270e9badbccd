// Training Wan by flow matching, on latents (docs/models/wan.md, Training).
#pragma once

#include "models/video_task.h"
#include "models/wan/dit.h"
#include "models/wan/options.h"

namespace weft {

// The noise level sigma in [0, 1] that sample `sample` trains at in step `step`: a function of
// (seed, step, sample). Drawn again until it is in diffusion.noise_range; where a thousand draws
// are not, scaled into it.
double draw_sigma(const WanDiffusionDeck& d, std::uint64_t seed, std::uint64_t step,
                  std::uint64_t sample);

// The factor of the loss at that level (diffusion.weighting).
double sigma_weight(const WanDiffusionDeck& d, double sigma);

// Loss of each sample, f32 [B]: factor[b] times the mean of (v - (eps - x0))^2 at
//   x = (1 - sigma) x0 + sigma eps, sigma = in.timestep / 1000,
// over the frames that in.x_mask does not give; those are x0 in x.
// `factors` f32 [B] or undefined (1). in.x is made here. When the tape records, the gradient of
// weight * sum(loss), weight f32 [1], waits in the tape, and tape.backward() sends it to the
// parameters.
Tensor wan_loss(Tape& tape, Wan& model, const Tensor& x0, const Tensor& eps, WanInput in,
                const Tensor& factors, const Tensor& weight);

class WanTask : public VideoTask {
 public:
  explicit WanTask(const Deck& deck);

  Wan& model() override { return model_; }
  const Wan& model() const override { return model_; }
  const nn::SequenceGroup& sequence_group() const override { return model_.sequence_group(); }
  std::string describe() const override;
  std::vector<std::string> blocks_named() const override { return {"blocks."}; }
  std::int64_t blocks(const Bucket&) const override { return deck_.get<WanDeck>().depth; }
  std::pair<double, double> noise_range() const override {
    const std::vector<double>& range = deck_.get<WanDiffusionDeck>().noise_range;
    return {range[0], range[1]};
  }

 protected:
  Flow make_flow(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                 double recompute, bool held_out) override;

 private:
  NoisyClips without_condition(const NoisyClips& all, WanInput& in) const;
  void give_first_frames(const LoadedBatch& clips, const Tensor& x0, WanInput& in) const;

  Wan model_;
};

}  // namespace weft
