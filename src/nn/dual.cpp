#include "nn/dual.h"

#include "core/error.h"
#include "nn/conv.h"
#include "nn/detail.h"
#include "ops/conv.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft::nn {

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
