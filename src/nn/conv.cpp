#include "nn/conv.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "nn/nn.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "ops/resize.h"

namespace weft::nn {

namespace {

using detail::note_done, detail::use;

const Tensor& weight_for(const ConvWeights& w, DType dtype) {
  return dtype == DType::bf16 ? w.weight->working : w.weight->value;
}

// A rearrangement and its way back.
template <class Back>
Var rearranged(Context c, const Var& x, Tensor y, Back back) {
  const Var out = make_var(std::move(y), x->needs_grad);
  if (c.tape.recording())
    c.tape.record([x, out, back] {
      const Tensor dy = std::move(out->grad);
      if (!x->needs_grad || !dy.defined()) return;
      Tensor dx = Tensor::empty(x->value.shape(), x->value.dtype());
      back(dy, dx);
      give_grad(x, dx);
    });
  return out;
}

// A linear map of x that was added to the value of `sum`, if there is one.
template <class Back>
Var summed(Context c, const Var& x, const Var& sum, Tensor y, Back back) {
  const Var out = make_var(std::move(y), x->needs_grad || (sum && sum->needs_grad));
  if (c.tape.recording())
    c.tape.record([x, sum, out, back] {
      const Tensor dy = std::move(out->grad);
      if (x->needs_grad) {
        const auto [dx, accumulate] = grad_target(x);
        back(dy, dx, accumulate);
      }
      if (sum) give_grad(sum, dy);
    });
  return out;
}

}  // namespace

Var conv(Context c, const Var& x, const ConvWeights& w, ops::Conv geometry, const Var& residual) {
  use(c, {w.weight, w.bias});
  const DType dtype = x->value.dtype();
  Tensor y = Tensor::empty(geometry.output(x->value.shape(), w.weight->shape[0]), dtype);
  ops::conv_forward(x->value, weight_for(w, dtype), w.bias ? w.bias->value : Tensor(),
                    residual ? residual->value : Tensor(), geometry, y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, w, geometry, residual, out, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    if (w.weight->trainable) {
      Tensor none;
      // The weight may have been used without the bias; the product below has one
      // flag for both, so both are made ready to be added to.
      if (w.bias && w.bias->grad_written != w.weight->grad_written)
        w.weight->grad_to_add(), w.bias->grad_to_add();
      ops::conv_backward_weight(x->value, dy, geometry, w.weight->grad,
                                w.bias ? w.bias->grad : none, w.weight->grad_written);
      w.weight->grad_written = true;
      if (w.bias) w.bias->grad_written = true;
    }
    if (x->needs_grad) {
      const auto [dx, accumulate] = grad_target(x);
      ops::conv_backward_input(dy, weight_for(w, dy.dtype()), geometry, dx, accumulate);
    }
    // Last: the residual may take over dy's memory.
    if (residual && residual->needs_grad) give_grad(residual, dy);
    note_done(table, {w.weight, w.bias});
  });
  return out;
}

Var group_norm(Context c, const Var& x, const NormWeights& w, int groups, float eps, bool silu) {
  use(c, {w.weight, w.bias});
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  Tensor stats = Tensor::empty({x->value.dim(0), groups, 2}, DType::f32);
  ops::group_norm_forward(x->value, w.weight->value, w.bias->value, groups, eps, silu, y, stats);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, w, groups, silu, stats, out, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    const bool learn = w.weight->trainable;
    Tensor none_weight, none_bias;
    const auto [dx, accumulate] = grad_target(x);
    ops::group_norm_backward(x->value, w.weight->value, w.bias->value, stats, groups, silu, dy, dx,
                             accumulate, learn ? w.weight->grad_to_add() : none_weight,
                             learn ? w.bias->grad_to_add() : none_bias);
    note_done(table, {w.weight, w.bias});
  });
  return out;
}

Var channel_norm(Context c, const Var& x, Parameter& gamma, bool silu) {
  use(c, {&gamma});
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::channel_norm_forward(x->value, gamma.value, silu, y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, &gamma, silu, out, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    Tensor none;
    const auto [dx, accumulate] = grad_target(x);
    ops::channel_norm_backward(x->value, gamma.value, silu, dy, dx, accumulate,
                               gamma.trainable ? gamma.grad_to_add() : none);
    note_done(table, {&gamma});
  });
  return out;
}

Var wide_attention(Context c, const Var& qkv) {
  const Shape& s = qkv->value.shape();
  WEFT_ASSERT(s.rank() == 4 && s[2] == 3);
  Tensor y = Tensor::empty({s[0], s[1], s[3]}, qkv->value.dtype());
  Tensor lse = Tensor::empty({s[0], s[1]}, DType::f32);
  ops::wide_attention_forward(qkv->value, y, lse);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([qkv, lse, out] {
      const Tensor dy = std::move(out->grad);
      Tensor dqkv = Tensor::empty(qkv->value.shape(), qkv->value.dtype());
      ops::wide_attention_backward(qkv->value, out->value, lse, dy, dqkv);
      give_grad(qkv, dqkv);
    });
  return out;
}

Var depth_to_time(Context c, const Var& x) {
  const Shape& s = x->value.shape();
  Tensor y = Tensor::empty({s[0], 2 * s[1], s[2], s[3], s[4] / 2}, x->value.dtype());
  ops::depth_to_time_forward(x->value, y);
  return rearranged(c, x, y,
                    [](const Tensor& dy, Tensor& dx) { ops::depth_to_time_backward(dy, dx); });
}

Var space_to_depth(Context c, const Var& x, ops::Blocks k, std::int64_t channels, const Var& sum) {
  const Shape& s = x->value.shape();
  const Shape deep{s[0], (s[1] + k.front) / k.frames, s[2] / k.side, s[3] / k.side, channels};
  WEFT_ASSERT(sum == nullptr || sum->value.shape() == deep);
  const float mean = static_cast<float>(channels) / static_cast<float>(s[4] * k.entries());
  Tensor y = sum ? sum->value : Tensor::empty(deep, x->value.dtype());
  ops::space_to_depth(x->value, k, mean, sum != nullptr, y);
  return summed(c, x, sum, y, [k, mean](const Tensor& dy, Tensor& dx, bool accumulate) {
    ops::depth_to_space(dy, k, mean, accumulate, dx);
  });
}

Var depth_to_space(Context c, const Var& y, ops::Blocks k, std::int64_t channels, const Var& sum) {
  const Shape& s = y->value.shape();
  const Shape wide{s[0], s[1] * k.frames - k.front, s[2] * k.side, s[3] * k.side, channels};
  WEFT_ASSERT(sum == nullptr || sum->value.shape() == wide);
  Tensor x = sum ? sum->value : Tensor::empty(wide, y->value.dtype());
  ops::depth_to_space(y->value, k, 1, sum != nullptr, x);
  return summed(c, y, sum, x, [k](const Tensor& dx, Tensor& dy, bool accumulate) {
    ops::space_to_depth(dx, k, 1, accumulate, dy);
  });
}

Var channels_last(Context c, const Var& x) {
  const Shape& s = x->value.shape();
  Tensor y = Tensor::empty({s[0], s[2], s[3], s[4], s[1]}, x->value.dtype());
  ops::to_channels_last(x->value, y);
  return rearranged(c, x, y, [](const Tensor& dy, Tensor& dx) { ops::to_channels_first(dy, dx); });
}

Var channels_first(Context c, const Var& x) {
  const Shape& s = x->value.shape();
  Tensor y = Tensor::empty({s[0], s[4], s[1], s[2], s[3]}, x->value.dtype());
  ops::to_channels_first(x->value, y);
  return rearranged(c, x, y, [](const Tensor& dy, Tensor& dx) { ops::to_channels_last(dy, dx); });
}

Var leaky_relu(Context c, const Var& x, float slope) {
  Tensor y = x->value;
  ops::leaky_relu_forward(x->value, slope, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, slope, out] {
      Tensor d = std::move(out->grad);
      // The output has overwritten x, but shows as well where x was above 0.
      ops::leaky_relu_backward(out->value, slope, d, d);
      give_grad(x, std::move(d));
    });
  return out;
}

Var max_pool(Context c, const Var& x) {
  const Shape& s = x->value.shape();
  WEFT_ASSERT(s.rank() == 5 && s[2] >= 2 && s[3] >= 2);
  Tensor y = Tensor::empty({s[0], s[1], s[2] / 2, s[3] / 2, s[4]}, x->value.dtype());
  ops::max_pool_forward(x->value, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, out] {
      const Tensor dy = std::move(out->grad);
      Tensor dx = Tensor::empty(x->value.shape(), x->value.dtype());
      ops::max_pool_backward(x->value, dy, dx);
      give_grad(x, std::move(dx));
    });
  return out;
}

Tensor frames_of(const Tensor& x, std::int64_t first, std::int64_t count) {
  const Shape& s = x.shape();
  WEFT_ASSERT(s.rank() == 5 && s[0] == 1);
  return x.view({s[1], s[2], s[3], s[4]})
      .slice(first, first + count)
      .view({1, count, s[2], s[3], s[4]});
}

namespace {

// The same of sample b of x [B,T,H,W,C].
Tensor frames_of_sample(const Tensor& x, std::int64_t b, std::int64_t first, std::int64_t count) {
  const Shape& s = x.shape();
  return x.view({s[0] * s[1], s[2], s[3], s[4]}).slice(b * s[1] + first, b * s[1] + first + count);
}

}  // namespace

Var join_frames(Context c, const std::vector<Var>& pieces) {
  const Shape s = pieces.front()->value.shape();
  std::int64_t frames = 0;
  for (const Var& p : pieces) frames += p->value.dim(1);
  Tensor y = Tensor::empty({s[0], frames, s[2], s[3], s[4]}, pieces.front()->value.dtype());
  for (std::int64_t b = 0; b < s[0]; ++b) {
    std::int64_t first = 0;
    for (const Var& p : pieces) {
      const std::int64_t count = p->value.dim(1);
      Tensor part = frames_of_sample(y, b, first, count);
      ops::convert(frames_of_sample(p->value, b, 0, count), part);
      first += count;
    }
  }
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([pieces, out, batch = s[0]] {
      const Tensor dy = std::move(out->grad);
      std::int64_t first = 0;
      for (const Var& p : pieces) {
        const std::int64_t count = p->value.dim(1);
        if (batch == 1) {
          give_grad(p, frames_of(dy, first, count));
        } else {
          Tensor& g = zeroed_grad(p);
          for (std::int64_t b = 0; b < batch; ++b) {
            Tensor to = frames_of_sample(g, b, 0, count);
            ops::add_inplace(frames_of_sample(dy, b, first, count), to);
          }
        }
        first += count;
      }
    });
  return out;
}

Var take_frames(Context c, const Var& x, std::int64_t first, std::int64_t count) {
  const Shape& s = x->value.shape();
  WEFT_ASSERT(0 <= first && 0 < count && first + count <= s[1]);
  if (count == s[1]) return x;
  Tensor y;
  if (s[0] == 1) {
    y = frames_of(x->value, first, count);
  } else {
    y = Tensor::empty({s[0], count, s[2], s[3], s[4]}, x->value.dtype());
    for (std::int64_t b = 0; b < s[0]; ++b) {
      Tensor to = frames_of_sample(y, b, 0, count);
      ops::convert(frames_of_sample(x->value, b, first, count), to);
    }
  }
  const Var out = make_var(y, x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([x, out, first, count] {
      const Tensor dy = std::move(out->grad);
      if (!dy.defined()) return;
      Tensor& g = zeroed_grad(x);
      for (std::int64_t b = 0; b < x->value.dim(0); ++b) {
        Tensor to = frames_of_sample(g, b, first, count);
        ops::add_inplace(frames_of_sample(dy, b, 0, count), to);
      }
    });
  return out;
}

using ops::Channels;

Var posterior_draw(Context c, const Var& moments, const Tensor& eps, const Tensor& affine) {
  const Shape& s = moments->value.shape();
  WEFT_ASSERT(s.rank() == 5 && s[4] % 2 == 0);
  Tensor z = Tensor::empty({s[0], s[1], s[2], s[3], s[4] / 2}, moments->value.dtype());
  ops::posterior_draw_forward(moments->value, eps, affine, Channels::last, z);
  const Var out = make_var(z);
  if (c.tape.recording())
    c.tape.record([moments, eps, affine, out] {
      const Tensor dz = std::move(out->grad);
      const auto [dm, accumulate] = grad_target(moments);
      ops::posterior_draw_backward(moments->value, eps, affine, Channels::last, dz, dm, accumulate);
    });
  return out;
}

Var clamp_log_variance(Context c, const Var& moments) {
  Tensor y = Tensor::empty(moments->value.shape(), moments->value.dtype());
  ops::clamp_log_variance_forward(moments->value, Channels::last, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([moments, out] {
      const Tensor dy = std::move(out->grad);
      const auto [dm, accumulate] = grad_target(moments);
      ops::clamp_log_variance_backward(moments->value, Channels::last, dy, dm, accumulate);
    });
  return out;
}

Var channel_affine(Context c, const Var& x, const Tensor& affine) {
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::channel_affine_forward(x->value, affine, Channels::last, y);
  const Var out = make_var(y, x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([x, affine, out] {
      const Tensor dy = std::move(out->grad);
      const auto [dx, accumulate] = grad_target(x);
      ops::channel_affine_backward(dy, affine, Channels::last, dx, accumulate);
    });
  return out;
}

namespace {

// The last `frames` frames of x [B,T,H,W,C], after zeros if that is more than T. Dropping and
// padding at the front are thus each other's backward.
Tensor last_frames(const Tensor& x, std::int64_t frames) {
  const Shape& s = x.shape();
  const std::int64_t pixels = s[2] * s[3], kept = std::min(frames, s[1]);
  Tensor y = Tensor::empty({s[0], frames, s[2], s[3], s[4]}, x.dtype());
  if (frames > kept) ops::fill_zero(y);
  Tensor to = y.view({s[0], frames, pixels, s[4]});
  ops::copy_tokens(x.view({s[0], s[1], pixels, s[4]}),
                   {kept, pixels, s[1] - kept, 0, frames - kept, 0}, to);
  return y;
}

Var with_last_frames(Context c, const Var& x, std::int64_t frames) {
  const std::int64_t before = x->value.dim(1);
  if (frames == before) return x;
  const Var out = make_var(last_frames(x->value, frames), x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([x, out, before] {
      const Tensor dy = std::move(out->grad);
      give_grad(x, last_frames(dy, before));
    });
  return out;
}

}  // namespace

Var drop_frames(Context c, const Var& x, std::int64_t first) {
  return with_last_frames(c, x, x->value.dim(1) - first);
}

Var pad_frames(Context c, const Var& x, std::int64_t count) {
  return with_last_frames(c, x, x->value.dim(1) + count);
}

}  // namespace weft::nn

namespace weft {
namespace {

Init within(std::int64_t fan_in) {
  return Init::uniform(1.0 / std::sqrt(static_cast<double>(fan_in)));
}

}  // namespace

nn::ConvWeights add_conv(ParameterTable& table, const std::string& name, std::int64_t out,
                         std::int64_t in, std::initializer_list<std::int64_t> kernel, bool bias,
                         bool trainable) {
  std::vector<std::int64_t> dims{out, in};
  dims.insert(dims.end(), kernel);
  const Shape shape{std::span<const std::int64_t>(dims)};
  const Init init = within(shape.numel() / out);
  nn::ConvWeights w;
  w.weight = &table.add(name + ".weight", shape, init, trainable);
  w.weight->bf16_only = true;
  if (bias) w.bias = &table.add(name + ".bias", {out}, init, trainable);
  return w;
}

nn::Linear add_dense(ParameterTable& table, const std::string& name, std::int64_t out,
                     std::int64_t in, bool trainable) {
  nn::Linear l;
  l.weight = &table.add(name + ".weight", {out, in}, within(in), trainable);
  l.weight->bf16_only = true;
  l.bias = &table.add(name + ".bias", {out}, within(in), trainable);
  return l;
}

nn::NormWeights add_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                         bool trainable) {
  nn::NormWeights n;
  n.weight = &table.add(name + ".weight", {channels}, Init::constant(1.0f), trainable);
  n.bias = &table.add(name + ".bias", {channels}, Init::constant(0.0f), trainable);
  return n;
}

}  // namespace weft

namespace weft::nn {
namespace {

const ops::Conv conv3 = ops::Conv::same(3);

// A level among the others: its cells' first row of Z, its first input channel in the weights.
struct Level {
  std::int64_t size, channels, first_row, first_channel;
  std::int64_t rows() const { return 9 * size * size; }
};

struct Plan {
  std::vector<Level> levels;
  std::int64_t rows = 0;  // of Z, a multiple of 8: what tensor cores want
  DType dtype;
  Shape x;
  std::int64_t out, pixels;
};

Plan plan_of(const Var& x, const std::vector<Var>& levels, const Parameter& weight) {
  const Shape& s = x->value.shape();
  WEFT_ASSERT(s.rank() == 5 && s[1] == 1 && weight.shape.rank() == 4);
  Plan p{{}, 0, x->value.dtype(), s, weight.shape[0], s[2] * s[3]};
  std::int64_t channel = s[4];
  for (const Var& v : levels) {
    const Shape& l = v->value.shape();
    WEFT_ASSERT(l.rank() == 5 && l[0] == s[0] && l[1] == 1 && l[2] == l[3]);
    p.levels.push_back({l[2], l[4], p.rows, channel});
    p.rows += p.levels.back().rows();
    channel += l[4];
  }
  WEFT_ASSERT(weight.shape == (Shape{p.out, channel, 3, 3}));
  p.rows = (p.rows + 7) / 8 * 8;
  return p;
}

// A [H W, rows].
Tensor interpolation(const Plan& p) {
  Tensor a = Tensor::empty({p.x[2], p.x[3], p.rows}, p.dtype);
  ops::fill_zero(a);
  for (const Level& l : p.levels) ops::resize_taps(l.size, l.first_row, a);
  return a.view({p.pixels, p.rows});
}

// The weights of x's channels.
Tensor weights_of_x(const Plan& p, const Tensor& weight) {
  Tensor own = Tensor::empty({p.out, p.x[4], 3, 3}, p.dtype);
  ops::take_input_channels(weight, 0, own);
  return own;
}

// The weights of a level's channels [9 out, channels], taps first.
Tensor weights_of(const Plan& p, const Level& l, const Tensor& weight) {
  Tensor taps = Tensor::empty({9, p.out, l.channels}, p.dtype);
  ops::take_input_channels(weight, l.first_channel, taps);
  return taps.view({9 * p.out, l.channels});
}

// A level's values or gradient as rows of cells.
Tensor cells(const Plan& p, const Level& l, const Tensor& t) {
  return t.view({p.x[0] * l.size * l.size, l.channels});
}

// A level's rows of one sample's Z, of z [N, rows, out]; and those of its product [N s s, 9 out].
Tensor rows_of(const Plan& p, const Level& l, const Tensor& z, std::int64_t n) {
  const Tensor sample = z.slice(n, n + 1).view({p.rows, p.out});
  return sample.slice(l.first_row, l.first_row + l.rows());
}
Tensor rows_of_product(const Plan& p, const Level& l, const Tensor& product, std::int64_t n) {
  const std::int64_t count = l.size * l.size;
  return product.slice(n * count, (n + 1) * count).view({l.rows(), p.out});
}

// Sample n of y [N,1,H,W,out] as rows of pixels.
Tensor pixels_of(const Plan& p, const Tensor& y, std::int64_t n) {
  return y.slice(n, n + 1).view({p.pixels, p.out});
}

// y += A Z.
void add_levels(const Plan& p, const std::vector<Var>& levels, const Tensor& weight,
                const Tensor& y) {
  Tensor z = Tensor::empty({p.x[0], p.rows, p.out}, p.dtype);
  ops::fill_zero(z);  // rows that only round their number up
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const Level& l = p.levels[i];
    Tensor product = Tensor::empty({p.x[0] * l.size * l.size, 9 * p.out}, p.dtype);
    ops::linear_forward(cells(p, l, levels[i]->value), weights_of(p, l, weight), Tensor(), Tensor(),
                        product);
    for (std::int64_t n = 0; n < p.x[0]; ++n) {
      Tensor to = rows_of(p, l, z, n);
      ops::convert(rows_of_product(p, l, product, n), to);
    }
  }
  const Tensor a = interpolation(p);
  for (std::int64_t n = 0; n < p.x[0]; ++n) {
    Tensor to = pixels_of(p, y, n);
    ops::linear_backward_input(a, z.slice(n, n + 1).view({p.rows, p.out}), to, true);
  }
}

// The gradient of the level's cells' products [N s s, 9 out], from that of Z.
Tensor product_gradient(const Plan& p, const Level& l, const Tensor& dz) {
  Tensor product = Tensor::empty({p.x[0] * l.size * l.size, 9 * p.out}, p.dtype);
  for (std::int64_t n = 0; n < p.x[0]; ++n) {
    Tensor to = rows_of_product(p, l, product, n);
    ops::convert(rows_of(p, l, dz, n), to);
  }
  return product;
}

// Gradients of the levels and of their weights.
void levels_backward(const Plan& p, const std::vector<Var>& levels, const Tensor& weight,
                     Parameter& learned, const Tensor& dy) {
  const Tensor dz = Tensor::empty({p.x[0], p.rows, p.out}, DType::f32);
  {
    const Tensor a = interpolation(p);
    Tensor none;
    for (std::int64_t n = 0; n < p.x[0]; ++n) {
      Tensor to = dz.slice(n, n + 1).view({p.rows, p.out});
      ops::linear_backward_weight(a, pixels_of(p, dy, n), to, none, false);
    }
  }
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const Level& l = p.levels[i];
    const Tensor d = product_gradient(p, l, dz);
    if (learned.trainable) {
      Tensor dw = Tensor::empty({9 * p.out, l.channels}, DType::f32), none;
      ops::linear_backward_weight(d, cells(p, l, levels[i]->value), dw, none, false);
      ops::give_input_channels(dw.view({9, p.out, l.channels}), l.first_channel, learned.grad,
                               learned.grad_written);
    }
    if (levels[i]->needs_grad) {
      const auto [grad, accumulate] = grad_target(levels[i]);
      Tensor to = cells(p, l, grad);
      ops::linear_backward_input(d, weights_of(p, l, weight), to, accumulate);
    }
  }
}

}  // namespace

Var pyramid_conv(Context c, const Var& x, const std::vector<Var>& levels, const ConvWeights& w) {
  WEFT_ASSERT(w.bias == nullptr);
  detail::use(c, {w.weight});
  const Plan p = plan_of(x, levels, *w.weight);
  const auto weight = [p, w]() -> const Tensor& {
    return p.dtype == DType::bf16 ? w.weight->working : w.weight->value;
  };
  Tensor y = Tensor::empty({p.x[0], 1, p.x[2], p.x[3], p.out}, p.dtype);
  ops::conv_forward(x->value, weights_of_x(p, weight()), Tensor(), Tensor(), conv3, y);
  if (!levels.empty()) add_levels(p, levels, weight(), y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([p, x, levels, w, weight, out, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    if (!levels.empty()) levels_backward(p, levels, weight(), *w.weight, dy);
    if (w.weight->trainable) {
      Tensor dw = Tensor::empty({p.out, p.x[4], 3, 3}, DType::f32), none;
      ops::conv_backward_weight(x->value, dy, conv3, dw, none, false);
      ops::give_input_channels(dw, 0, w.weight->grad, w.weight->grad_written);
      w.weight->grad_written = true;
    }
    if (x->needs_grad) {
      const auto [dx, accumulate] = grad_target(x);
      ops::conv_backward_input(dy, weights_of_x(p, weight()), conv3, dx, accumulate);
    }
    detail::note_done(table, {w.weight});
  });
  return out;
}

std::int64_t deform_scratch = 64 << 20;

namespace {

// The sizes of the weights [out,C,3,3] and of the result, and the type of the activations.
struct Sizes {
  std::int64_t out, C, frames, pixels;  // pixels of a frame of the result
  DType dtype;

  std::int64_t row() const { return ops::deform_taps * C; }
  // Pixels of the result whose columns are made at a time. Few channels count as 64: the lists of
  // ops/conv.h do not shrink with them.
  std::int64_t band() const {
    const std::int64_t bytes = ops::deform_taps * std::max<std::int64_t>(C, 64) *
                               static_cast<std::int64_t>(size_of(dtype));
    return std::max<std::int64_t>(1, deform_scratch / bytes);
  }
};

// The weights as rows [out, 9 C], as columns are.
Tensor rows_of(const Sizes& s, const ConvWeights& w) {
  const Tensor& weight = s.dtype == DType::bf16 ? w.weight->working : w.weight->value;
  Tensor rows = Tensor::empty({s.out, 1, 3, 3, s.C}, s.dtype);
  ops::to_channels_last(weight.view({s.out, s.C, 1, 3, 3}), rows);
  return rows.view({s.out, s.row()});
}

// dw f32 [out, 9 C] to the weight's gradient.
void give_weight(const Sizes& s, const Tensor& dw, Parameter& weight) {
  Tensor turned = Tensor::empty(weight.shape, DType::f32);
  Tensor to = turned.view({s.out, s.C, 1, 3, 3});
  ops::to_channels_first(dw.view({s.out, 1, 3, 3, s.C}), to);
  ops::scaled_add(turned, 1.0f, Tensor(), weight.grad, weight.grad_written);
  weight.grad_written = true;
}

// t [N,T,...] as [N T,1,...].
Tensor by_frames(const Tensor& t) {
  const Shape& s = t.shape();
  return t.view({s[0] * s[1], 1, s[2], s[3], s[4]});
}

}  // namespace

Var deform_conv(Context c, const Var& x, const Var& offsets, const ConvWeights& w,
                ops::Conv geometry) {
  WEFT_ASSERT(w.bias == nullptr);
  detail::use(c, {w.weight});
  const Shape to = geometry.output(x->value.shape(), w.weight->shape[0]);
  const Sizes s{to[4], x->value.dim(4), to[0] * to[1], to[2] * to[3], x->value.dtype()};
  WEFT_ASSERT(w.weight->shape == (Shape{s.out, s.C, 3, 3}));
  WEFT_ASSERT(offsets->value.shape() == (Shape{to[0], to[1], to[2], to[3], ops::deform_channels}));
  WEFT_ASSERT(offsets->value.dtype() == s.dtype);
  Tensor y = Tensor::empty(to, s.dtype);
  {
    const Tensor weight = rows_of(s, w), rows = y.view({s.frames * s.pixels, s.out});
    for (std::int64_t p = 0; p < rows.dim(0); p += s.band()) {
      Tensor part = rows.slice(p, std::min(p + s.band(), rows.dim(0)));
      Tensor columns = Tensor::empty({part.dim(0), ops::deform_taps, s.C}, s.dtype);
      ops::deform_columns(x->value, offsets->value, geometry, p, columns);
      ops::linear_forward(columns.view({part.dim(0), s.row()}), weight, Tensor(), Tensor(), part);
    }
  }
  const Var result = make_var(y);
  if (!c.tape.recording()) return result;
  c.tape.record([s, x, offsets, w, geometry, result, &table = c.parameters] {
    const Tensor dy = Tensor(std::move(result->grad)).view({s.frames * s.pixels, s.out});
    const Tensor weight = rows_of(s, w);
    const bool learn = w.weight->trainable, of_columns = x->needs_grad || offsets->needs_grad;
    Tensor dw = learn ? Tensor::empty({s.out, s.row()}, DType::f32) : Tensor(), none;
    Tensor doffsets =
        offsets->needs_grad ? Tensor::empty(offsets->value.shape(), s.dtype) : Tensor();
    Tensor dx;
    bool add_dx = false;
    if (x->needs_grad) {
      const GradTarget target = grad_target(x);
      dx = by_frames(target.grad), add_dx = target.accumulate;
    }
    const Tensor in = by_frames(x->value), at = by_frames(offsets->value);
    const std::int64_t frame_bytes =
        in.numel() / s.frames * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t group = std::clamp<std::int64_t>(
        deform_scratch / std::max<std::int64_t>(frame_bytes, 1), 1, s.frames);
    bool written = false;  // dw
    for (std::int64_t f = 0; f < s.frames; f += group) {
      const std::int64_t end = std::min(f + group, s.frames);
      const Tensor own = in.slice(f, end), own_at = at.slice(f, end);
      Tensor own_doffsets = doffsets.defined() ? by_frames(doffsets).slice(f, end) : Tensor();
      Tensor sums;
      if (dx.defined()) {
        sums = Tensor::empty(own.shape(), DType::f32);
        ops::fill_zero(sums);
      }
      const Tensor rows = dy.slice(f * s.pixels, end * s.pixels);
      for (std::int64_t p = 0; p < rows.dim(0); p += s.band()) {
        const Tensor part = rows.slice(p, std::min(p + s.band(), rows.dim(0)));
        Tensor columns = Tensor::empty({part.dim(0), ops::deform_taps, s.C}, s.dtype);
        Tensor as_rows = columns.view({part.dim(0), s.row()});
        if (learn) {
          ops::deform_columns(own, own_at, geometry, p, columns);
          ops::linear_backward_weight(part, as_rows, dw, none, written);
          written = true;
        }
        if (of_columns) ops::linear_backward_input(part, weight, as_rows, false);
        if (doffsets.defined())
          ops::deform_backward_offsets(own, own_at, columns, geometry, p, own_doffsets);
        if (dx.defined()) ops::deform_backward_input(own_at, columns, geometry, p, sums);
      }
      if (dx.defined()) {
        Tensor own_dx = dx.slice(f, end);
        ops::scaled_add(sums, 1.0f, Tensor(), own_dx, add_dx);
      }
    }
    if (learn) give_weight(s, dw, *w.weight);
    if (doffsets.defined()) give_grad(offsets, std::move(doffsets));
    detail::note_done(table, {w.weight});
  });
  return result;
}

// The tangent is recorded first, so that the backward starts with the value's convolution, which
// writes the gradients of weight and bias together; the tangent's then adds to the weight's.
Dual conv(Context c, const Dual& x, const ConvWeights& w, ops::Conv geometry) {
  const Var tangent = conv(c, x.tangent, {w.weight, nullptr}, geometry);
  return {conv(c, x.value, w, geometry), tangent};
}

Dual batch_norm(Context c, const Dual& x, const NormWeights& w, float eps) {
  detail::use(c, {w.weight, w.bias});
  const Tensor& in = x.value->value;
  const int channels = static_cast<int>(in.dim(-1));
  WEFT_ASSERT(in.dim(0) == 1);
  Tensor y = Tensor::empty(in.shape(), in.dtype()), yt = Tensor::empty(in.shape(), in.dtype());
  Tensor stats = Tensor::empty({1, channels, 2}, DType::f32), none;
  const Tensor &gamma = w.weight->value, &beta = w.bias->value;
  ops::group_norm_forward(in, gamma, beta, channels, eps, false, y, stats);
  // The Jacobian of a channel's norm is symmetric: the backward's kernel also maps tangents.
  ops::group_norm_backward(in, gamma, beta, stats, channels, false, x.tangent->value, yt, false,
                           none, none);
  const Dual out{make_var(y), make_var(yt)};
  if (!c.tape.recording()) return out;
  c.tape.record([x, w, channels, stats, out, &table = c.parameters] {
    const Tensor &from = x.value->value, &scale = w.weight->value, &shift = w.bias->value;
    const Tensor dy = std::move(out.value->grad), dyt = std::move(out.tangent->grad);
    Tensor of_weight, of_bias, unused;
    if (w.weight->trainable) of_weight = w.weight->grad_to_add(), of_bias = w.bias->grad_to_add();
    const auto [dx, accumulate] = grad_target(x.value);
    ops::group_norm_backward(from, scale, shift, stats, channels, false, dy, dx, accumulate,
                             of_weight, of_bias);
    ops::batch_norm_tangent_backward(from, scale, stats, x.tangent->value, dyt, dx, true,
                                     of_weight);
    const auto [dxt, accumulate_tangent] = grad_target(x.tangent);
    ops::group_norm_backward(from, scale, shift, stats, channels, false, dyt, dxt,
                             accumulate_tangent, unused, unused);
    detail::note_done(table, {w.weight, w.bias});
  });
  return out;
}

Dual leaky_relu(Context c, const Dual& x, float slope) {
  const Var value = leaky_relu(c, x.value, slope);
  Tensor yt = x.tangent->value;
  ops::leaky_relu_backward(value->value, slope, yt, yt);
  const Var tangent = make_var(yt);
  if (c.tape.recording())
    c.tape.record([from = x.tangent, value, tangent, slope] {
      Tensor d = std::move(tangent->grad);
      ops::leaky_relu_backward(value->value, slope, d, d);
      give_grad(from, std::move(d));
    });
  return {value, tangent};
}

}  // namespace weft::nn
