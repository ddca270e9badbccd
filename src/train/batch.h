// From loaded clips to the tensors of one training micro-batch. Everything random is a function of
// (seed, step, sample id), so any rank makes the same batch of the same samples.
#pragma once

#include <optional>

#include "data/prefetch.h"
#include "diffusion/rectified_flow.h"
#include "train/text_features.h"

namespace weft {

struct TrainingBatch {
  Tensor x0, eps;  // f32 [B,C,T,H,W]
  Stdit3Input in;  // all but x
};

// Pixel clips need in_channels = 3, latent clips as many channels as the model; Exit::usage otherwise.
void check_bucket_fits(const Bucket& bucket, const ModelDeck& model);

// `bytes` u8 holds the clips on this rank's device (train/clip_staging.h). Captions come from `features` if the deck names
// any, else every caption is the null caption. While planning, `clips` holds nothing but its number of clips, `bytes` is
// undefined and `features` is not asked.
TrainingBatch make_batch(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                         const Tensor& bytes, const TextFeatures* features);

}  // namespace weft
