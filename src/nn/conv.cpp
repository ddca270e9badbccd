#include "nn/conv.h"

#include "core/error.h"
#include "nn/detail.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/layout.h"
#include "ops/norm.h"

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
      // One of the two may have been used without the other (nn/dual.cpp).
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

}  // namespace weft::nn
