// From loaded clips to the tensors of one training micro-batch. Everything random is a function of
// (seed, step, sample id), so any rank makes the same batch of the same samples.
#pragma once

#include <optional>

#include "data/prefetch.h"
#include "models/stdit3/clip_latents.h"
#include "models/stdit3/rectified_flow.h"
#include "models/stdit3/text_features.h"

namespace weft {

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
