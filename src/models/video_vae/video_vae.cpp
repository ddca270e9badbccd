#include "models/video_vae/video_vae.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

constexpr std::int64_t C = TemporalVae::latent_channels;

using ops::Channels;

// A constant as the model's number format holds it.
float as_stored(double v, DType dtype) {
  const auto f = static_cast<float>(v);
  return dtype == DType::bf16 ? static_cast<float>(bf16(f)) : f;
}

void draw_noise(const VideoVae::Noise& noise, std::int64_t step, Tensor& eps) {
  ops::fill_normal(noise.seed, static_cast<int>(Purpose::posterior),
                   static_cast<std::uint64_t>(step), noise.sample, eps);
}

}  // namespace

VideoVae::VideoVae(const VaeDeck& config, bool freeze_spatial)
    : VideoCodec(config.micro_batch_size),
      config_(config),
      spatial_(
          std::make_unique<SpatialVae>(config, params_, "spatial_vae.module.", !freeze_spatial)),
      temporal_(std::make_unique<TemporalVae>(config, params_, "temporal_vae.")) {
  std::array<float, C> up, down, by, less, back, more, none{};
  up.fill(SpatialVae::scaling);
  down.fill(1.0f / SpatialVae::scaling);
  for (std::size_t c = 0; c < up.size(); ++c) {
    // Not measured yet: leave the latents unchanged.
    back[c] = config.scale.empty() ? 1.0f : as_stored(config.scale[c], activation_dtype());
    more[c] = config.shift.empty() ? 0.0f : as_stored(config.shift[c], activation_dtype());
    by[c] = 1.0f / back[c];
    less[c] = -more[c] / back[c];
  }
  scaled_2d_ = channel_affine(up, none);
  unscaled_2d_ = channel_affine(down, none);
  normalised_ = channel_affine(by, less);
  denormalised_ = channel_affine(back, more);
}

std::int64_t VideoVae::latent_frames(std::int64_t frames) const {
  const std::int64_t chunk = chunk_frames(frames);
  return frames / chunk * temporal_->latent_frames(chunk) +
         temporal_->latent_frames(frames % chunk);
}

Tensor VideoVae::as_activations(const Tensor& from) const {
  if (from.dtype() == activation_dtype()) return from;
  Tensor t = Tensor::empty(from.shape(), activation_dtype());
  ops::convert(from, t);
  return t;
}

Var VideoVae::encode_frames(std::int64_t first, std::int64_t count, std::int64_t h, std::int64_t w,
                            const FrameSource& source, const Noise* noise) {
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, params_};
  Tensor latents = Tensor::empty({count, h, w, C}, activation_dtype());
  const std::int64_t at_once = frames_at_once(count);
  for (std::int64_t i = 0; i < count; i += at_once) {
    const std::int64_t n = std::min(at_once, count - i);
    Tensor frames = source(first + i, n);
    WEFT_ASSERT(frames.shape().rank() == 4 && frames.dim(0) == n && frames.dim(3) == 3);
    const Shape one_clip{1, n, frames.dim(1), frames.dim(2), 3};
    frames = as_activations(frames).view(one_clip);
    const Var moments = spatial_->encode(c, make_var(frames, false));
    frames.release();
    WEFT_ASSERT(moments->value.dim(2) == h && moments->value.dim(3) == w);
    Tensor eps;
    if (noise != nullptr) {
      eps = Tensor::empty({n, h, w, C}, DType::f32);
      for (std::int64_t f = 0; f < n; ++f) {
        Tensor of_frame = eps.slice(f, f + 1);
        draw_noise(*noise, 1 + first + i + f, of_frame);
      }
    }
    Tensor z = latents.slice(i, i + n);
    ops::posterior_draw_forward(moments->value, eps, scaled_2d_, Channels::last, z);
  }
  return make_var(latents.view({1, count, h, w, C}), false);
}

VideoVae::Part VideoVae::part_with(std::int64_t frames, std::int64_t first,
                                   std::int64_t last) const {
  WEFT_ASSERT(0 <= first && first < last && last <= latent_frames(frames));
  const std::int64_t chunk = chunk_frames(frames), latents = temporal_->latent_frames(chunk);
  // Rounds out to whole chunks; only a clip's last chunk may be shorter.
  Part part{frames, first / latents * chunk, 0, first / latents * latents, 0};
  part.frames = std::min(frames, (last + latents - 1) / latents * chunk) - part.first_frame;
  part.latents = latent_frames(part.first_frame + part.frames) - part.first_latent;
  return part;
}

Tensor VideoVae::encode_moments(const Part& part, std::int64_t height, std::int64_t width,
                                const FrameSource& source, const Noise* noise) {
  const std::int64_t h = height / pixels_a_latent(), w = width / pixels_a_latent();
  WEFT_CHECK(part.frames > 0 && h > 0 && w > 0, Exit::data,
             fmt::format("the VAE takes frames of at least {0}x{0}", pixels_a_latent()),
             "cannot encode {} frames of {}x{}", part.frames, height, width);
  Tensor all = Tensor::empty({1, 2 * C, part.latents, h, w}, DType::f32);
  const std::int64_t chunk = chunk_frames(part.clip_frames), end = part.first_frame + part.frames;
  for (std::int64_t first = part.first_frame, at = 0; first < end; first += chunk) {
    const std::int64_t count = std::min(chunk, end - first);
    Tape tape(Tape::Mode::infer);
    const nn::Context c{tape, params_};
    const Var z = encode_frames(first, count, h, w, source, noise);
    Var moments = nn::clamp_log_variance(c, temporal_->encode(c, z));
    moments = nn::channels_first(c, moments);
    copy_frames(ops::converted(moments->value, DType::f32), 0, moments->value.dim(2), all, at);
    at += moments->value.dim(2);
  }
  return all;
}

Tensor VideoVae::draw_latent(const Tensor& moments, const Noise* noise) {
  Part all;
  all.latents = moments.dim(2);
  return draw_latent(all, moments, noise);
}

Tensor VideoVae::draw_latent(const Part& part, const Tensor& moments, const Noise* noise) {
  const Shape& s = moments.shape();
  WEFT_ASSERT(s.rank() == 5 && s[1] == 2 * C && s[2] == part.latents);
  Tensor z = Tensor::empty({s[0], C, s[2], s[3], s[4]}, DType::f32), eps;
  if (noise != nullptr) {
    // Elements are numbered over the whole clip: a part gets the noise it has within the clip.
    const std::int64_t frames =
        part.clip_frames > 0 ? latent_frames(part.clip_frames) : part.latents;
    eps = Tensor::empty({s[0], C, frames, s[3], s[4]}, DType::f32);
    draw_noise(*noise, 0, eps);
    if (frames > part.latents) {
      Tensor here = Tensor::empty(z.shape(), DType::f32);
      copy_frames(eps, part.first_latent, part.latents, here, 0);
      eps = here;
    }
  }
  ops::posterior_draw_forward(moments, eps, normalised_, Channels::first, z);
  return z;
}

void VideoVae::decode_frames(const Tensor& latents, std::int64_t first, const FrameSink& sink) {
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, params_};
  const Shape& s = latents.shape();  // [1,count,h,w,4]
  const std::int64_t count = s[1], at_once = frames_at_once(count);
  const Tensor by_frame = latents.view({count, s[2], s[3], C});
  for (std::int64_t i = 0; i < count; i += at_once) {
    const std::int64_t n = std::min(at_once, count - i);
    const Tensor part = by_frame.slice(i, i + n).view({1, n, s[2], s[3], C});
    const Var z = nn::channel_affine(c, make_var(part, false), unscaled_2d_);
    const Var frames = spatial_->decode(c, z);
    const Shape& f = frames->value.shape();
    sink(first + i, ops::converted(frames->value, DType::f32).view({n, f[2], f[3], f[4]}));
  }
}

void VideoVae::decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) {
  const Shape& s = latent.shape();
  WEFT_ASSERT(s.rank() == 5 && s[0] == 1 && s[1] == C);
  WEFT_CHECK(frames > 0 && s[2] == latent_frames(frames), Exit::data,
             "a latent belongs to the vae.micro_frame_size that it was made with",
             "a latent of {} frames cannot become {} pixel frames, which have {}", s[2], frames,
             frames > 0 ? latent_frames(frames) : 0);
  const std::int64_t chunk = chunk_frames(frames);
  for (std::int64_t first = 0, at = 0; first < frames; first += chunk) {
    const std::int64_t count = std::min(chunk, frames - first);
    const std::int64_t t = temporal_->latent_frames(count);
    Tape tape(Tape::Mode::infer);
    const nn::Context c{tape, params_};
    Tensor z = Tensor::empty({1, C, t, s[3], s[4]}, DType::f32);
    copy_frames(latent, at, t, z, 0);
    ops::channel_affine_forward(z, denormalised_, Channels::first, z);
    Var x = nn::channels_last(c, make_var(as_activations(z), false));
    z.release();
    x = temporal_->decode(c, x, count);
    decode_frames(x->value, first, sink);
    at += t;
  }
}

WeightNames vae_weight_names() {
  const auto others = [](const std::string& name) {
    constexpr const char* renamed[][2] = {{".to_q.", ".query."},
                                          {".to_k.", ".key."},
                                          {".to_v.", ".value."},
                                          {".to_out.0.", ".proj_attn."}};
    std::vector<std::string> names;
    for (const auto& [now, before] : renamed)
      if (const std::size_t at = name.find(now); at != name.npos)
        names.push_back(std::string(name).replace(at, std::string_view(now).size(), before));
    constexpr std::string_view wrapped = "spatial_vae.module.";
    // Without the prefix: files of the 2D VAE alone, under new names and old.
    if (name.starts_with(wrapped)) {
      names.push_back(name.substr(wrapped.size()));
      if (names.size() > 1) names.push_back(names.front().substr(wrapped.size()));
    }
    return names;
  };
  return {"vae",
          [](const std::string& n) {
            return n == "scale" || n == "shift" || n.starts_with("discriminator.");
          },
          others};
}

namespace {

// What "scale" or "shift" of these files has that the deck has not; empty where they agree, or
// where either side has none.
std::string other_scale(const WeightFiles& files, const VaeDeck& deck) {
  const std::pair<const char*, const std::vector<double>*> both[] = {{"scale", &deck.scale},
                                                                     {"shift", &deck.shift}};
  for (const auto& [name, ours] : both) {
    const WeightFiles::Tensor* held = files.find(name);
    if (held == nullptr || ours->empty()) continue;
    std::int64_t count = 1;
    for (const std::int64_t n : held->entry.shape) count *= n;
    std::vector<float> theirs(count);
    files.read_f32(*held, 0, theirs);
    // bf16 files hold rounded values: the steps of bf16 are up to 1/128 of the value.
    const bool alike = std::ranges::equal(
        theirs, *ours, [](double a, double b) { return std::abs(a - b) <= std::abs(b) / 128; });
    if (!alike)
      return fmt::format("{} has {} [{:.4g}], the deck's vae.{} is [{}]", files.path().string(),
                         name, fmt::join(theirs, ", "), name, fmt::join(*ours, ", "));
  }
  return "";
}

}  // namespace

WeightNames VideoVae::weight_names() const { return vae_weight_names(); }

void VideoVae::check_weights(const ModelSource& source) const {
  if (log::rank() != 0) return;  // one warning for all ranks
  const std::optional<WeightFiles> files = source.files();
  const std::string other = files ? other_scale(*files, config_) : "";
  if (!other.empty()) log::warn("{}: the deck's is used", other);
}

VideoCodec::Normalisation VideoVae::normalisation() const {
  const Tensor constants = denormalised_.to_host();
  const std::span<const float> values = constants.span<float>();
  return {{values.begin(), values.begin() + C}, {values.begin() + C, values.begin() + 2 * C}};
}

std::string VideoVae::describe(const Normalisation& n) const {
  return fmt::format("vae.shift=[{:.4g}] vae.scale=[{:.4g}]", fmt::join(n.shift, ","),
                     fmt::join(n.scale, ","));
}

void VideoVae::set_normalisation(Deck& deck, const Normalisation& n) const {
  deck.get<VaeDeck>().scale.assign(n.scale.begin(), n.scale.end());
  deck.get<VaeDeck>().shift.assign(n.shift.begin(), n.shift.end());
}

std::int64_t VideoVae::chunk_pixels() const {
  WEFT_CHECK(config_.micro_frame_size > 0, Exit::usage, "set vae.micro_frame_size = 17",
             "loops need a VAE that takes frames in chunks, vae.micro_frame_size is 0");
  return config_.micro_frame_size;
}

double VideoVae::decoding_flops(double height, double width) const {
  double flops = 0, pixels = height * width;
  for (const std::int64_t c : config_.spatial_channels) {
    const auto channels = static_cast<double>(c);
    flops += 2 * 9 * channels * channels * pixels * 2 *
             static_cast<double>(config_.spatial_res_blocks + 1);
    pixels /= 4;
  }
  return flops;
}

}  // namespace weft
