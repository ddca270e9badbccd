#include "models/stdit3/rectified_flow.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/philox.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "ops/loss.h"
#include "ops/random.h"

namespace weft {

ClipLatents stdit3_latents(const Deck& deck) {
  return {deck, deck.get<Stdit3Deck>().in_channels, std::make_unique<VideoVae>(deck.get<VaeDeck>()),
          Posterior::draw};
}

CaptionShape stdit3_captions(const Deck& deck) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  return {m.caption_channels, m.model_max_length,
          "model.caption_channels and model.model_max_length", m.class_dropout_prob};
}

// ---- Frame masks (docs/models/stdit3.md, Frame masks)

namespace {

// Numbers the draws in the order of use, so that a mask is a function of its stream.
struct Draws {
  Philox random;
  std::uint32_t next = 0;
  float unit() { return random.uniform(next++); }
  // Uniform in [low, high], both inclusive.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    if (high <= low) return low;
    return low + random.below(next++, static_cast<std::uint32_t>(high - low + 1));
  }
};

}  // namespace

bool masks_wanted(const MaskDeck& d) {
  return d.random + d.intepolate + d.quarter_random + d.quarter_head + d.quarter_tail +
             d.quarter_head_tail + d.image_random + d.image_head + d.image_tail +
             d.image_head_tail >
         0;
}

std::vector<std::uint8_t> draw_frame_mask(const MaskDeck& d, std::int64_t n, std::uint64_t seed,
                                          std::uint64_t step, std::uint64_t sample) {
  std::vector<std::uint8_t> mask(n, 1);
  if (n <= 1) return mask;
  Draws draws{Philox(seed, Purpose::frame_mask, step, sample)};
  enum Kind { random, every_second, at_random, head, tail, head_tail, identity };
  struct Row {
    double share;
    Kind kind;
    bool quarter;  // up to a quarter of the frames, else one
  };
  const Row rows[] = {
      {d.random, random, false},           {d.intepolate, every_second, false},
      {d.quarter_random, at_random, true}, {d.quarter_head, head, true},
      {d.quarter_tail, tail, true},        {d.quarter_head_tail, head_tail, true},
      {d.image_random, at_random, false},  {d.image_head, head, false},
      {d.image_tail, tail, false},         {d.image_head_tail, head_tail, false},
  };
  Kind kind = identity;
  bool quarter = false;
  // One draw against the running sum of the shares; beyond all of them there is no mask.
  double u = draws.unit(), sum = 0;
  for (const Row& r : rows) {
    sum += r.share;
    if (u < sum) {
      kind = r.kind;
      quarter = r.quarter;
      break;
    }
  }
  const std::int64_t k = quarter ? draws.integer(1, n / 4) : 1;
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    std::fill(mask.begin() + begin, mask.begin() + end, std::uint8_t{0});
  };
  switch (kind) {
    case identity:
      break;
    case random: {
      const float ratio = 0.1f + 0.8f * draws.unit();
      for (auto& m : mask) m = draws.unit() > ratio;
      break;
    }
    case every_second:
      for (std::int64_t f = draws.integer(0, 1); f < n; f += 2) mask[f] = 0;
      break;
    case at_random: {
      const std::int64_t begin = draws.integer(0, n - k);
      clear(begin, begin + k);
      break;
    }
    case head:
      clear(0, k);
      break;
    case tail:
      clear(n - k, n);
      break;
    case head_tail:
      clear(0, k);
      clear(n - k, n);
      break;
  }
  // Short clips can lose every frame: the loss needs one to denoise.
  if (std::none_of(mask.begin(), mask.end(), [](std::uint8_t m) { return m != 0; }))
    mask.back() = 1;
  return mask;
}

// ---- A micro-batch

namespace {

// Draw number of a block's Bernoulli within drop path.
bool dropped(std::uint64_t seed, std::int64_t step, SampleId sample, std::uint32_t element,
             double probability) {
  const Philox random(seed, Purpose::drop_path, static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(sample));
  return static_cast<double>(random.uniform(element)) < probability;
}

// A clip without a caption gets the null caption, and so does a dropped one, as long as its own.
Captions pack_clip_captions(const ClipCaptions& captions, std::int64_t L, std::int64_t tokens) {
  if (!captions.y.defined())
    return upload(pack_captions({}, L, std::ssize(captions.lengths), true), Tensor(), tokens);
  CaptionBatch packed;
  packed.offsets.push_back(0);
  for (std::size_t b = 0; b < captions.lengths.size(); ++b) {
    const std::int64_t length = captions.lengths[b] > 0 ? captions.lengths[b] : L;
    const bool null_caption = captions.lengths[b] == 0 || captions.dropped[b];
    for (std::int64_t l = 0; l < length; ++l)
      packed.index.push_back(
          static_cast<std::int32_t>(null_caption ? -1 - l : static_cast<std::int64_t>(b) * L + l));
    packed.offsets.push_back(static_cast<std::int32_t>(packed.index.size()));
  }
  return upload(packed, captions.y, tokens);
}

// Keep factors of drop path: linear from 0 at the first pair to drop_path at the last
// (docs/models/stdit3.md, Configuration).
Tensor drop_path_of(const Deck& deck, const LoadedBatch& clips) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  if (m.drop_path <= 0) return {};
  const std::int64_t B = std::ssize(clips.what.clips);
  Tensor factors = Tensor::empty({m.depth, 2, 2, B}, DType::f32);
  if (is_planned(clips)) return factors;
  std::vector<float> keep(factors.numel());
  for (std::int64_t site = 0; site < m.depth * 4; ++site) {
    const double p =
        m.depth > 1 ? m.drop_path * static_cast<double>(site / 4) / static_cast<double>(m.depth - 1)
                    : 0.0;
    for (std::int64_t b = 0; b < B; ++b)
      keep[site * B + b] = dropped(static_cast<std::uint64_t>(deck.run.seed), clips.step,
                                   clips.what.samples[b], static_cast<std::uint32_t>(site), p)
                               ? 0.0f
                               : static_cast<float>(1.0 / (1.0 - p));
  }
  factors.set(std::span<const float>(keep));
  return factors;
}

}  // namespace

TrainingBatch make_batch(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                         const Tensor& bytes, const TextFeatures* features,
                         const ClipLatents& latents) {
  const std::int64_t B = std::ssize(clips.what.clips);
  const auto seed = static_cast<std::uint64_t>(deck.run.seed);
  const auto step = static_cast<std::uint64_t>(clips.step);
  const ClipSize size{static_cast<double>(bucket.pixel_height),
                      static_cast<double>(bucket.pixel_width), bucket.pixel_frames};
  TrainingBatch t;
  NoisyClips made = make_clips(deck, bucket, clips, bytes, latents);
  t.x0 = std::move(made.x0);
  t.eps = std::move(made.eps);
  t.in.timestep = Tensor::empty({B}, DType::f32);
  t.in.fps = Tensor::empty({B}, DType::f32);
  t.in.height = size.height;
  t.in.width = size.width;
  const std::int64_t frames = t.x0.dim(2);
  if (masks_wanted(deck.get<MaskDeck>())) t.in.x_mask = Tensor::empty({B, frames}, DType::u8);
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  t.in.captions =
      pack_clip_captions(captions_of(deck, stdit3_captions(deck), bucket, clips, features),
                         m.model_max_length, count_tokens(t.x0, m.patch_size));
  t.in.drop_path = drop_path_of(deck, clips);
  if (is_planned(clips)) return t;

  // Every clip by draws of its own.
  std::vector<float> timestep, fps;
  std::vector<std::uint8_t> mask;
  for (std::int64_t b = 0; b < B; ++b) {
    const auto sample = static_cast<std::uint64_t>(clips.what.samples[b]);
    timestep.push_back(draw_timestep(deck.get<DiffusionDeck>(), size, seed, step, sample));
    fps.push_back(clips.info[b].fps);
    if (t.in.x_mask.defined()) {
      const auto drawn = draw_frame_mask(deck.get<MaskDeck>(), frames, seed, step, sample);
      mask.insert(mask.end(), drawn.begin(), drawn.end());
    }
  }
  t.in.timestep.set(std::span<const float>(timestep));
  t.in.fps.set(std::span<const float>(fps));
  if (t.in.x_mask.defined()) t.in.x_mask.set(std::span<const std::uint8_t>(mask));
  return t;
}

// ---- Timestep and loss

float draw_timestep(const DiffusionDeck& d, const ClipSize& size, std::uint64_t seed,
                    std::uint64_t step, std::uint64_t sample) {
  const double u = d.use_discrete_timesteps
                       ? Philox(seed, Purpose::timestep, step, sample)
                                 .below(0, static_cast<std::uint32_t>(d.num_timesteps)) /
                             static_cast<double>(d.num_timesteps)
                       : draw_level(d.sample_method, d.loc, d.scale, seed, step, sample);
  double tau = u * 1000.0;
  if (d.use_timestep_transform) tau = timestep_transform(tau, size, d.transform_scale);
  return static_cast<float>(tau);
}

Tensor flow_loss(Tape& tape, Stdit3& model, const Tensor& x0, const Tensor& eps, Stdit3Input in,
                 const Tensor& weight) {
  in.x = Tensor::empty(x0.shape(), DType::f32);
  ops::flow_interpolate(x0, eps, in.timestep, in.x_mask, in.x);
  const Var out = model.forward(tape, in);
  Tensor loss = Tensor::empty({x0.dim(0)}, DType::f32);
  ops::velocity_loss_forward(out->value, x0, eps, in.x_mask, loss);
  if (tape.recording()) {
    out->grad = Tensor::empty(out->value.shape(), DType::f32);
    ops::velocity_loss_backward(out->value, x0, eps, in.x_mask, weight, out->grad);
  }
  return loss;
}

}  // namespace weft
