#include "nn/conv.h"

#include <cmath>

#include <algorithm>

#include "core/error.h"
#include "nn/detail.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/pool.h"
#include "ops/random.h"

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
      // The weight may have been used without the bias (nn/dual.cpp); the product below has one
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

Var join_frames(Context c, const std::vector<Var>& pieces) {
  const Shape s = pieces.front()->value.shape();
  std::int64_t frames = 0;
  for (const Var& p : pieces) frames += p->value.dim(1);
  Tensor y = Tensor::empty({1, frames, s[2], s[3], s[4]}, pieces.front()->value.dtype());
  std::int64_t first = 0;
  for (const Var& p : pieces) {
    Tensor part = frames_of(y, first, p->value.dim(1));
    ops::convert(p->value, part);
    first += p->value.dim(1);
  }
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([pieces, out] {
      const Tensor dy = std::move(out->grad);
      std::int64_t at = 0;
      for (const Var& p : pieces) {
        give_grad(p, frames_of(dy, at, p->value.dim(1)));
        at += p->value.dim(1);
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
  return {Init::Kind::uniform, static_cast<float>(1.0 / std::sqrt(static_cast<double>(fan_in)))};
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
  n.weight = &table.add(name + ".weight", {channels}, {Init::Kind::constant, 1.0f}, trainable);
  n.bias = &table.add(name + ".bias", {channels}, {Init::Kind::constant, 0.0f}, trainable);
  return n;
}

}  // namespace weft
