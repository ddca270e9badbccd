#include "nn/nn.h"

#include "core/error.h"
#include "nn/detail.h"
#include "ops/attention.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft::nn {
namespace {

Shape with_last(const Shape& s, std::int64_t last) {
  std::vector<std::int64_t> dims(s.dims().begin(), s.dims().end());
  dims.back() = last;
  return Shape(std::span<const std::int64_t>(dims));
}

using detail::add_weight_grad, detail::bias_for, detail::note_done, detail::use, detail::weight_for;

}  // namespace

Var linear(Context c, const Var& x, const Linear& l, const Var& residual) {
  use(c, {l.weight, l.bias});
  const Tensor& w = weight_for(l, x->value.dtype());
  WEFT_ASSERT(x->value.dim(-1) == w.numel() / w.dim(0));
  Tensor y = Tensor::empty(with_last(x->value.shape(), w.dim(0)), x->value.dtype());
  ops::linear_forward(x->value, w, bias_for(l, y.dtype()), residual ? residual->value : Tensor(),
                      y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, l, residual, out, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    add_weight_grad(l, dy, x->value);
    if (x->needs_grad) {
      const auto [dx, accumulate] = grad_target(x);
      ops::linear_backward_input(dy, weight_for(l, dy.dtype()), dx, accumulate);
    }
    if (residual) give_grad(residual, dy);  // last: it may take over dy's memory
    note_done(table, {l.weight, l.bias});
  });
  return out;
}

Var mlp(Context c, const Var& x, const Linear& fc1, const Linear& fc2) {
  use(c, {fc1.weight, fc1.bias, fc2.weight, fc2.bias});
  const DType dtype = x->value.dtype();
  const std::int64_t hidden = fc1.weight->shape[0];
  Tensor z = Tensor::empty(with_last(x->value.shape(), hidden), dtype);
  // Without a backward nothing reads z again: the activation overwrites it.
  Tensor h = c.tape.recording() ? Tensor::empty(z.shape(), dtype) : z;
  ops::linear_gelu_forward(x->value, weight_for(fc1, dtype), bias_for(fc1, dtype), z, h);
  Tensor y = Tensor::empty(with_last(x->value.shape(), fc2.weight->shape[0]), dtype);
  ops::linear_forward(h, weight_for(fc2, dtype), bias_for(fc2, dtype), Tensor(), y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, z, fc1, fc2, out, &table = c.parameters]() mutable {
    const Tensor dy = std::move(out->grad);
    Tensor dz = Tensor::empty(z.shape(), z.dtype());
    ops::linear_gelu_backward_input(dy, weight_for(fc2, dy.dtype()), z, dz,
                                    z);  // z becomes gelu(z)
    add_weight_grad(fc2, dy, z);
    z.release();
    add_weight_grad(fc1, dz, x->value);
    if (x->needs_grad) {
      const auto [dx, accumulate] = grad_target(x);
      ops::linear_backward_input(dz, weight_for(fc1, dy.dtype()), dx, accumulate);
    }
    note_done(table, {fc1.weight, fc1.bias, fc2.weight, fc2.bias});
  });
  return out;
}

Var silu(Context c, const Var& x) {
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::silu_forward(x->value, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, out] {
      const auto [dx, accumulate] = grad_target(x);
      ops::silu_backward(x->value, out->grad, dx, accumulate);
      out->grad.release();
    });
  return out;
}

Var add(Context c, const Var& a, const Var& b) {
  Tensor y = Tensor::empty(a->value.shape(), DType::f32);
  ops::add_rows(a->value, b->value, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([a, b, out] {
      // Two owners of one gradient would overwrite each other: a gets a copy.
      ops::add_inplace(out->grad, zeroed_grad(a));
      give_grad(b, std::move(out->grad));
    });
  return out;
}

Var modulation(Context c, Parameter& table, const Var& t) {
  use(c, {&table});
  const std::int64_t groups = t->value.dim(0);
  Tensor m = Tensor::empty({groups, table.shape[0], table.shape[1]}, DType::f32);
  ops::modulation_forward(table.value, t->value, m);
  const Var out = make_var(m);
  if (c.tape.recording())
    c.tape.record([t, &table, out, &parameters = c.parameters] {
      Tensor none;
      ops::modulation_backward(zeroed_grad(out), table.trainable ? table.grad_to_add() : none,
                               zeroed_grad(t));
      out->grad.release();
      note_done(parameters, {&table});
    });
  return out;
}

Var layer_norm_modulate(Context c, const Var& x, const Var& m, const Tensor& rows, int shift,
                        int scale, int first_row) {
  const std::int64_t channels = x->value.dim(-1);
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  Tensor stats = Tensor::empty({x->value.numel() / channels, 2}, DType::f32);
  ops::layer_norm_modulate_forward(x->value, m->value, rows, shift, scale, first_row, y, stats);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, m, rows, shift, scale, first_row, stats, out] {
      const Tensor dy = std::move(out->grad);
      const auto [dx, accumulate] = grad_target(x);
      ops::layer_norm_modulate_backward(x->value, m->value, rows, shift, scale, first_row, stats,
                                        dy, dx, accumulate, zeroed_grad(m));
    });
  return out;
}

Var gate_residual(Context c, const Var& x, const Var& p, const Var& m, const Tensor& rows, int gate,
                  const Tensor& keep) {
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::gate_residual_forward(x->value, p->value, m->value, rows, gate, keep, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, p, m, rows, gate, keep, out] {
      // p's value is no longer needed: its gradient reuses that memory.
      p->grad = p->value;
      ops::gate_residual_backward(out->grad, p->value, m->value, rows, gate, keep, p->grad,
                                  zeroed_grad(m));
      give_grad(x, std::move(out->grad));
    });
  return out;
}

Var self_attention(Context c, const Var& qkv, Parameter* q_norm, Parameter* k_norm,
                   const Tensor& rope, ops::Axis axis) {
  use(c, {q_norm, k_norm});
  const Shape& s = qkv->value.shape();  // [B,T,S,3,H,D]
  WEFT_ASSERT(s.rank() == 6 && s[3] == 3);
  const DType dtype = qkv->value.dtype();
  Tensor out = Tensor::empty({s[0], s[1], s[2], s[4] * s[5]}, dtype);
  const std::int64_t length = axis == ops::Axis::space ? s[2] : s[1];
  Tensor lse = Tensor::empty({s[0] * s[1] * s[2] / length, s[4], length}, DType::f32);
  const Tensor wq = q_norm ? q_norm->value : Tensor(), wk = k_norm ? k_norm->value : Tensor();
  ops::self_attention_forward(qkv->value, wq, wk, rope, axis, out, lse);
  const Var result = make_var(out);
  if (c.tape.recording())
    c.tape.record([qkv, wq, wk, q_norm, k_norm, rope, axis, result, lse, &table = c.parameters] {
      const Tensor dout = std::move(result->grad);
      Tensor dqkv = Tensor::empty(qkv->value.shape(), qkv->value.dtype());
      Tensor none_q, none_k;
      const bool learn = q_norm && q_norm->trainable;
      ops::self_attention_backward(qkv->value, wq, wk, rope, axis, result->value, lse, dout, dqkv,
                                   learn ? q_norm->grad_to_add() : none_q,
                                   learn ? k_norm->grad_to_add() : none_k);
      give_grad(qkv, dqkv);
      note_done(table, {q_norm, k_norm});
    });
  return result;
}

Var view(Context c, const Var& x, const Shape& shape) {
  const Var out = make_var(x->value.view(shape), x->needs_grad);
  if (c.tape.recording())
    c.tape.record([x, out] {
      if (out->grad.defined()) give_grad(x, out->grad.view(x->value.shape()));
      out->grad.release();
    });
  return out;
}

}  // namespace weft::nn
