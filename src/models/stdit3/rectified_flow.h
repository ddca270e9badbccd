// What a micro-batch of STDiT3's training has besides latents and captions
// (models/video_training.h), timesteps and frame masks, and the loss of rectified flow
// (docs/models/stdit3.md, Rectified flow; opensora/schedulers/rf at v1.2.0). Its sampler is
// models/flow_sampler.h. Everything random is a function of (seed, step, sample id), so any rank
// makes the same batch of the same samples.
#pragma once

#include <span>

#include "config/deck.h"
#include "data/clip_source.h"
#include "data/prefetch.h"
#include "models/flow_sampler.h"
#include "models/stdit3/options.h"
#include "models/stdit3/stdit3.h"
#include "models/video_training.h"

namespace weft {

// How STDiT3 sees clips (models/video_training.h): with latents of the VAE it draws from
// posteriors.
ClipLatents stdit3_latents(const Deck& deck);
CaptionShape stdit3_captions(const Deck& deck);

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

struct TrainingBatch {
  Tensor x0, eps;  // f32 [B,C,T,H,W]
  Stdit3Input in;  // all but x
};

// `bytes` u8 holds the clips on this rank's device (train/step_work.h). Captions come with the
// clips if their bucket has text features, or from `features` if the deck names any, else every
// caption is the null caption. While planning, `clips` holds nothing but its number of clips,
// `bytes` is undefined and `features` is not asked.
TrainingBatch make_batch(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                         const Tensor& bytes, const TextFeatures* features,
                         const ClipLatents& latents);

}  // namespace weft
