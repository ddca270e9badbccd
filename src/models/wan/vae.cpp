#include "models/wan/vae.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

using ops::Channels;

std::int64_t asked_frames(const WanVaeDeck& config) {
  std::int64_t frames = config.chunk_latents;
  for (const bool halves : config.temporal_downsample) frames *= halves ? 2 : 1;
  return frames;
}

}  // namespace

const LatentStatistics& wan_latents(const std::string& variant) {
  static const LatentStatistics wan21 = {
      {-0.7571f, -0.7089f, -0.9113f, 0.1075f, -0.1745f, 0.9653f, -0.1517f, 1.5508f, 0.4134f,
       -0.0715f, 0.5517f, -0.3632f, -0.1922f, -0.9497f, 0.2503f, -0.2921f},
      {2.8184f, 1.4541f, 2.3275f, 2.6558f, 1.2196f, 1.7708f, 2.6052f, 2.0743f, 3.2687f, 2.1526f,
       2.8652f, 1.5579f, 1.6382f, 1.1253f, 2.8251f, 1.9160f}};
  static const LatentStatistics wan22 = {
      {-0.2289f, -0.0052f, -0.1323f, -0.2339f, -0.2799f, 0.0174f,  0.1838f,  0.1557f,
       -0.1382f, 0.0542f,  0.2813f,  0.0891f,  0.1570f,  -0.0098f, 0.0375f,  -0.1825f,
       -0.2246f, -0.1207f, -0.0698f, 0.5109f,  0.2665f,  -0.2108f, -0.2158f, 0.2502f,
       -0.2055f, -0.0322f, 0.1109f,  0.1567f,  -0.0729f, 0.0899f,  -0.2799f, -0.1230f,
       -0.0313f, -0.1649f, 0.0117f,  0.0723f,  -0.2839f, -0.2083f, -0.0520f, 0.3748f,
       0.0152f,  0.1957f,  0.1433f,  -0.2944f, 0.3573f,  -0.0548f, -0.1681f, -0.0667f},
      {0.4765f, 1.0364f, 0.4514f, 1.1677f, 0.5313f, 0.4990f, 0.4818f, 0.5013f, 0.8158f, 1.0344f,
       0.5894f, 1.0901f, 0.6885f, 0.6165f, 0.8454f, 0.4978f, 0.5759f, 0.3523f, 0.7135f, 0.6804f,
       0.5833f, 1.4146f, 0.8986f, 0.5659f, 0.7069f, 0.5338f, 0.4889f, 0.4917f, 0.4069f, 0.4999f,
       0.6866f, 0.4093f, 0.5709f, 0.6065f, 0.6415f, 0.4944f, 0.5726f, 1.2042f, 0.5458f, 1.6887f,
       0.3971f, 1.0600f, 0.3943f, 0.5537f, 0.5444f, 0.4089f, 0.7468f, 0.7744f}};
  return variant == "2.2" ? wan22 : wan21;
}

WanVae::WanVae(const WanVaeDeck& config)
    : VideoCodec(asked_frames(config)), config_(config), networks_(config, params_) {
  const auto& [means, deviations] = wan_latents(config.variant);
  std::vector<float> by, less;
  for (std::size_t c = 0; c < means.size(); ++c) {
    by.push_back(1.0f / deviations[c]);
    less.push_back(-means[c] / deviations[c]);
  }
  normalised_ = channel_affine(by, less);
  denormalised_ = channel_affine(deviations, means);
}

VideoCodec::Normalisation WanVae::normalisation() const {
  const auto& [means, deviations] = wan_latents(config_.variant);
  return {deviations, means};
}

std::int64_t WanVae::chunk_pixels() const {
  throw Error(Exit::usage,
              "generate.loop goes on from the last chunk of a clip, but Wan's VAE has no chunks "
              "that can be decoded without those before them",
              "set generate.loop = 1", __FILE__, __LINE__);
}

VideoCodec::Part WanVae::part_with(std::int64_t frames, std::int64_t first,
                                   std::int64_t last) const {
  WEFT_ASSERT(0 <= first && first < last && last <= latent_frames(frames));
  return {frames, 0, networks_.pixel_frames(last), 0, last};
}

std::int64_t WanVae::latents_at_once(std::int64_t frames) const {
  const std::int64_t unit = networks_.frames_a_latent();
  return (frames_at_once(frames) + unit - 1) / unit;
}

Tensor WanVae::encode_moments(const Part& part, std::int64_t height, std::int64_t width,
                              const FrameSource& source, const Noise*) {
  const std::int64_t side = pixels_a_latent(), h = height / side, w = width / side;
  WEFT_CHECK(part.frames > 0 && h > 0 && w > 0, Exit::data,
             fmt::format("Wan's VAE takes frames of at least {0}x{0}", side),
             "cannot encode {} frames of {}x{}", part.frames, height, width);
  WEFT_ASSERT(part.first_frame == 0);
  Tensor all = Tensor::empty({1, 2 * channels(), part.latents, h, w}, DType::f32);
  const std::int64_t at_once = latents_at_once(part.clip_frames);
  FrameCache cache;
  for (std::int64_t at = 0; at < part.latents; at += at_once) {
    const std::int64_t end = std::min(part.latents, at + at_once);
    const std::int64_t first = at == 0 ? 0 : networks_.pixel_frames(at);
    const std::int64_t n = networks_.pixel_frames(end) - first;
    Tape tape(Tape::Mode::infer);
    const nn::Context c{tape, params_};
    Tensor frames = source(first, n);
    WEFT_ASSERT(frames.shape().rank() == 4 && frames.dim(0) == n && frames.dim(3) == 3);
    // Shortcuts of 2.2 need whole blocks; 2.1's convolutions leave the rest out by themselves.
    Tensor cut = frames;
    if (config_.variant == "2.2" && (frames.dim(1) > h * side || frames.dim(2) > w * side)) {
      cut = Tensor::empty({n, h * side, w * side, 3}, DType::f32);
      ops::copy_tokens(frames, {h * side, w * side}, cut);
    }
    cut = ops::converted(cut, bf16() ? DType::bf16 : DType::f32)
              .view({1, n, cut.dim(1), cut.dim(2), 3});
    frames.release();
    Var x = make_var(std::move(cut), false);
    x = networks_.encode(c, std::move(x), &cache);
    x = nn::channels_first(c, x);
    copy_frames(ops::converted(x->value, DType::f32), 0, end - at, all, at);
  }
  return all;
}

Tensor WanVae::encode(const Part& part, std::int64_t height, std::int64_t width,
                      const FrameSource& source, const Noise* noise) {
  const Tensor moments = encode_moments(part, height, width, source, noise);
  const Shape& s = moments.shape();
  Tensor z = Tensor::empty({1, channels(), s[2], s[3], s[4]}, DType::f32), eps;
  if (noise != nullptr) {
    // Elements are numbered over the whole clip: a part gets the noise that it has within the clip.
    const std::int64_t latents = latent_frames(part.clip_frames);
    eps = Tensor::empty({1, channels(), latents, s[3], s[4]}, DType::f32);
    ops::fill_normal(noise->seed, static_cast<int>(Purpose::posterior), 0, noise->sample, eps);
    if (latents > part.latents) {
      Tensor here = Tensor::empty(z.shape(), DType::f32);
      copy_frames(eps, part.first_latent, part.latents, here, 0);
      eps = here;
    }
  }
  ops::posterior_draw_forward(moments, eps, normalised_, Channels::first, z);
  return z;
}

void WanVae::decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) {
  const Shape& s = latent.shape();
  WEFT_ASSERT(s.rank() == 5 && s[0] == 1 && s[1] == channels());
  WEFT_CHECK(frames > 0 && frames == coded_frames(frames) && s[2] == latent_frames(frames),
             Exit::data, "ask for 1 frame and 4 more for each further latent frame",
             "a latent of {} frames cannot become {} pixel frames", s[2], frames);
  const std::int64_t at_once = latents_at_once(frames);
  FrameCache cache;
  for (std::int64_t at = 0; at < s[2]; at += at_once) {
    const std::int64_t count = std::min(at_once, s[2] - at);
    Tape tape(Tape::Mode::infer);
    const nn::Context c{tape, params_};
    Tensor z = Tensor::empty({1, channels(), count, s[3], s[4]}, DType::f32);
    copy_frames(latent, at, count, z, 0);
    ops::channel_affine_forward(z, denormalised_, Channels::first, z);
    Var x = make_var(ops::converted(z, bf16() ? DType::bf16 : DType::f32), false);
    z.release();
    x = nn::channels_last(c, x);
    x = networks_.decode(c, std::move(x), &cache);
    const Shape f = x->value.shape();
    const Tensor pixels = ops::converted(x->value, DType::f32).view({f[1], f[2], f[3], f[4]});
    x.reset();
    sink(at == 0 ? 0 : networks_.pixel_frames(at), pixels);
  }
}

// ---- Names

namespace {

// "12.residual.2.weight" -> 12 and "residual.2.weight".
std::pair<std::int64_t, std::string> numbered(const std::string& text) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  const char* rest = std::from_chars(text.data(), end, number).ptr;
  return {number, rest < end ? std::string(rest + 1, end) : ""};
}

// Inside a residual block; others keep their names.
std::string inner_name(std::string name) {
  constexpr std::pair<const char*, const char*> parts[] = {{"residual.0.", "norm1."},
                                                           {"residual.2.", "conv1."},
                                                           {"residual.3.", "norm2."},
                                                           {"residual.6.", "conv2."},
                                                           {"shortcut.", "conv_shortcut."}};
  for (const auto& [released, other] : parts)
    if (name.starts_with(released)) return other + name.substr(std::string_view(released).size());
  return name;
}

// Diffusers' name of a parameter.
std::string diffusers_name(const std::string& name, std::int64_t blocks) {
  constexpr std::pair<const char*, const char*> whole[] = {{"conv1.", "quant_conv."},
                                                           {"conv2.", "post_quant_conv."}};
  for (const auto& [released, other] : whole)
    if (name.starts_with(released)) return other + name.substr(std::string_view(released).size());
  const std::size_t dot = name.find('.');
  const std::string side = name.substr(0, dot + 1);  // "encoder."
  const std::string rest = name.substr(dot + 1);
  const auto behind = [&](std::string_view start) { return rest.substr(start.size()); };
  if (rest.starts_with("conv1.")) return side + "conv_in." + behind("conv1.");
  if (rest.starts_with("head.0.")) return side + "norm_out." + behind("head.0.");
  if (rest.starts_with("head.2.")) return side + "conv_out." + behind("head.2.");
  if (rest.starts_with("middle.1.")) return side + "mid_block.attentions.0." + behind("middle.1.");
  for (const auto& [released, other] : {std::pair("middle.0.", "mid_block.resnets.0."),
                                        std::pair("middle.2.", "mid_block.resnets.1.")})
    if (rest.starts_with(released)) return side + other + inner_name(behind(released));
  const bool down = rest.starts_with("downsamples.");
  WEFT_ASSERT(down || rest.starts_with("upsamples."));
  auto [number, inner] = numbered(behind(down ? "downsamples." : "upsamples."));
  const std::int64_t in_level = down ? blocks : blocks + 1;
  // VAE 2.2: a level's residual blocks, and the change of size behind them.
  if (inner.starts_with("downsamples.") || inner.starts_with("upsamples.")) {
    const auto [within, deeper] = numbered(inner.substr(inner.find('.') + 1));
    const std::string level = fmt::format("{}{}_blocks.{}.", side, down ? "down" : "up", number);
    if (within == in_level) return level + (down ? "downsampler." : "upsampler.") + deeper;
    return fmt::format("{}resnets.{}.{}", level, within, inner_name(deeper));
  }
  if (down) return fmt::format("{}down_blocks.{}.{}", side, number, inner_name(inner));
  // There a level is its residual blocks and, as an upsampler, the change of size behind them.
  const std::int64_t level = number / (in_level + 1), within = number % (in_level + 1);
  if (within == in_level) return fmt::format("{}up_blocks.{}.upsamplers.0.{}", side, level, inner);
  return fmt::format("{}up_blocks.{}.resnets.{}.{}", side, level, within, inner_name(inner));
}

}  // namespace

WeightNames wan_vae_weight_names(const WanVaeDeck& config) {
  WeightNames names;
  names.section = "vae";
  names.others = [blocks = config.num_res_blocks](const std::string& name) {
    return std::vector<std::string>{diffusers_name(name, blocks)};
  };
  return names;
}

WeightNames WanVae::weight_names() const { return wan_vae_weight_names(config_); }

}  // namespace weft
