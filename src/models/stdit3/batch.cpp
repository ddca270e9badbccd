#include "models/stdit3/batch.h"

#include <algorithm>

#include "core/error.h"
#include "core/philox.h"
#include "models/stdit3/options.h"
#include "ops/loss.h"
#include "ops/random.h"

namespace weft {
namespace {

// Draw number of a caption's or a block's Bernoulli within its own purpose.
bool dropped(std::uint64_t seed, Purpose purpose, std::int64_t step, SampleId sample,
             std::uint32_t element, double probability) {
  const Philox random(seed, purpose, static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(sample));
  return static_cast<double>(random.uniform(element)) < probability;
}

void add_captions(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                  const TextFeatures* features, std::int64_t B, std::int64_t tokens,
                  Stdit3Input& in) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  CaptionBatch packed;
  const bool stored =
      bucket.text_channels > 0 && (clips.what.samples.empty() || !clips.text.empty());
  if (!stored && deck.data.text_features.empty()) {
    in.captions = upload(pack_captions({}, m.model_max_length, B, true), Tensor(), tokens);
    return;
  }
  const Shape shape{B, m.model_max_length, m.caption_channels};
  const bool planning = clips.what.samples.empty();
  std::vector<float> y(planning ? 0 : static_cast<std::size_t>(shape.numel()));
  packed.offsets.push_back(0);
  for (std::int64_t b = 0; b < B; ++b) {
    const auto clip = static_cast<std::size_t>(b);
    const SampleId sample = planning ? 0 : clips.what.samples[clip];
    std::vector<float> read;
    if (!planning && !stored) read = features->read(sample);
    const std::vector<float>& rows = stored && !planning ? clips.text[clip] : read;
    // A clip without a caption has no rows, and gets the null caption.
    const std::int64_t length =
        planning || rows.empty() ? m.model_max_length : std::ssize(rows) / m.caption_channels;
    const bool null_caption =
        !planning &&
        (rows.empty() || dropped(static_cast<std::uint64_t>(deck.run.seed), Purpose::caption_drop,
                                 clips.step, sample, 0, m.class_dropout_prob));
    if (!null_caption)
      std::copy(rows.begin(), rows.end(), y.begin() + b * m.model_max_length * m.caption_channels);
    for (std::int64_t l = 0; l < length; ++l)
      packed.index.push_back(
          static_cast<std::int32_t>(null_caption ? -1 - l : b * m.model_max_length + l));
    packed.offsets.push_back(static_cast<std::int32_t>(packed.index.size()));
  }
  in.captions = upload(packed, Tensor::from_host(std::span<const float>(y), shape), tokens);
}

// Keep factors of drop path: linear from 0 at the first pair to drop_path at the last
// (docs/models/stdit3.md, Configuration).
void add_drop_path(const Deck& deck, const LoadedBatch& clips, std::int64_t B, Stdit3Input& in) {
  const Stdit3Deck& m = deck.get<Stdit3Deck>();
  if (m.drop_path <= 0) return;
  in.drop_path = Tensor::empty({m.depth, 2, 2, B}, DType::f32);
  if (clips.what.samples.empty()) return;
  std::vector<float> keep(static_cast<std::size_t>(in.drop_path.numel()));
  for (std::int64_t site = 0; site < m.depth * 4; ++site) {
    const double p =
        m.depth > 1 ? m.drop_path * static_cast<double>(site / 4) / static_cast<double>(m.depth - 1)
                    : 0.0;
    for (std::int64_t b = 0; b < B; ++b)
      keep[static_cast<std::size_t>(site * B + b)] =
          dropped(static_cast<std::uint64_t>(deck.run.seed), Purpose::drop_path, clips.step,
                  clips.what.samples[static_cast<std::size_t>(b)], static_cast<std::uint32_t>(site),
                  p)
              ? 0.0f
              : static_cast<float>(1.0 / (1.0 - p));
  }
  in.drop_path.set(std::span<const float>(keep));
}

}  // namespace

TrainingBatch make_batch(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                         const Tensor& bytes, const TextFeatures* features,
                         const ClipLatents& latents) {
  const auto B = static_cast<std::int64_t>(clips.what.clips.size());
  const bool planning = clips.what.samples.empty();
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
  add_captions(deck, bucket, clips, features, B, tokens, t.in);
  add_drop_path(deck, clips, B, t.in);
  if (planning) {
    // Clips are made one after the other, so one shows the peak of memory for all.
    Tensor x0 = t.x0.slice(0, 1).view(one);
    latents.make(bucket, Tensor(), step, 0, x0);
    return t;
  }

  std::vector<float> timestep, fps;
  std::vector<std::uint8_t> mask;
  const auto clip_bytes = static_cast<std::int64_t>(bucket.clip_bytes());
  for (std::int64_t b = 0; b < B; ++b) {
    const auto sample = static_cast<std::uint64_t>(clips.what.samples[static_cast<std::size_t>(b)]);
    Tensor x0 = t.x0.slice(b, b + 1).view(one);
    Tensor eps = t.eps.slice(b, b + 1);
    latents.make(bucket, bytes.slice(b * clip_bytes, (b + 1) * clip_bytes), step, sample, x0);
    ops::fill_normal(seed, static_cast<int>(Purpose::noise), step, sample, eps);
    timestep.push_back(draw_timestep(deck.get<DiffusionDeck>(), size, seed, step, sample));
    fps.push_back(clips.info[static_cast<std::size_t>(b)].fps);
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

}  // namespace weft
