#include "models/wan/vae_networks.h"

#include <utility>

#include "core/error.h"
#include "ops/conv.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

constexpr std::int64_t colours = 3;

using ops::Conv;

// A kernel of k frames alone, behind `front` frames of zeros.
Conv in_time(int front, int stride) {
  Conv c;
  c.kt = 3, c.stride_t = stride, c.front = front;
  return c;
}
// A causal convolution whose earlier frames stand in front of its input.
Conv continued(Conv c) {
  c.front = 0;
  return c;
}

// ---- Frames of earlier chunks

// [1,count + T,H,W,C] with the cached frames in front; the rest is the caller's to write.
Tensor behind_cached(const Tensor& cached, const Shape& s, DType dtype) {
  const std::int64_t count = cached.dim(1);
  Tensor all = Tensor::empty({1, count + s[1], s[2], s[3], s[4]}, dtype);
  Tensor front = nn::frames_of(all, 0, count);
  ops::convert(cached, front);
  return all;
}

// Keeps the last `count` frames of `frames`, after zeros if there are fewer. `shape`: of a frame,
// where there are none.
void keep_last(Tensor& cached, const Tensor& frames, std::int64_t count, const Shape& shape,
               DType dtype) {
  if (!cached.defined()) cached = Tensor::empty({1, count, shape[2], shape[3], shape[4]}, dtype);
  const std::int64_t there = frames.defined() ? std::min(frames.dim(1), count) : 0;
  if (there < count) {
    Tensor zeros = nn::frames_of(cached, 0, count - there);
    ops::fill_zero(zeros);
  }
  if (there == 0) return;
  Tensor last = nn::frames_of(cached, count - there, there);
  ops::convert(nn::frames_of(frames, frames.dim(1) - there, there), last);
}

// conv(x) (+ residual) of a causal convolution over time; x.reset() as soon as it has been read.
Var causal_conv(nn::Context c, Var x, const nn::ConvWeights& w, Conv geometry, const Var& residual,
                FrameCache* cache) {
  if (cache == nullptr || geometry.kt == 1) return nn::conv(c, x, w, geometry, residual);
  Tensor& cached = cache->next();
  if (cache->first_chunk()) {
    keep_last(cached, x->value, geometry.front, x->value.shape(), x->value.dtype());
    return nn::conv(c, x, w, geometry, residual);
  }
  const std::int64_t T = x->value.dim(1);
  Tensor all = behind_cached(cached, x->value.shape(), x->value.dtype());
  Tensor here = nn::frames_of(all, geometry.front, T);
  ops::convert(x->value, here);
  x.reset(), here.release();
  keep_last(cached, all, geometry.front, all.shape(), all.dtype());
  return nn::conv(c, make_var(std::move(all), false), w, continued(geometry), residual);
}

// The same of silu(CN(x)), which is written where the convolution wants it.
Var norm_conv(nn::Context c, Var x, Parameter& gamma, const nn::ConvWeights& w, const Var& residual,
              FrameCache* cache) {
  const Conv geometry = Conv::causal(3);
  if (cache == nullptr || cache->first_chunk()) {
    Var h = nn::channel_norm(c, x, gamma, true);
    x.reset();
    return causal_conv(c, std::move(h), w, geometry, residual, cache);
  }
  Tensor& cached = cache->next();
  const std::int64_t T = x->value.dim(1);
  Tensor all = behind_cached(cached, x->value.shape(), x->value.dtype());
  Tensor here = nn::frames_of(all, geometry.front, T);
  nn::detail::use(c, {&gamma});
  ops::channel_norm_forward(x->value, gamma.value, true, here);
  x.reset(), here.release();
  keep_last(cached, all, geometry.front, all.shape(), all.dtype());
  return nn::conv(c, make_var(std::move(all), false), w, continued(geometry), residual);
}

// ---- Changes of length

// y[0] = x[0] untouched, y[i] = conv(x[2i-2], x[2i-1], x[2i]).
Var halve_length(nn::Context c, Var x, const nn::ConvWeights& w, FrameCache* cache) {
  const Conv geometry = in_time(0, 2);
  if (cache == nullptr || cache->first_chunk()) {
    if (cache != nullptr) keep_last(cache->next(), x->value, 1, x->value.shape(), x->value.dtype());
    if (x->value.dim(1) < 3) return nn::take_frames(c, x, 0, 1);
    const Var first = nn::take_frames(c, x, 0, 1);
    return nn::join_frames(c, {first, nn::conv(c, x, w, geometry)});
  }
  Tensor& cached = cache->next();
  const std::int64_t T = x->value.dim(1);
  Tensor all = behind_cached(cached, x->value.shape(), x->value.dtype());
  Tensor here = nn::frames_of(all, 1, T);
  ops::convert(x->value, here);
  x.reset(), here.release();
  keep_last(cached, all, 1, all.shape(), all.dtype());
  return nn::conv(c, make_var(std::move(all), false), w, geometry);
}

// x [B,T,H,W,2C] -> [B,2T,H,W,C]: of a frame's channels the first half is the earlier frame.
Var halves_to_frames(nn::Context c, const Var& x) {
  const Shape s = x->value.shape();
  const std::int64_t frames = s[0] * s[1], pixels = s[2] * s[3], C = s[4] / 2;
  // A pixel's two halves are two tokens; a frame's rows go behind one another.
  const Shape halves{frames, pixels, 2, C}, rows{frames, 2 * pixels, 1, C};
  Tensor y = Tensor::empty({s[0], 2 * s[1], s[2], s[3], C}, x->value.dtype());
  Tensor to = y.view(rows);
  for (const std::int64_t half : {0, 1})
    ops::copy_tokens(x->value.view(halves), {pixels, 1, 0, half, half * pixels, 0}, to);
  const Var out = make_var(y, x->needs_grad);
  if (c.tape.recording())
    c.tape.record([x, out, s, halves, rows, pixels] {
      const Tensor dy = std::move(out->grad);
      Tensor dx = Tensor::empty(s, dy.dtype()), back = dx.view(halves);
      for (const std::int64_t half : {0, 1})
        ops::copy_tokens(dy.view(rows), {pixels, 1, half * pixels, 0, 0, half}, back);
      give_grad(x, dx);
    });
  return out;
}

// y[0] = x[0]; of x[1..] alone, zeros in front of x[1], the two frames y[2j-1], y[2j] of each.
Var double_length(nn::Context c, Var x, const nn::ConvWeights& w, FrameCache* cache) {
  const Conv geometry = in_time(2, 1);
  const std::int64_t T = x->value.dim(1);
  if (cache != nullptr && !cache->first_chunk())
    return halves_to_frames(c, causal_conv(c, std::move(x), w, geometry, nullptr, cache));
  if (T == 1) {
    if (cache != nullptr)
      keep_last(cache->next(), Tensor(), geometry.front, x->value.shape(), x->value.dtype());
    return x;
  }
  const Var first = nn::take_frames(c, x, 0, 1);
  Var rest = nn::take_frames(c, x, 1, T - 1);
  rest = causal_conv(c, std::move(rest), w, geometry, nullptr, cache);
  return nn::join_frames(c, {first, halves_to_frames(c, rest)});
}

// Each frame by itself: [B,T,H,W,C] -> [B*T,1,H,W,C].
Var frames_apart(nn::Context c, const Var& x) {
  const Shape& s = x->value.shape();
  return nn::view(c, x, {s[0] * s[1], 1, s[2], s[3], s[4]});
}
Var frames_together(nn::Context c, const Var& x, std::int64_t batch) {
  const Shape& s = x->value.shape();
  return nn::view(c, x, {batch, s[0] / batch, s[2], s[3], s[4]});
}

// Pixels to the channels of the input, columns before rows.
ops::Blocks patches(std::int64_t side) { return {1, static_cast<int>(side), 0, true}; }

// What a level makes one of where it changes the size.
ops::Blocks blocks_of(const nn::ConvWeights& space, const nn::ConvWeights& time) {
  return {time.weight != nullptr ? 2 : 1, space.weight != nullptr ? 2 : 1};
}

Var resize_frames(nn::Context c, const Var& x, const nn::ConvWeights& w, Conv geometry) {
  const std::int64_t batch = x->value.dim(0);
  return frames_together(c, nn::conv(c, frames_apart(c, x), w, geometry), batch);
}

}  // namespace

// ---- Registration

class CausalVae::Builder {
 public:
  Builder(ParameterTable& params, const WanVaeDeck& config) : params_(params), config_(config) {}

  nn::ConvWeights conv(const std::string& name, std::int64_t out, std::int64_t in,
                       std::int64_t k) const {
    return add_conv(params_, name, out, in, {k, k, k}, true);
  }
  // A convolution of one frame.
  nn::ConvWeights flat_conv(const std::string& name, std::int64_t out, std::int64_t in,
                            std::int64_t k) const {
    return add_conv(params_, name, out, in, {k, k}, true);
  }
  Parameter* norm(const std::string& name, const Shape& shape) const {
    return &params_.add(name + ".gamma", shape, Init::constant(1.0f));
  }
  ResBlock block(const std::string& name, std::int64_t in, std::int64_t out) const {
    ResBlock b;
    b.norm1 = norm(name + ".residual.0", {in, 1, 1, 1});
    b.conv1 = conv(name + ".residual.2", out, in, 3);
    b.norm2 = norm(name + ".residual.3", {out, 1, 1, 1});
    b.conv2 = conv(name + ".residual.6", out, out, 3);
    if (in != out) b.shortcut = conv(name + ".shortcut", out, in, 1);
    return b;
  }
  Middle middle(const std::string& name, std::int64_t C) const {
    Middle m;
    m.first = block(name + ".0", C, C);
    m.attention.norm = norm(name + ".1.norm", {C, 1, 1});
    m.attention.qkv = flat_conv(name + ".1.to_qkv", 3 * C, C, 1);
    m.attention.out = flat_conv(name + ".1.proj", C, C, 1);
    m.second = block(name + ".2", C, C);
    return m;
  }

  Side encoder() const {
    Side e;
    const std::size_t levels = config_.channel_multipliers.size();
    std::int64_t C = config_.filters;
    Names names{"encoder.downsamples.", shortcuts()};
    e.in = conv("encoder.conv1", C, pixel_channels(), 3);
    for (std::size_t i = 0; i < levels; ++i) {
      Level l;
      const std::int64_t out = config_.filters * config_.channel_multipliers[i];
      for (std::int64_t j = 0; j < config_.num_res_blocks; ++j, C = out)
        l.blocks.push_back(block(names.next(), C, out));
      if (i + 1 < levels) {
        const std::string name = names.next();
        l.space = flat_conv(name + ".resample.1", C, C, 3);
        if (config_.temporal_downsample[i]) l.time = time_conv(name, C, C);
      }
      l.channels = C;
      names.end_level();
      e.levels.push_back(std::move(l));
    }
    e.middle = middle("encoder.middle", C);
    e.norm = norm("encoder.head.0", {C, 1, 1, 1});
    e.out = conv("encoder.head.2", 2 * config_.z_channels, C, 3);
    e.quant = conv("conv1", 2 * config_.z_channels, 2 * config_.z_channels, 1);
    return e;
  }

  Side decoder() const {
    Side d;
    const std::size_t levels = config_.channel_multipliers.size();
    const std::int64_t filters =
        config_.decoder_filters > 0 ? config_.decoder_filters : config_.filters;
    std::int64_t C = filters * config_.channel_multipliers.back();
    Names names{"decoder.upsamples.", shortcuts()};
    d.quant = conv("conv2", config_.z_channels, config_.z_channels, 1);
    d.in = conv("decoder.conv1", C, config_.z_channels, 3);
    d.middle = middle("decoder.middle", C);
    for (std::size_t i = levels; i-- > 0;) {
      Level l;
      const std::int64_t out = filters * config_.channel_multipliers[i];
      for (std::int64_t j = 0; j <= config_.num_res_blocks; ++j, C = out)
        l.blocks.push_back(block(names.next(), C, out));
      if (i > 0) {
        const std::string name = names.next();
        l.space = flat_conv(name + ".resample.1", shortcuts() ? C : C / 2, C, 3);
        if (config_.temporal_downsample[i - 1]) l.time = time_conv(name, 2 * C, C);
        if (!shortcuts()) C /= 2;
      }
      l.channels = C;
      names.end_level();
      d.levels.push_back(std::move(l));
    }
    d.norm = norm("decoder.head.0", {C, 1, 1, 1});
    d.out = conv("decoder.head.2", pixel_channels(), C, 3);
    return d;
  }

  bool shortcuts() const { return config_.variant == "2.2"; }

 private:
  // Wan2.1 numbers blocks and changes of size through all levels, Wan2.2 those of each level.
  struct Names {
    std::string prefix;
    bool by_level;
    int level = 0, number = 0;

    std::string next() {
      return by_level ? fmt::format("{}{}.{}{}", prefix, level, prefix.substr(8), number++)
                      : fmt::format("{}{}", prefix, number++);
    }
    void end_level() {
      if (by_level) ++level, number = 0;
    }
  };
  std::int64_t pixel_channels() const { return colours * config_.patch_size * config_.patch_size; }
  nn::ConvWeights time_conv(const std::string& name, std::int64_t out, std::int64_t in) const {
    return add_conv(params_, name + ".time_conv", out, in, {3, 1, 1}, true);
  }

  ParameterTable& params_;
  const WanVaeDeck& config_;
};

CausalVae::CausalVae(const WanVaeDeck& config, ParameterTable& params)
    : shortcuts_(config.variant == "2.2"), patch_(config.patch_size) {
  const Builder builder(params, config);
  encoder_ = builder.encoder();
  decoder_ = builder.decoder();
  for (const bool halves : config.temporal_downsample) frames_a_latent_ *= halves ? 2 : 1;
}

// ---- Forward

// Takes the input by value: what a caller moves in returns to the arena as soon as it has been
// read.
Var CausalVae::res_block(nn::Context c, Var x, const ResBlock& b, FrameCache* cache) const {
  Var h = norm_conv(c, x, *b.norm1, b.conv1, nullptr, cache);
  if (b.shortcut.weight != nullptr) x = nn::conv(c, x, b.shortcut, Conv::causal(1));
  return norm_conv(c, std::move(h), *b.norm2, b.conv2, x, cache);
}

Var CausalVae::middle(nn::Context c, Var x, const Middle& m, FrameCache* cache) const {
  x = res_block(c, std::move(x), m.first, cache);
  // Attention over the pixels of each frame.
  const std::int64_t batch = x->value.dim(0);
  x = frames_apart(c, x);
  const Shape s = x->value.shape();
  Var h = nn::channel_norm(c, x, *m.attention.norm, false);
  h = nn::conv(c, h, m.attention.qkv, Conv::same(1));
  h = nn::wide_attention(c, nn::view(c, h, {s[0], s[2] * s[3], 3, s[4]}));
  x = nn::conv(c, nn::view(c, h, s), m.attention.out, Conv::same(1), x);
  h.reset();
  x = frames_together(c, x, batch);
  return res_block(c, std::move(x), m.second, cache);
}

Var CausalVae::encode(nn::Context c, const Var& frames, FrameCache* cache) const {
  const std::int64_t T = frames->value.dim(1);
  if (cache != nullptr) {
    cache->begin_chunk();
    WEFT_ASSERT(!c.tape.recording() && frames->value.dim(0) == 1);
    WEFT_ASSERT((T - (cache->first_chunk() ? 1 : 0)) % frames_a_latent_ == 0);
  }
  Var x = frames;
  if (cache == nullptr && pixel_frames(latent_frames(T)) < T)
    x = nn::take_frames(c, x, 0, pixel_frames(latent_frames(T)));
  if (patch_ > 1) x = nn::space_to_depth(c, x, patches(patch_), colours * patch_ * patch_);
  x = causal_conv(c, std::move(x), encoder_.in, Conv::causal(3), nullptr, cache);
  for (const Level& level : encoder_.levels) {
    const Var input = shortcuts_ ? x : nullptr;
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b, cache);
    if (level.space.weight != nullptr) x = resize_frames(c, x, level.space, Conv::down());
    if (level.time.weight != nullptr) x = halve_length(c, std::move(x), level.time, cache);
    if (!shortcuts_) continue;
    ops::Blocks k = blocks_of(level.space, level.time);
    k.front = static_cast<int>(input->value.dim(1) % k.frames);  // of two, an odd length lacks one
    x = nn::space_to_depth(c, input, k, level.channels, x);
  }
  x = middle(c, std::move(x), encoder_.middle, cache);
  x = norm_conv(c, std::move(x), *encoder_.norm, encoder_.out, nullptr, cache);
  return nn::conv(c, x, encoder_.quant, Conv::causal(1));
}

Var CausalVae::decode(nn::Context c, const Var& z, FrameCache* cache) const {
  if (cache != nullptr) {
    cache->begin_chunk();
    WEFT_ASSERT(!c.tape.recording() && z->value.dim(0) == 1);
  }
  Var x = nn::conv(c, z, decoder_.quant, Conv::causal(1));
  x = causal_conv(c, std::move(x), decoder_.in, Conv::causal(3), nullptr, cache);
  x = middle(c, std::move(x), decoder_.middle, cache);
  for (const Level& level : decoder_.levels) {
    const Var input = shortcuts_ && level.space.weight != nullptr ? x : nullptr;
    for (const ResBlock& b : level.blocks) x = res_block(c, std::move(x), b, cache);
    if (level.time.weight != nullptr) x = double_length(c, std::move(x), level.time, cache);
    if (level.space.weight != nullptr) x = resize_frames(c, x, level.space, Conv::up());
    if (!input) continue;
    ops::Blocks k = blocks_of(level.space, level.time);
    k.front = cache == nullptr || cache->first_chunk() ? k.frames - 1 : 0;
    x = nn::depth_to_space(c, input, k, level.channels, x);
  }
  x = norm_conv(c, std::move(x), *decoder_.norm, decoder_.out, nullptr, cache);
  return patch_ > 1 ? nn::depth_to_space(c, x, patches(patch_), colours) : x;
}

// The first frame of a clip takes less.
double CausalVae::decoding_flops(double height, double width) const {
  const auto flops = [](const nn::ConvWeights& w) {
    return w.weight == nullptr ? 0.0 : 2.0 * static_cast<double>(w.weight->shape.numel());
  };
  const auto of_block = [&](const ResBlock& b) {
    return flops(b.conv1) + flops(b.conv2) + flops(b.shortcut);
  };
  // Pixels of a latent frame for each frame of the clip.
  const auto side = static_cast<double>(pixels_a_latent());
  double pixels = height * width / (side * side * static_cast<double>(frames_a_latent_));
  const Middle& m = decoder_.middle;
  double sum = pixels * (flops(decoder_.quant) + flops(decoder_.in) + of_block(m.first) +
                         of_block(m.second) + flops(m.attention.qkv) + flops(m.attention.out));
  for (const Level& level : decoder_.levels) {
    for (const ResBlock& b : level.blocks) sum += pixels * of_block(b);
    sum += pixels * flops(level.time);
    if (level.time.weight != nullptr) pixels *= 2;
    if (level.space.weight != nullptr) pixels *= 4;
    sum += pixels * flops(level.space);
  }
  return sum + pixels * flops(decoder_.out);
}

}  // namespace weft
