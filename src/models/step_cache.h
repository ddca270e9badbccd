// A step cache: in steps where the velocity would hardly differ from that of the step before, most
// of the model's work is left out. Which steps these are, the sample itself decides, by one of two
// published rules (docs/generate.md, Step cache):
//
//   teacache   TeaCache (arXiv 2411.19108), for models with a signal (Denoiser::cache_signal): the
//              relative change of the first block's modulated input, through the model's published
//              polynomial, is added up; while the sum is below the threshold, the blocks add what
//              they added last
//   easycache  EasyCache (arXiv 2507.02860), for any model: the relative change of the velocity is
//              predicted from that of the sample, by the ratio that was last seen; while the sum of
//              these is below the threshold, eps - x0 - x stays as it was last
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "models/interfaces.h"
#include "tensor/tensor.h"

namespace weft {

struct SamplerDeck;

// Exit::usage for a rule that the model has nothing for.
void check_cache(const SamplerDeck& sampler, const Denoiser& model);

class StepCache {
 public:
  // For one run of the sampler over z f32 [B,C,T,h,w], in the arena that is current. `agree` gives
  // the first rank's number on all ranks that sample together, which must skip the same steps;
  // empty: alone. check_cache() has passed.
  StepCache(const SamplerDeck& sampler, Denoiser& model, const Tensor& z,
            std::function<double(double)> agree);

  // The guided velocity of the next step, like z; `in` is that of the guided batch, both halves
  // with z. `whole`: without skipping, since frames have joined, or another expert makes it.
  void velocity(DenoiserInput& in, bool whole, Tensor& v);
  // Steps so far in which the blocks were not run.
  std::int64_t skipped() const { return skipped_; }

 private:
  bool skip(const DenoiserInput& in, bool whole);
  void run(DenoiserInput& in, Tensor& v);

  Denoiser& model_;
  const std::function<double(double)> agree_;
  const bool tea_;
  const double threshold_;
  const float guidance_;
  const std::int64_t steps_;
  std::int64_t step_ = 0, skipped_ = 0;
  double sum_ = 0;  // of the changes since the blocks were run last

  Tensor ones_;             // f32 [B]
  Tensor signal_, blocks_;  // teacache: of the step before; of the last step that ran
  // easycache, f32 like z: the sample of the step before; of the last step that ran its sample, its
  // velocity of the captions alone, and guided.
  Tensor before_, sample_, captions_, guided_;
  double ratio_ = -1;  // of the changes of velocity and sample between the last two that ran
};

// v f32 [B,C,T,h,w] = vu + guidance (vc - vu), of the first C channels of out [2B,Co,T,h,w].
// `ones` f32 [B].
void guided_velocity(const Tensor& out, float guidance, const Tensor& ones, Tensor& v);

}  // namespace weft
