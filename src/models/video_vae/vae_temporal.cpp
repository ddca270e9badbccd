#include "models/video_vae/vae_temporal.h"

#include "core/error.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"

namespace weft {
namespace {

constexpr float norm_eps = 1e-5f;

using ops::Conv;

}  // namespace

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
