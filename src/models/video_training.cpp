#include "models/video_training.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "ops/dispatch.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "text/utf8.h"

namespace weft {

// ---- Latents

namespace {

// Factors and terms that turn a latent as a posterior gives it into the model's input
// (VideoCodec::Normalisation).
Tensor normalising(const std::vector<float>& scale, const std::vector<float>& shift) {
  const std::size_t C = scale.size();
  std::vector<float> both(2 * C);
  for (std::size_t c = 0; c < C; ++c) {
    both[c] = 1.0f / scale[c];
    both[C + c] = -shift[c] / scale[c];
  }
  return Tensor::from_host(std::span<const float>(both), {2, static_cast<std::int64_t>(C)});
}

}  // namespace

ClipLatents::ClipLatents(const Deck& deck, std::int64_t channels, std::unique_ptr<VideoCodec> codec,
                         Posterior posterior)
    : seed_(static_cast<std::uint64_t>(deck.run.seed)),
      channels_(channels),
      codec_(std::move(codec)),
      posterior_(posterior) {
  if (can_encode()) encoded_ = codec_->normalisation();
}

void ClipLatents::check(const Bucket& bucket) const {
  const std::int64_t has = seen(bucket).channels;
  const bool pixels = bucket.dtype == DType::u8;
  WEFT_CHECK(has == channels_, Exit::usage,
             !pixels ? "set model.in_channels to the latents' channels"
             : takes_latents()
                 ? "make latents with `weft encode`, or name a VAE with vae.weights to "
                   "encode while training"
                 : "training on pixels needs model.in_channels = 3",
             "bucket {} has {} channels, model.in_channels = {}", bucket.name, has, channels_);
  WEFT_CHECK(!encodes(bucket) || codec_->lacks_scale().empty(), Exit::usage,
             "take the values that weft encode or weft reconstruct prints, or train on what weft "
             "encode stores",
             "{}: latents that are encoded while training cannot be normalised",
             codec_->lacks_scale());
}

void ClipLatents::load(std::span<const Bucket> buckets) {
  const bool wanted =
      std::any_of(buckets.begin(), buckets.end(), [this](const Bucket& b) { return encodes(b); });
  if (!wanted) return;
  codec_->params().allocate_for_inference(codec_->bf16());
  load_weights(codec_->weights().value, codec_->params(), codec_->weight_names());
}

std::size_t ClipLatents::weight_bytes() const {
  return can_encode() ? codec_->params().inference_bytes(codec_->bf16()) : 0;
}

Bucket ClipLatents::seen(const Bucket& bucket) const {
  Bucket b = bucket;
  b.channels = bucket.model_channels();
  if (!encodes(bucket)) return b;
  b.channels = codec_->channels();
  b.frames = codec_->latent_frames(bucket.frames);
  b.height = bucket.height / codec_->pixels_a_latent();
  b.width = bucket.width / codec_->pixels_a_latent();
  return b;
}

void ClipLatents::make(const Bucket& bucket, const Tensor& clip, std::uint64_t step,
                       std::uint64_t sample, Tensor& x0) const {
  const Shape stored{bucket.channels, bucket.frames, bucket.height, bucket.width};
  const bool encode = encodes(bucket), draw = posterior_ == Posterior::draw;
  // `weft plan` loads no weights: its dry run needs their places alone.
  if (encode && ops::planning() && !codec_->params().all().front()->value.defined() &&
      !codec_->params().all().front()->working.defined())
    codec_->params().allocate_for_inference(codec_->bf16());
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

  // 2. Moments, from the codec or as stored; the codec has the normalised mean at once.
  const VideoCodec::FrameSource frames = [&](std::int64_t first, std::int64_t count) {
    return pixel_frames(clip, first, count, bucket.height, bucket.width);
  };
  const Shape one{1, x0.dim(0), x0.dim(1), x0.dim(2), x0.dim(3)};
  if (encode && !draw) {
    const Tensor mean =
        codec_->encode(codec_->whole(bucket.frames), bucket.height, bucket.width, frames, nullptr);
    if (clip.defined()) ops::convert(mean.view(x0.shape()), x0);
    return;
  }
  Tensor moments;
  if (encode) {
    const VideoCodec::Noise noise{seed_, sample};
    moments = codec_->encode_moments(codec_->whole(bucket.frames), bucket.height, bucket.width,
                                     frames, &noise);
  } else if (bucket.dtype == DType::f32) {
    if (clip.defined()) moments = as_stored(DType::f32);
  } else {
    moments = Tensor::empty(stored, DType::f32);
    if (clip.defined()) ops::convert(as_stored(DType::f16), moments);
  }
  // 3. The latent, normalised.
  Tensor eps, z = x0.view(one);
  if (draw) eps = Tensor::empty(one, DType::f32);
  const Tensor affine = encode ? normalising(encoded_.scale, encoded_.shift)
                               : normalising(bucket.scale, bucket.shift);
  if (!clip.defined()) return;  // planning: everything that takes memory is allocated by now
  if (draw) ops::fill_normal(seed_, static_cast<int>(Purpose::latent), step, sample, eps);
  ops::posterior_draw_forward(moments.view({1, 2 * one[1], one[2], one[3], one[4]}), eps, affine,
                              ops::Channels::first, z);
}

// ---- Captions

TextFeatures::TextFeatures(const std::filesystem::path& path, const CaptionShape& shape)
    : file_(SafetensorsFile::open(path)) {
  for (const SafetensorEntry& e : file_.entries()) {
    const bool fits = e.shape.size() == 2 && e.shape[1] == shape.channels && e.shape[0] >= 1 &&
                      e.shape[0] <= shape.max_length;
    WEFT_CHECK(fits, Exit::data, fmt::format("features must match {}", shape.keys),
               "{}: caption {} has shape [{}], expected [1..{}, {}]", path.string(), e.name,
               fmt::join(e.shape, ", "), shape.max_length, shape.channels);
  }
}

void TextFeatures::check_captions(const std::vector<std::string>& captions,
                                  const std::vector<std::string>& stores) const {
  const std::string data = fmt::format("{}", fmt::join(stores, ", "));
  const std::string again =
      stores.size() > 1
          ? "encode the captions into each store (weft encode, encode.text)"
          : fmt::format("make them of this store: weft text DECK {} --features FILE", data);
  WEFT_CHECK(file_.entries().size() == captions.size(), Exit::data, again,
             "data.text_features = {} has {} for the {} of {}", file_.path().string(),
             counted(std::ssize(file_.entries()), "feature"), counted(std::ssize(captions), "clip"),
             data);
  for (std::size_t i = 0; i < captions.size(); ++i)
    file_.at(std::to_string(i));  // that it is there
  const auto of = file_.metadata().find("captions");
  const bool none = std::ranges::all_of(captions, [](const auto& c) { return c.empty(); });
  if (of == file_.metadata().end() || none) {
    log::warn("cannot verify that data.text_features = {} belongs to {}: {}", file_.path().string(),
              data, none ? "the clips have no captions" : "the file does not record its captions");
    return;
  }
  WEFT_CHECK(of->second == hash_of_texts(captions), Exit::data, again,
             "data.text_features = {} was made of other captions than those of {}",
             file_.path().string(), data);
}

ClipCaptions captions_of(const Deck& deck, const CaptionShape& shape, const Bucket& bucket,
                         const LoadedBatch& clips, const TextFeatures* features) {
  const std::int64_t B = std::ssize(clips.what.clips), L = shape.max_length;
  const Shape of_y{B, L, shape.channels};
  ClipCaptions c;
  c.lengths.assign(static_cast<std::size_t>(B), 0);
  c.dropped.assign(static_cast<std::size_t>(B), false);
  const bool in_store = bucket.text_channels > 0 && (is_planned(clips) || !clips.text.empty());
  if (!in_store && deck.data.text_features.empty()) return c;
  if (is_planned(clips)) {
    c.y = Tensor::empty(of_y, DType::f32);
    c.lengths.assign(static_cast<std::size_t>(B), L);
    return c;
  }
  std::vector<float> y(of_y.numel());
  for (std::int64_t b = 0; b < B; ++b) {
    const auto clip = static_cast<std::size_t>(b);
    const SampleId sample = clips.what.samples[clip];
    std::vector<float> read;
    if (!in_store) read = features->read(sample);
    const std::vector<float>& rows = in_store ? clips.text[clip] : read;
    const Philox random(static_cast<std::uint64_t>(deck.run.seed), Purpose::caption_drop,
                        static_cast<std::uint64_t>(clips.step), static_cast<std::uint64_t>(sample));
    c.lengths[clip] = std::ssize(rows) / shape.channels;
    c.dropped[clip] = static_cast<double>(random.uniform(0)) < shape.drop;
    if (!c.dropped[clip]) std::copy(rows.begin(), rows.end(), y.begin() + b * L * shape.channels);
  }
  c.y = Tensor::from_host(std::span<const float>(y), of_y);
  return c;
}

// ---- A micro-batch

NoisyClips make_clips(const Deck& deck, const Bucket& bucket, const LoadedBatch& clips,
                      const Tensor& bytes, const ClipLatents& latents) {
  const std::int64_t B = std::ssize(clips.what.clips);
  const auto seed = static_cast<std::uint64_t>(deck.run.seed);
  const auto step = static_cast<std::uint64_t>(clips.step);
  const Bucket seen = latents.seen(bucket);
  const Shape shape{B, seen.channels, seen.frames, seen.height, seen.width};
  const Shape one{shape[1], shape[2], shape[3], shape[4]};
  NoisyClips made{Tensor::empty(shape, DType::f32), Tensor::empty(shape, DType::f32)};
  if (is_planned(clips)) {
    // Clips are made one after the other, so one shows the peak of memory for all.
    Tensor x0 = made.x0.slice(0, 1).view(one);
    latents.make(bucket, Tensor(), step, 0, x0);
    return made;
  }
  const auto clip_bytes = static_cast<std::int64_t>(bucket.clip_bytes());
  for (std::int64_t b = 0; b < B; ++b) {
    const auto sample = static_cast<std::uint64_t>(clips.what.samples[b]);
    Tensor x0 = made.x0.slice(b, b + 1).view(one);
    Tensor eps = made.eps.slice(b, b + 1);
    latents.make(bucket, bytes.slice(b * clip_bytes, (b + 1) * clip_bytes), step, sample, x0);
    ops::fill_normal(seed, static_cast<int>(Purpose::noise), step, sample, eps);
  }
  return made;
}

Tensor velocity_loss(Tape& tape, const Tensor& x0, const Tensor& eps, const Tensor& timestep,
                     const Tensor& mask, const Tensor& weight,
                     const std::function<Var(const Tensor& x)>& velocity) {
  Tensor x = Tensor::empty(x0.shape(), DType::f32);
  ops::flow_interpolate(x0, eps, timestep, mask, x);
  const Var out = velocity(x);
  Tensor loss = Tensor::empty({x0.dim(0)}, DType::f32);
  ops::velocity_loss_forward(out->value, x0, eps, mask, loss);
  if (tape.recording()) {
    out->grad = Tensor::empty(out->value.shape(), DType::f32);
    ops::velocity_loss_backward(out->value, x0, eps, mask, weight, out->grad);
  }
  return loss;
}

std::int64_t count_tokens(const Tensor& x, std::span<const std::int64_t> patch) {
  std::int64_t tokens = x.dim(0);
  for (std::size_t i = 0; i < 3; ++i)
    tokens *= (x.dim(static_cast<int>(i) + 2) + patch[i] - 1) / patch[i];
  return tokens;
}

double draw_level(const std::string& method, double mean, double deviation, std::uint64_t seed,
                  std::uint64_t step, std::uint64_t sample, std::uint32_t again) {
  const Philox random(seed, Purpose::timestep, step, sample);
  if (method == "uniform") return random.uniform(again);
  return 1.0 / (1.0 + std::exp(-(mean + deviation * static_cast<double>(random.normal(again)))));
}

}  // namespace weft
