#include "models/stdit3/rectified_flow.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {

// ---- Latents

namespace {

// Factors and terms that turn a drawn latent into the model's input (docs/models/video_vae.md,
// Scaling and normalisation).
Tensor normalising(const Bucket& bucket) {
  const std::size_t C = bucket.scale.size();
  std::vector<float> both(2 * C);
  for (std::size_t c = 0; c < C; ++c) {
    both[c] = 1.0f / bucket.scale[c];
    both[C + c] = -bucket.shift[c] / bucket.scale[c];
  }
  return Tensor::from_host(std::span<const float>(both), {2, static_cast<std::int64_t>(C)});
}

}  // namespace

ClipLatents::ClipLatents(const Deck& deck)
    : deck_(deck), seed_(static_cast<std::uint64_t>(deck.run.seed)) {
  if (deck.get<Stdit3Deck>().in_channels == TemporalVae::latent_channels &&
      !deck.get<VaeDeck>().weights.empty())
    vae_ = std::make_unique<VideoVae>(deck.get<VaeDeck>());
}

void ClipLatents::check(const Bucket& bucket) const {
  const std::int64_t channels = deck_.get<Stdit3Deck>().in_channels, has = seen(bucket).channels;
  const bool pixels = bucket.dtype == DType::u8, latents = channels == TemporalVae::latent_channels;
  WEFT_CHECK(
      has == channels, Exit::usage,
      !pixels   ? "set model.in_channels to the latents' channels"
      : latents ? "make latents with `weft encode`, or name a VAE with vae.weights to encode while "
                  "training"
                : "training on pixels needs model.in_channels = 3",
      "bucket {} has {} channels, model.in_channels = {}", bucket.name, has, channels);
  WEFT_CHECK(!encodes(bucket) || !deck_.get<VaeDeck>().scale.empty(), Exit::usage,
             "take the values that weft encode or weft reconstruct prints, or train on what weft "
             "encode stores",
             "vae.scale is empty: latents that are encoded while training cannot be normalised");
}

void ClipLatents::load(std::span<const Bucket> buckets) {
  const bool wanted =
      std::any_of(buckets.begin(), buckets.end(), [this](const Bucket& b) { return encodes(b); });
  if (!wanted) return;
  vae_->params().allocate_for_inference(deck_.get<VaeDeck>().dtype == "bf16");
  load_weights(deck_.get<VaeDeck>().weights, vae_->params(), vae_weight_names());
}

std::size_t ClipLatents::weight_bytes() const {
  return vae_ ? vae_->params().inference_bytes(deck_.get<VaeDeck>().dtype == "bf16") : 0;
}

Bucket ClipLatents::seen(const Bucket& bucket) const {
  Bucket b = bucket;
  b.channels = bucket.model_channels();
  if (!encodes(bucket)) return b;
  b.channels = TemporalVae::latent_channels;
  b.frames = vae_->latent_frames(bucket.frames);
  b.height = bucket.height / vae_->pixels_a_latent();
  b.width = bucket.width / vae_->pixels_a_latent();
  return b;
}

void ClipLatents::make(const Bucket& bucket, const Tensor& clip, std::uint64_t step,
                       std::uint64_t sample, Tensor& x0) const {
  const Shape stored{bucket.channels, bucket.frames, bucket.height, bucket.width};
  const bool encode = encodes(bucket);
  // 1. Pixels that the model trains on directly, or stored latents: only converted.
  if (bucket.dtype == DType::u8 && !encode) {
    if (clip.defined())
      ops::frames_to_latent(clip.view({stored[1], stored[2], stored[3], stored[0]}), x0);
    return;
  }
  const auto as_stored = [&](DType dtype) {
    return Tensor::borrow(clip.raw(), stored, dtype, clip.device());
  };
  if (!encode && !bucket.moments) {
    if (clip.defined()) ops::convert(as_stored(bucket.dtype), x0);
    return;
  }

  // 2. Moments: from the VAE, or as stored.
  Tensor moments;
  if (encode) {
    const VideoVae::Noise noise{seed_, sample};
    moments = vae_->encode_moments(
        bucket.frames, bucket.height, bucket.width,
        [&](std::int64_t first, std::int64_t count) {
          return pixel_frames(clip, first, count, bucket.height, bucket.width);
        },
        &noise);
  } else if (bucket.dtype == DType::f32) {
    if (clip.defined()) moments = as_stored(DType::f32);
  } else {
    moments = Tensor::empty(stored, DType::f32);
    if (clip.defined()) ops::convert(as_stored(DType::f16), moments);
  }
  // 3. A latent drawn from them, normalised.
  const Shape one{1, x0.dim(0), x0.dim(1), x0.dim(2), x0.dim(3)};
  Tensor eps = Tensor::empty(one, DType::f32), z = x0.view(one);
  const Tensor affine = encode ? vae_->normalised() : normalising(bucket);
  if (!clip.defined()) return;  // planning: everything that takes memory is allocated by now
  ops::fill_normal(seed_, static_cast<int>(Purpose::latent), step, sample, eps);
  ops::posterior_draw_forward(moments.view({1, 2 * one[1], one[2], one[3], one[4]}), eps, affine,
                              ops::Channels::first, z);
}

// ---- Captions

TextFeatures::TextFeatures(const std::filesystem::path& path, std::int64_t clips,
                           std::int64_t channels, std::int64_t max_length)
    : file_(SafetensorsFile::open(path)) {
  for (std::int64_t i = 0; i < clips; ++i) {
    const SafetensorEntry& e = entry(i);
    const bool fits = e.shape.size() == 2 && e.shape[1] == channels && e.shape[0] >= 1 &&
                      e.shape[0] <= max_length;
    WEFT_CHECK(fits, Exit::data,
               "features must match model.caption_channels and model.model_max_length",
               "{}: caption {} has shape [{}], expected [1..{}, {}]", path.string(), i,
               fmt::join(e.shape, ", "), max_length, channels);
  }
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

// Draw number of a caption's or a block's Bernoulli within its own purpose.
bool dropped(std::uint64_t seed, Purpose purpose, std::int64_t step, SampleId sample,
             std::uint32_t element, double probability) {
  const Philox random(seed, purpose, static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(sample));
  return static_cast<double>(random.uniform(element)) < probability;
}

// A dry run asks for the largest batch of that many clips: nothing is known of its samples.
bool planned(const LoadedBatch& clips) { return clips.what.samples.empty(); }

// The captions of a batch of clips with `tokens` tokens in all: from the store, from `features`, or
// the null caption.
Captions captions_of(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                     const TextFeatures* features, std::int64_t tokens) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  const std::int64_t B = std::ssize(clips.what.clips), L = m.model_max_length;
  const Shape shape{B, L, m.caption_channels};
  const bool in_store = bucket.text_channels > 0 && (planned(clips) || !clips.text.empty());
  if (!in_store && deck.data.text_features.empty())
    return upload(pack_captions({}, L, B, true), Tensor(), tokens);
  if (planned(clips))
    return upload(pack_captions({}, L, B, false), Tensor::empty(shape, DType::f32), tokens);

  CaptionBatch packed;
  std::vector<float> y(shape.numel());
  packed.offsets.push_back(0);
  for (std::int64_t b = 0; b < B; ++b) {
    const auto clip = static_cast<std::size_t>(b);
    const SampleId sample = clips.what.samples[clip];
    std::vector<float> read;
    if (!in_store) read = features->read(sample);
    const std::vector<float>& rows = in_store ? clips.text[clip] : read;
    // A clip without a caption has no rows, and gets the null caption.
    const std::int64_t length = rows.empty() ? L : std::ssize(rows) / m.caption_channels;
    const bool null_caption =
        rows.empty() || dropped(static_cast<std::uint64_t>(deck.run.seed), Purpose::caption_drop,
                                clips.step, sample, 0, m.class_dropout_prob);
    if (!null_caption) std::copy(rows.begin(), rows.end(), y.begin() + b * L * m.caption_channels);
    for (std::int64_t l = 0; l < length; ++l)
      packed.index.push_back(static_cast<std::int32_t>(null_caption ? -1 - l : b * L + l));
    packed.offsets.push_back(static_cast<std::int32_t>(packed.index.size()));
  }
  return upload(packed, Tensor::from_host(std::span<const float>(y), shape), tokens);
}

// Keep factors of drop path: linear from 0 at the first pair to drop_path at the last
// (docs/models/stdit3.md, Configuration).
Tensor drop_path_of(const Deck& deck, const LoadedBatch& clips) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  if (m.drop_path <= 0) return {};
  const std::int64_t B = std::ssize(clips.what.clips);
  Tensor factors = Tensor::empty({m.depth, 2, 2, B}, DType::f32);
  if (planned(clips)) return factors;
  std::vector<float> keep(factors.numel());
  for (std::int64_t site = 0; site < m.depth * 4; ++site) {
    const double p =
        m.depth > 1 ? m.drop_path * static_cast<double>(site / 4) / static_cast<double>(m.depth - 1)
                    : 0.0;
    for (std::int64_t b = 0; b < B; ++b)
      keep[site * B + b] =
          dropped(static_cast<std::uint64_t>(deck.run.seed), Purpose::drop_path, clips.step,
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
  const Bucket seen = latents.seen(bucket);
  const Shape shape{B, seen.channels, seen.frames, seen.height, seen.width};
  const Shape one{shape[1], shape[2], shape[3], shape[4]};
  TrainingBatch t;
  t.x0 = Tensor::empty(shape, DType::f32);
  t.eps = Tensor::empty(shape, DType::f32);
  t.in.timestep = Tensor::empty({B}, DType::f32);
  t.in.fps = Tensor::empty({B}, DType::f32);
  t.in.height = size.height;
  t.in.width = size.width;
  if (masks_wanted(deck.get<MaskDeck>())) t.in.x_mask = Tensor::empty({B, seen.frames}, DType::u8);
  const auto& p = deck.get<Stdit3Deck>().patch_size;
  std::int64_t tokens = B;
  for (std::size_t i = 0; i < 3; ++i) tokens *= (shape[i + 2] + p[i] - 1) / p[i];
  t.in.captions = captions_of(deck, bucket, clips, features, tokens);
  t.in.drop_path = drop_path_of(deck, clips);
  if (planned(clips)) {
    // Clips are made one after the other, so one shows the peak of memory for all.
    Tensor x0 = t.x0.slice(0, 1).view(one);
    latents.make(bucket, Tensor(), step, 0, x0);
    return t;
  }

  // Every clip by draws of its own.
  std::vector<float> timestep, fps;
  std::vector<std::uint8_t> mask;
  const auto clip_bytes = static_cast<std::int64_t>(bucket.clip_bytes());
  for (std::int64_t b = 0; b < B; ++b) {
    const auto sample = static_cast<std::uint64_t>(clips.what.samples[b]);
    Tensor x0 = t.x0.slice(b, b + 1).view(one);
    Tensor eps = t.eps.slice(b, b + 1);
    latents.make(bucket, bytes.slice(b * clip_bytes, (b + 1) * clip_bytes), step, sample, x0);
    ops::fill_normal(seed, static_cast<int>(Purpose::noise), step, sample, eps);
    timestep.push_back(draw_timestep(deck.get<DiffusionDeck>(), size, seed, step, sample));
    fps.push_back(clips.info[b].fps);
    if (t.in.x_mask.defined()) {
      const auto frames = draw_frame_mask(deck.get<MaskDeck>(), seen.frames, seed, step, sample);
      mask.insert(mask.end(), frames.begin(), frames.end());
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
  const Philox random(seed, Purpose::timestep, step, sample);
  double u = 0;
  if (d.use_discrete_timesteps)
    u = random.below(0, static_cast<std::uint32_t>(d.num_timesteps)) /
        static_cast<double>(d.num_timesteps);
  else if (d.sample_method == "uniform")
    u = random.uniform(0);
  else
    // Logit-normal: the logistic function of a normal draw.
    u = 1.0 / (1.0 + std::exp(-(d.loc + d.scale * static_cast<double>(random.normal(0)))));
  double tau = u * 1000.0;
  if (d.use_timestep_transform)
    tau = timestep_transform(tau, size, d.transform_scale, d.fix_short_clips);
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
