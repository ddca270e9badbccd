// The training loss of rectified flow (docs/models/stdit3.md, Rectified flow;
// opensora/schedulers/rf at v1.2.0); its sampler is models/flow_sampler.h.
#pragma once

#include "models/flow_sampler.h"
#include "models/stdit3/options.h"
#include "models/stdit3/stdit3.h"

namespace weft {

// The timestep that sample `sample` trains at in step `step`: a function of (seed, step, sample).
float draw_timestep(const DiffusionDeck& d, const ClipSize& size, std::uint64_t seed,
                    std::uint64_t step, std::uint64_t sample);

// The frame mask of a sample, 1 = denoise (docs/models/stdit3.md, Frame masks): n latent frames,
// never all 0. Short clips on which the original fails (quarter masks below 4 frames,
// image_head_tail of 2) keep one frame to denoise.
std::vector<std::uint8_t> draw_frame_mask(const MaskDeck& d, std::int64_t n, std::uint64_t seed,
                                          std::uint64_t step, std::uint64_t sample);
bool masks_wanted(const MaskDeck& d);

// Loss of each sample, f32 [B]: mean squared error of the velocity over the frames to denoise
// (Training loss). in.timestep and in.x_mask are set; in.x is made here. When the tape records, the
// gradient of weight * sum(loss), weight f32 [1], waits in the tape, and tape.backward() sends it
// to the parameters.
Tensor flow_loss(Tape& tape, Stdit3& model, const Tensor& x0, const Tensor& eps, Stdit3Input in,
                 const Tensor& weight);

}  // namespace weft
