#include "models/video_vae/networks.h"

#include "core/error.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"
#include "ops/conv.h"
#include "ops/layout.h"

namespace weft {
namespace {

constexpr float norm_eps_2d = 1e-6f;
constexpr float norm_eps = 1e-5f;  // of the temporal VAE
constexpr std::int64_t colours = 3;

using ops::Conv;

// Frames are a batch here: [B,T,H,W,C] -> [B*T,1,H,W,C], so that each has a GroupNorm of its own.
Var frames_apart(nn::Context c, const Var& x) {
  const Shape& s = x->value.shape();
  return nn::view(c, x, {s[0] * s[1], 1, s[2], s[3], s[4]});
}
Var frames_together(nn::Context c, const Var& x, std::int64_t batch) {
  const Shape& s = x->value.shape();
  return nn::view(c, x, {batch, s[0] / batch, s[2], s[3], s[4]});
}

// q, k, v, each [N,P,C] -> [N,P,3,C].
Var side_by_side(nn::Context c, const std::vector<Var>& parts) {
  const Shape s = parts[0]->value.shape();
  const std::int64_t rows = s[0] * s[1], count = std::ssize(parts);
  // Rows as frames of `count` tokens: one strided copy each.
  const Shape all{1, rows, count, s[2]}, one{1, rows, 1, s[2]};
  Tensor y = Tensor::empty({s[0], s[1], count, s[2]}, parts[0]->value.dtype());
  Tensor grid = y.view(all);
  for (std::int64_t i = 0; i < count; ++i)
    ops::copy_tokens(parts[i]->value.view(one), {rows, 1, 0, 0, 0, i}, grid);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([parts, out, all, one, rows, s] {
      const Tensor dy = std::move(out->grad);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        Tensor part = Tensor::empty(s, dy.dtype()), as_grid = part.view(one);
        ops::copy_tokens(dy.view(all), {rows, 1, 0, static_cast<std::int64_t>(i)}, as_grid);
        give_grad(parts[i], part);
      }
    });
  return out;
}

}  // namespace

class SpatialVae::Builder {
 public:
  Builder(ParameterTable& params, const VaeDeck& config, bool trainable)
      : params_(params), config_(config), trainable_(trainable) {}

  nn::ConvWeights conv(const std::string& name, std::int64_t out, std::int64_t in,
                       std::int64_t k) const {
    return add_conv(params_, name, out, in, {k, k}, true, trainable_);
  }
  nn::NormWeights norm(const std::string& name, std::int64_t channels) const {
    WEFT_CHECK(channels % config_.spatial_groups == 0, Exit::usage,
               "every number of vae.spatial_channels must be a multiple of it",
               "vae.spatial_groups = {} does not divide {} channels", config_.spatial_groups,
               channels);
    return add_norm(params_, name, channels, trainable_);
  }
  ResBlock block(const std::string& name, std::int64_t in, std::int64_t out) const {
    ResBlock b;
    b.norm1 = norm(name + ".norm1", in);
    b.conv1 = conv(name + ".conv1", out, in, 3);
    b.norm2 = norm(name + ".norm2", out);
    b.conv2 = conv(name + ".conv2", out, out, 3);
    if (in != out) b.shortcut = conv(name + ".conv_shortcut", out, in, 1);
    return b;
  }
  Mid mid(const std::string& name, std::int64_t C) const {
    Mid m;
    m.first = block(name + ".resnets.0", C, C);
    const std::string a = name + ".attentions.0";
    m.attention.norm = norm(a + ".group_norm", C);
    m.attention.q = add_dense(params_, a + ".to_q", C, C, trainable_);
    m.attention.k = add_dense(params_, a + ".to_k", C, C, trainable_);
    m.attention.v = add_dense(params_, a + ".to_v", C, C, trainable_);
    m.attention.out = add_dense(params_, a + ".to_out.0", C, C, trainable_);
    m.second = block(name + ".resnets.1", C, C);
    return m;
  }

  Side encoder(const std::string& prefix) const {
    const auto& channels = config_.spatial_channels;
    const std::string name = prefix + "encoder";
    Side e;
    std::int64_t C = channels.front();
    e.in = conv(name + ".conv_in", C, colours, 3);
    for (std::size_t i = 0; i < channels.size(); ++i) {
      const std::string level = name + ".down_blocks." + std::to_string(i);
      Level l;
      for (std::int64_t j = 0; j < config_.spatial_res_blocks; ++j, C = channels[i])
        l.blocks.push_back(block(level + ".resnets." + std::to_string(j), C, channels[i]));
      if (i + 1 < channels.size()) l.resample = conv(level + ".downsamplers.0.conv", C, C, 3);
      e.levels.push_back(std::move(l));
    }
    e.mid = mid(name + ".mid_block", C);
    e.norm = norm(name + ".conv_norm_out", C);
    e.out = conv(name + ".conv_out", 2 * latent_channels, C, 3);
    e.quant = conv(prefix + "quant_conv", 2 * latent_channels, 2 * latent_channels, 1);
    return e;
  }

  Side decoder(const std::string& prefix) const {
    const std::vector<std::int64_t> channels(config_.spatial_channels.rbegin(),
                                             config_.spatial_channels.rend());
    const std::string name = prefix + "decoder";
    Side d;
    std::int64_t C = channels.front();
    d.quant = conv(prefix + "post_quant_conv", latent_channels, latent_channels, 1);
    d.in = conv(name + ".conv_in", C, latent_channels, 3);
    d.mid = mid(name + ".mid_block", C);
    for (std::size_t i = 0; i < channels.size(); ++i) {
      const std::string level = name + ".up_blocks." + std::to_string(i);
      Level l;
      // One block more than in the encoder.
      for (std::int64_t j = 0; j <= config_.spatial_res_blocks; ++j, C = channels[i])
        l.blocks.push_back(block(level + ".resnets." + std::to_string(j), C, channels[i]));
      if (i + 1 < channels.size()) l.resample = conv(level + ".upsamplers.0.conv", C, C, 3);
      d.levels.push_back(std::move(l));
    }
    d.norm = norm(name + ".conv_norm_out", C);
    d.out = conv(name + ".conv_out", colours, C, 3);
    return d;
  }

 private:
  ParameterTable& params_;
  const VaeDeck& config_;
  bool trainable_;
};

SpatialVae::SpatialVae(const VaeDeck& config, ParameterTable& params, const std::string& prefix,
                       bool trainable)
    : groups_(static_cast<int>(config.spatial_groups)) {
  const Builder builder(params, config, trainable);
  encoder_ = builder.encoder(prefix);
  decoder_ = builder.decoder(prefix);
}

std::int64_t SpatialVae::pixels_a_latent() const {
  return std::int64_t{1} << (encoder_.levels.size() - 1);
}

// Takes inputs by value: what a caller moves in returns to the arena as soon as it has been read.
Var SpatialVae::res_block(nn::Context c, Var x, const ResBlock& b) const {
  Var h = nn::group_norm(c, x, b.norm1, groups_, norm_eps_2d, true);
  h = nn::conv(c, h, b.conv1, Conv::same(3));
  if (b.shortcut.weight != nullptr) x = nn::conv(c, x, b.shortcut, Conv::same(1));
  h = nn::group_norm(c, h, b.norm2, groups_, norm_eps_2d, true);
  return nn::conv(c, h, b.conv2, Conv::same(3), x);
}

Var SpatialVae::attention(nn::Context c, const Var& x, const Attention& a) const {
  const Shape s = x->value.shape();  // [N,1,h,w,C]
  const Shape rows{s[0], s[2] * s[3], s[4]};
  Var h = nn::view(c, nn::group_norm(c, x, a.norm, groups_, norm_eps_2d, false), rows);
  h = side_by_side(c, {nn::linear(c, h, a.q), nn::linear(c, h, a.k), nn::linear(c, h, a.v)});
  h = nn::wide_attention(c, h);
  return nn::view(c, nn::linear(c, h, a.out, nn::view(c, x, rows)), s);
}

Var SpatialVae::middle(nn::Context c, Var x, const Mid& mid) const {
  x = res_block(c, std::move(x), mid.first);
  x = attention(c, x, mid.attention);
  return res_block(c, std::move(x), mid.second);
}

Var SpatialVae::encode(nn::Context c, const Var& frames) const {
  const std::int64_t batch = frames->value.dim(0);
  Var x = nn::conv(c, frames_apart(c, frames), encoder_.in, Conv::same(3));
  for (const Level& level : encoder_.levels) {
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b);
    if (level.resample.weight != nullptr) x = nn::conv(c, x, level.resample, Conv::down());
  }
  x = middle(c, std::move(x), encoder_.mid);
  x = nn::group_norm(c, x, encoder_.norm, groups_, norm_eps_2d, true);
  x = nn::conv(c, x, encoder_.out, Conv::same(3));
  return frames_together(c, nn::conv(c, x, encoder_.quant, Conv::same(1)), batch);
}

Var SpatialVae::decode(nn::Context c, const Var& z) const {
  const std::int64_t batch = z->value.dim(0);
  Var x = nn::conv(c, frames_apart(c, z), decoder_.quant, Conv::same(1));
  x = nn::conv(c, x, decoder_.in, Conv::same(3));
  x = middle(c, std::move(x), decoder_.mid);
  for (const Level& level : decoder_.levels) {
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b);
    if (level.resample.weight != nullptr) x = nn::conv(c, x, level.resample, Conv::up());
  }
  x = nn::group_norm(c, x, decoder_.norm, groups_, norm_eps_2d, true);
  return frames_together(c, nn::conv(c, x, decoder_.out, Conv::same(3)), batch);
}

class TemporalVae::Builder {
 public:
  Builder(ParameterTable& params, const VaeDeck& config) : params_(params), config_(config) {}

  nn::ConvWeights conv(const std::string& name, std::int64_t out, std::int64_t in, std::int64_t k,
                       bool bias) const {
    return add_conv(params_, name + ".conv", out, in, {k, k, k}, bias);
  }
  nn::NormWeights norm(const std::string& name, std::int64_t channels) const {
    WEFT_CHECK(channels % config_.num_groups == 0, Exit::usage,
               "vae.filters times every number of vae.channel_multipliers must be a multiple of it",
               "vae.num_groups = {} does not divide {} channels", config_.num_groups, channels);
    return add_norm(params_, name, channels);
  }
  ResBlock block(const std::string& name, std::int64_t in, std::int64_t out) const {
    ResBlock b;
    b.norm1 = norm(name + ".norm1", in);
    b.conv1 = conv(name + ".conv1", out, in, 3, false);
    b.norm2 = norm(name + ".norm2", out);
    b.conv2 = conv(name + ".conv2", out, out, 3, false);
    if (in != out) b.conv3 = conv(name + ".conv3", out, in, 1, false);
    return b;
  }
  // The residual blocks of one level, and the channels behind them.
  Level level(const std::string& side, std::size_t i, std::int64_t& C) const {
    Level l;
    const std::int64_t out = config_.filters * config_.channel_multipliers[i];
    for (std::int64_t j = 0; j < config_.num_res_blocks; ++j, C = out)
      l.blocks.push_back(
          block(side + ".block_res_blocks." + std::to_string(i) + "." + std::to_string(j), C, out));
    return l;
  }
  std::vector<ResBlock> mid(const std::string& side, std::int64_t C) const {
    std::vector<ResBlock> blocks;
    for (std::int64_t j = 0; j < config_.num_res_blocks; ++j)
      blocks.push_back(block(side + ".res_blocks." + std::to_string(j), C, C));
    return blocks;
  }

  Side encoder(const std::string& prefix) const {
    const std::string name = prefix + "encoder";
    const std::size_t levels = config_.channel_multipliers.size();
    Side e;
    std::int64_t C = config_.filters;
    e.in = conv(name + ".conv_in", C, latent_channels, 3, false);
    for (std::size_t i = 0; i < levels; ++i) {
      Level l = level(name, i, C);
      if (i + 1 < levels && config_.temporal_downsample[i])
        l.resample = conv(name + ".conv_blocks." + std::to_string(i), C, C, 3, true);
      e.levels.push_back(std::move(l));
    }
    e.mid = mid(name, C);
    e.norm = norm(name + ".norm1", C);
    e.out = conv(name + ".conv2", 2 * latent_channels, C, 1, true);
    e.quant = conv(prefix + "quant_conv", 2 * latent_channels, 2 * latent_channels, 1, true);
    return e;
  }

  Side decoder(const std::string& prefix) const {
    const std::string name = prefix + "decoder";
    Side d;
    std::int64_t C = config_.filters * config_.channel_multipliers.back();
    d.quant = conv(prefix + "post_quant_conv", latent_channels, latent_channels, 1, true);
    d.in = conv(name + ".conv1", C, latent_channels, 3, true);
    d.mid = mid(name, C);
    for (std::size_t i = config_.channel_multipliers.size(); i-- > 0;) {
      Level l = level(name, i, C);
      if (i > 0 && config_.temporal_downsample[i - 1])
        l.resample = conv(name + ".conv_blocks." + std::to_string(i - 1), 2 * C, C, 3, true);
      d.levels.push_back(std::move(l));
    }
    d.norm = norm(name + ".norm1", C);
    d.out = conv(name + ".conv_out", latent_channels, C, 3, true);
    return d;
  }

 private:
  ParameterTable& params_;
  const VaeDeck& config_;
};

TemporalVae::TemporalVae(const VaeDeck& config, ParameterTable& params, const std::string& prefix)
    : groups_(static_cast<int>(config.num_groups)) {
  const Builder builder(params, config);
  encoder_ = builder.encoder(prefix);
  decoder_ = builder.decoder(prefix);
  for (const bool halves : config.temporal_downsample) downsampling_ *= halves ? 2 : 1;
}

// Takes the input by value: what a caller moves in returns to the arena as soon as it has been
// read.
Var TemporalVae::res_block(nn::Context c, Var x, const ResBlock& b) const {
  Var h = nn::group_norm(c, x, b.norm1, groups_, norm_eps, true);
  h = nn::conv(c, h, b.conv1, Conv::causal(3));
  if (b.conv3.weight != nullptr) x = nn::conv(c, x, b.conv3, Conv::causal(1));
  h = nn::group_norm(c, h, b.norm2, groups_, norm_eps, true);
  return nn::conv(c, h, b.conv2, Conv::causal(3), x);
}

Var TemporalVae::encode(nn::Context c, const Var& in) const {
  const std::int64_t frames = in->value.dim(1), all = latent_frames(frames) * downsampling_;
  Var x = nn::pad_frames(c, in, all - frames);
  x = nn::conv(c, x, encoder_.in, Conv::causal(3));
  for (const Level& level : encoder_.levels) {
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b);
    if (level.resample.weight != nullptr) x = nn::conv(c, x, level.resample, Conv::causal(3, 2));
  }
  for (const ResBlock& b : encoder_.mid) x = res_block(c, std::move(x), b);
  x = nn::group_norm(c, x, encoder_.norm, groups_, norm_eps, true);
  x = nn::conv(c, x, encoder_.out, Conv::causal(1));
  return nn::conv(c, x, encoder_.quant, Conv::causal(1));
}

Var TemporalVae::decode(nn::Context c, const Var& z, std::int64_t frames, Var* last_input) const {
  const std::int64_t all = z->value.dim(1) * downsampling_;
  WEFT_ASSERT(frames <= all && all - frames < downsampling_);
  Var x = nn::conv(c, z, decoder_.quant, Conv::causal(1));
  x = nn::conv(c, x, decoder_.in, Conv::causal(3));
  for (const ResBlock& b : decoder_.mid) x = res_block(c, std::move(x), b);
  for (const Level& level : decoder_.levels) {
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b);
    if (level.resample.weight == nullptr) continue;
    x = nn::conv(c, x, level.resample, Conv::causal(3));
    x = nn::depth_to_time(c, x);
  }
  x = nn::group_norm(c, x, decoder_.norm, groups_, norm_eps, true);
  if (last_input != nullptr) *last_input = x;
  x = nn::conv(c, x, decoder_.out, Conv::causal(3));
  // Dropped last, as in the original: norms and convolutions include the padding's frames.
  return nn::drop_frames(c, x, all - frames);
}

}  // namespace weft
