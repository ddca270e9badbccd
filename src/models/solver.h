// How a sampler gets from noise to a clip: the times of its steps, and a step by the velocity
// there. Knows no model; guidance and the steps' loop are in models/flow_sampler.h.
//
//   euler   z += (x0 - eps) dt: first order
//   dpm++   DPM-Solver++ (2M, midpoint; arXiv 2211.01095): second order
//   unipc   UniPC (bh2, order 2, predicts x0; arXiv 2302.04867): a predictor of second order, and a
//           corrector that makes use of each velocity once more
//
// The formulas and where they come from: docs/generate.md, Solvers.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace weft {

struct DiffusionDeck;
struct SamplerDeck;
struct ClipSize;

// The times of K steps. sigma is the share of noise: 1 is noise, 0 is data.
struct SamplerTimes {
  std::vector<double> timestep;  // [K], what the network gets, in [0, 1000]
  std::vector<double> sigma;     // [K+1], rounded to f32; the last is 0
};
// With sampler.shift, Wan's tables: sigma = shift u / (1 + (shift - 1) u), for dpm++ and unipc with
// whole timesteps, and for unipc from u = 0.999 on. Without it STDiT3's, moved by the clip's size.
// Exit::usage where there are so many steps that two have the same sigma, which dpm++ and unipc
// cannot take.
SamplerTimes sampler_times(const SamplerDeck& sampler, const DiffusionDeck& diffusion,
                           const ClipSize& size);

// The next sample as a sum: coefficients of the sample, and of the data that the steps i, i - 1 and
// i - 2 predict (x0).
struct StepSum {
  double sample = 0;
  std::array<double, 3> data = {};
};
// dpm++ from step i to i + 1.
StepSum dpm_step(const std::vector<double>& sigma, std::int64_t i);
// unipc from step i to i + 1, of the corrected sample.
StepSum unipc_predictor(const std::vector<double>& sigma, std::int64_t i);
// unipc's sample at step i > 0, from the corrected one at i - 1.
StepSum unipc_corrector(const std::vector<double>& sigma, std::int64_t i);

// Steps of one batch, in the arena that is current at construction.
class Solver {
 public:
  // `times` [B] of the samples of z f32 [B,C,T,h,w]. The name is sampler.solver's.
  Solver(const std::string& name, std::vector<SamplerTimes> times, const Tensor& z);

  // z at step i to z at step i + 1; steps come in order. velocity f32, like z: x0 - eps. Frames
  // with active 0, u8 [B,T], stay; undefined: none does.
  void step(std::int64_t i, const Tensor& velocity, const Tensor& active, Tensor& z);

 private:
  void sum(const StepSum& of, std::int64_t b, const Tensor& sample);

  enum class Kind { euler, dpm, unipc } kind_;
  std::vector<SamplerTimes> times_;
  Tensor next_;                 // the sample that is made
  Tensor corrected_;            // unipc: of the step before
  std::array<Tensor, 3> data_;  // x0 of this step and the two before
  Tensor whole_;                // f32 [B], 1000: the whole way, for ops::flow_interpolate
};

}  // namespace weft
