#include "nn/nn.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "ops/attention.h"
#include "ops/fp8.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {

void Tape::backward() {
  while (!steps_.empty()) {
    // The record dies after it has run, which returns the activations it holds to the arena.
    const Step step = std::move(steps_.back());
    steps_.pop_back();
    if (step.weights.table != nullptr) step.weights.table->enter(step.weights.bucket);
    step.run();
  }
}

GradTarget grad_target(const Var& v) {
  if (v->grad.defined()) return {v->grad, true};
  v->grad = Tensor::empty(v->value.shape(), v->value.dtype());
  return {v->grad, false};
}

Tensor& zeroed_grad(const Var& v) {
  if (!v->grad.defined()) {
    v->grad = Tensor::empty(v->value.shape(), v->value.dtype());
    ops::fill_zero(v->grad);
  }
  return v->grad;
}

void give_grad(const Var& v, Tensor g) {
  if (!v->grad.defined())
    v->grad = std::move(g);
  else
    ops::add_inplace(g, v->grad);
}

Var recompute(Tape& tape, std::function<Var(Tape&)> part) {
  return recompute(tape, [part = std::move(part)](Tape& t) { return std::vector<Var>{part(t)}; })
      .front();
}

std::vector<Var> recompute(Tape& tape, std::function<std::vector<Var>(Tape&)> part) {
  if (!tape.recording()) return part(tape);
  // The results get nodes of their own: those from the second run belong to the inner tape.
  std::vector<Var> out;
  {
    Tape first(Tape::Mode::discard);
    for (const Var& v : part(first)) out.push_back(make_var(v->value));
    if (first.weights().table != nullptr) tape.reads(first.weights());
  }
  tape.record([part = std::move(part), out] {
    Tape second(Tape::Mode::replay);
    std::vector<Var> again = part(second);
    for (std::size_t i = 0; i < out.size(); ++i) again[i]->grad = std::move(out[i]->grad);
    second.backward();
  });
  return out;
}

}  // namespace weft

namespace weft::nn {
namespace {

Shape with_last(const Shape& s, std::int64_t last) {
  std::vector<std::int64_t> dims(s.dims().begin(), s.dims().end());
  dims.back() = last;
  return Shape(std::span<const std::int64_t>(dims));
}

using detail::add_weight_grad, detail::bias_for, detail::note_done, detail::use, detail::weight_for;

// ---- LoRA: what an adapted layer adds to its own product. With B = 0 it adds exact zeros.

const Tensor& copy_of_type(const Parameter& p, DType dtype) {
  return dtype == DType::bf16 ? p.working : p.value;
}

void multiply_by(Tensor& t, float factor) { ops::scaled_add(t, factor, Tensor(), t, false); }

// dw (+)= dy^T x.
void add_grad(Parameter& w, const Tensor& dy, const Tensor& x) {
  if (!w.trainable) return;
  Tensor none;
  ops::linear_backward_weight(dy, x, w.grad, none, w.grad_written);
  w.grad_written = true;
}

// The products of a layer's own weight: y = x w^T + bias (+ residual), dx (+)= dy w.

void weight_product(const Linear& l, const Tensor& x, const Tensor& residual, Tensor& y) {
  const Tensor &w = weight_for(l, x.dtype()), &bias = bias_for(l, x.dtype());
  if (l.fp8) return ops::fp8_linear_forward(x, w, bias, residual, y);
  ops::linear_forward(x, w, bias, residual, y);
}

void input_gradient(const Linear& l, const Tensor& dy, Tensor& dx, bool accumulate) {
  if (l.fp8) return ops::fp8_linear_backward_input(dy, weight_for(l, dy.dtype()), dx, accumulate);
  ops::linear_backward_input(dy, weight_for(l, dy.dtype()), dx, accumulate);
}

// y = x w^T + bias (+ residual) (+ u B^T). Returns u = scale * x A^T [..., rank], which the
// backward wants; undefined without an adapter.
Tensor linear_product(const Linear& l, const Tensor& x, const Tensor& residual, Tensor& y) {
  const DType dtype = x.dtype();
  if (!l.adapted()) {
    weight_product(l, x, residual, y);
    return {};
  }
  const Tensor &a = copy_of_type(*l.lora_a, dtype), &b = copy_of_type(*l.lora_b, dtype);
  Tensor u = Tensor::empty(with_last(x.shape(), a.dim(0)), dtype);
  Tensor own = Tensor::empty(y.shape(), dtype);
  weight_product(l, x, residual, own);
  ops::linear_forward(x, a, Tensor(), Tensor(), u);
  multiply_by(u, l.lora_scale);
  ops::linear_forward(u, b, Tensor(), own, y);
  return u;
}

// dB, and the gradient of x A^T, which is returned: dA is add_grad(A, it, x), and its part of dx
// is lora_input(). Undefined without an adapter.
Tensor lora_backward(const Linear& l, const Tensor& dy, const Tensor& u) {
  if (!l.adapted()) return {};
  add_grad(*l.lora_b, dy, u);
  Tensor du = Tensor::empty(u.shape(), u.dtype());
  ops::linear_backward_input(dy, copy_of_type(*l.lora_b, dy.dtype()), du, false);
  multiply_by(du, l.lora_scale);
  return du;
}

void lora_input(const Linear& l, const Tensor& du, Tensor& dx) {
  if (l.adapted()) ops::linear_backward_input(du, copy_of_type(*l.lora_a, du.dtype()), dx, true);
}

// The backward of a layer: the gradients of its parameters, and its part of x's. `u` as
// linear_product() returned it; `bias` as in add_weight_grad().
void linear_gradients(const Linear& l, const Var& x, const Tensor& u, const Tensor& dy,
                      bool bias = true) {
  const Tensor du = lora_backward(l, dy, u);
  if (l.adapted()) add_grad(*l.lora_a, du, x->value);
  if (!x->needs_grad) return add_weight_grad(l, dy, x->value, bias);
  const auto [dx, accumulate] = grad_target(x);
  if (l.plain() && l.weight->trainable) {
    WEFT_ASSERT(!bias || l.weight->grad_written == l.bias->grad_written);
    Tensor none;
    ops::linear_backward(dy, x->value, weight_for(l, dy.dtype()), l.weight->grad,
                         bias ? l.bias->grad : none, l.weight->grad_written, dx, accumulate);
    l.weight->grad_written = l.bias->grad_written = true;
  } else {
    add_weight_grad(l, dy, x->value, bias);
    input_gradient(l, dy, dx, accumulate);
  }
  lora_input(l, du, dx);
}

void use_all(Context c, const Linear& l) { use(c, {l.weight, l.bias, l.lora_a, l.lora_b}); }
void note_all_done(ParameterTable& table, const Linear& l) {
  note_done(table, {l.weight, l.bias, l.lora_a, l.lora_b});
}

}  // namespace

Var linear(Context c, const Var& x, const Linear& l, const Var& residual) {
  use_all(c, l);
  const Tensor& w = weight_for(l, x->value.dtype());
  WEFT_ASSERT(x->value.dim(-1) == w.numel() / w.dim(0));
  Tensor y = Tensor::empty(with_last(x->value.shape(), w.dim(0)), x->value.dtype());
  const Tensor u = linear_product(l, x->value, residual ? residual->value : Tensor(), y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  if (l.weight->trainable) out->bias = l.bias;
  c.tape.record([x, l, residual, out, u, &table = c.parameters] {
    const Tensor dy = std::move(out->grad);
    linear_gradients(l, x, u, dy, !out->bias_summed);
    if (residual) give_grad(residual, dy);  // last: it may take over dy's memory
    note_all_done(table, l);
  });
  return out;
}

Var mlp(Context c, const Var& x, const Linear& fc1, const Linear& fc2) {
  use_all(c, fc1);
  use_all(c, fc2);
  const DType dtype = x->value.dtype();
  const std::int64_t hidden = fc1.weight->shape[0];
  Tensor z = Tensor::empty(with_last(x->value.shape(), hidden), dtype);
  // Without a backward nothing reads z again: the activation overwrites it.
  Tensor h = c.tape.recording() ? Tensor::empty(z.shape(), dtype) : z;
  Tensor u1;
  if (fc1.plain()) {
    ops::linear_gelu_forward(x->value, weight_for(fc1, dtype), bias_for(fc1, dtype), z, h);
  } else {
    u1 = linear_product(fc1, x->value, Tensor(), z);
    ops::gelu_forward(z, h);
  }
  Tensor y = Tensor::empty(with_last(x->value.shape(), fc2.weight->shape[0]), dtype);
  const Tensor u2 = linear_product(fc2, h, Tensor(), y);
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  if (!c.tape.keep(h.bytes())) h = Tensor();
  if (fc2.weight->trainable) out->bias = fc2.bias;
  c.tape.record([x, z, h, fc1, fc2, u1, u2, out, &table = c.parameters]() mutable {
    const Tensor dy = std::move(out->grad);
    Tensor dz = Tensor::empty(z.shape(), z.dtype());
    const Tensor du2 = lora_backward(fc2, dy, u2);
    Tensor none;
    const bool wants_bias = !out->bias_summed;
    Tensor& dbias = wants_bias ? fc2.bias->grad : none;
    const bool kept = h.defined();
    if (!kept) h = z;  // overwritten with gelu(z)
    bool summed = false;
    if (!fc2.plain()) {
      input_gradient(fc2, dy, dz, false);
      lora_input(fc2, du2, dz);
      ops::gelu_backward(z, dz, dz, kept ? none : h);
      if (fc2.adapted()) add_grad(*fc2.lora_a, du2, h);
      add_weight_grad(fc2, dy, h, wants_bias);
    } else {
      const Tensor& w = weight_for(fc2, dy.dtype());
      // The column sums of dz are fc1's bias gradient.
      summed = fc1.weight->trainable;
      Tensor& sums = summed ? fc1.bias->grad : none;
      if (kept && fc2.weight->trainable) {
        ops::linear_gelu_backward(dy, h, w, z, fc2.weight->grad, dbias, fc2.weight->grad_written,
                                  dz, sums, fc1.bias->grad_written);
        fc2.weight->grad_written = fc2.bias->grad_written = true;
      } else {
        ops::linear_gelu_backward_input(dy, w, z, dz, kept ? none : h, sums,
                                        fc1.bias->grad_written);
        add_weight_grad(fc2, dy, h, wants_bias);
      }
      if (summed) fc1.bias->grad_written = true;
    }
    h.release();
    z.release();
    linear_gradients(fc1, x, u1, dz, !summed);
    note_all_done(table, fc1);
    note_all_done(table, fc2);
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
      if (b->value.dtype() != DType::f32) {
        Tensor db = Tensor::empty(b->value.shape(), b->value.dtype());
        ops::convert(out->grad, db);
        give_grad(b, std::move(db));
        return give_grad(a, std::move(out->grad));
      }
      // Two owners of one gradient would overwrite each other: a gets a copy.
      ops::add_inplace(out->grad, zeroed_grad(a));
      give_grad(b, std::move(out->grad));
    });
  return out;
}

Var modulation(Context c, Parameter& table, const Var& t) {
  use(c, {&table});
  const std::int64_t groups = t->value.dim(0);
  const std::int64_t C = table.shape[table.shape.rank() - 1];
  Tensor m = Tensor::empty({groups, table.shape.numel() / C, C}, DType::f32);
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
                        int scale, int first_row, std::optional<DType> dtype) {
  const std::int64_t channels = x->value.dim(-1);
  Tensor y = Tensor::empty(x->value.shape(), dtype.value_or(x->value.dtype()));
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

Var layer_norm_affine(Context c, const Var& x, Parameter& w, Parameter& b,
                      std::optional<DType> dtype) {
  use(c, {&w, &b});
  Tensor y = Tensor::empty(x->value.shape(), dtype.value_or(x->value.dtype()));
  Tensor stats = Tensor::empty({x->value.numel() / x->value.dim(-1), 2}, DType::f32);
  ops::layer_norm_affine_forward(x->value, w.value, b.value, y, stats);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, &w, &b, stats, out, &table = c.parameters] {
      const Tensor dy = std::move(out->grad);
      const auto [dx, accumulate] = grad_target(x);
      Tensor none;
      ops::layer_norm_affine_backward(x->value, w.value, stats, dy, dx, accumulate,
                                      w.trainable ? w.grad_to_add() : none,
                                      b.trainable ? b.grad_to_add() : none);
      note_done(table, {&w, &b});
    });
  return out;
}

Var rms_rope(Context c, const Var& x, Parameter& w, const Tensor& rope, int heads) {
  constexpr float eps = 1e-6f;
  use(c, {&w});
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::rms_rope_forward(x->value, w.value, rope, heads, eps, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, &w, rope, heads, out, &table = c.parameters] {
      Tensor g = std::move(out->grad), none;
      ops::rms_rope_backward(x->value, w.value, rope, heads, eps, g, g,
                             w.trainable ? w.grad_to_add() : none);
      give_grad(x, std::move(g));
      note_done(table, {&w});
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
      Parameter* const bias = p->bias;
      Tensor none;
      ops::gate_residual_backward(out->grad, p->value, m->value, rows, gate, keep, p->grad,
                                  zeroed_grad(m), bias != nullptr ? bias->grad : none,
                                  bias != nullptr && bias->grad_written);
      if (bias != nullptr) bias->grad_written = p->bias_summed = true;
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
  Tensor qk;
  if (const Shape shape = ops::qk_shape(s);
      c.tape.recording() && ops::keeps_qk(wq, rope, axis) &&
      c.tape.keep(static_cast<std::size_t>(shape.numel()) * size_of(dtype)))
    qk = Tensor::empty(shape, dtype);
  ops::self_attention_forward(qkv->value, wq, wk, rope, axis, out, lse, qk);
  const Var result = make_var(out);
  if (c.tape.recording())
    c.tape.record([qkv, wq, wk, q_norm, k_norm, rope, axis, result, lse, qk,
                   &table = c.parameters]() mutable {
      const Tensor dout = std::move(result->grad);
      Tensor dqkv = Tensor::empty(qkv->value.shape(), qkv->value.dtype());
      Tensor none_q, none_k;
      const bool learn = q_norm && q_norm->trainable;
      ops::self_attention_backward(qkv->value, wq, wk, rope, axis, result->value, lse, dout, dqkv,
                                   learn ? q_norm->grad_to_add() : none_q,
                                   learn ? k_norm->grad_to_add() : none_k, qk);
      qk.release();
      give_grad(qkv, dqkv);
      note_done(table, {q_norm, k_norm});
    });
  return result;
}

Var attention(Context c, const Var& q, const Var& k, const Var& v, const Tensor& offsets,
              const Tensor& last_bias, int heads) {
  const Shape& s = q->value.shape();  // [B,N,C]
  WEFT_ASSERT(s.rank() == 3 && s[2] % heads == 0 && k->value.shape() == v->value.shape());
  const DType dtype = q->value.dtype();
  WEFT_ASSERT(k->value.dim(-1) == s[2] && k->value.dtype() == dtype && v->value.dtype() == dtype);
  Tensor out = Tensor::empty(s, dtype), lse = Tensor::empty({s[0], heads, s[1]}, DType::f32);
  ops::attention_forward(q->value, k->value, v->value, offsets, last_bias, heads, out, lse);
  const Var result = make_var(out);
  if (c.tape.recording())
    c.tape.record([q, k, v, offsets, last_bias, heads, result, lse] {
      const Tensor dout = std::move(result->grad);
      const auto like = [](const Var& x) {
        return Tensor::empty(x->value.shape(), x->value.dtype());
      };
      Tensor dq = like(q), dk = like(k), dv = like(v);
      ops::attention_backward(q->value, k->value, v->value, offsets, last_bias, heads,
                              result->value, lse, dout, dq, dk, dv);
      give_grad(q, dq);
      give_grad(k, dk);
      give_grad(v, dv);
    });
  return result;
}

Var unpatchify(Context c, const Var& rows, ops::PatchGeometry patch, const Shape& shape) {
  Tensor out = Tensor::empty(shape, DType::f32);
  ops::unpatchify_forward(rows->value, patch, out);
  const Var result = make_var(out);
  if (c.tape.recording())
    c.tape.record([rows, result, patch] {
      rows->grad = Tensor::empty(rows->value.shape(), rows->value.dtype());
      ops::unpatchify_backward(result->grad, patch, rows->grad);
      result->grad.release();
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

namespace {

// A weight for activations of `dtype` as f32. An adapted one, of an f32 model, is w + scale * B A.
Tensor whole_weight(const Linear& l, DType dtype) {
  if (!l.adapted()) return ops::converted(weight_for(l, dtype), DType::f32);
  Tensor w = Tensor::empty(l.weight->shape, DType::f32);
  Tensor b = Tensor::empty(l.lora_b->shape, DType::f32);
  ops::convert(l.weight->value, w);
  ops::scaled_add(l.lora_b->value, l.lora_scale, Tensor(), b, false);
  ops::linear_backward_input(b, l.lora_a->value, w, true);
  return w;
}

// Where absorb_backward() is to add the gradient of such a weight: undefined if nothing of it is
// trained. The place for an adapted weight is a tensor of its own, for give_whole_gradient().
Tensor whole_gradient(const Linear& l) {
  if (!l.adapted()) return l.weight->trainable ? l.weight->grad_to_add() : Tensor();
  Tensor dw = Tensor::empty(l.weight->shape, DType::f32);
  ops::fill_zero(dw);
  return dw;
}

// dB (+)= scale * dw A^T, dA (+)= scale * B^T dw.
void give_whole_gradient(const Linear& l, Tensor& dw) {
  if (!l.adapted()) return;
  multiply_by(dw, l.lora_scale);
  Tensor db = Tensor::empty(l.lora_b->shape, DType::f32);
  ops::linear_forward(dw, l.lora_a->value, Tensor(), Tensor(), db);
  ops::add_inplace(db, l.lora_b->grad_to_add());
  add_grad(*l.lora_a, l.lora_b->value, dw);
}

std::int64_t padded(std::int64_t length) {
  return (length + ops::absorbed_padding - 1) / ops::absorbed_padding * ops::absorbed_padding;
}

// Absorbed, a token costs 4 C H Lp operations a block instead of 4 C^2 + 4 C L: worth it up to
// about 3/4. In a bf16 model the products of captions and weights are f32, 12 C^2 L operations at
// half the rate, so that there must be tokens enough to repay them. On GPUs the plain form is the
// faster one (large products, one attention kernel), and the only one.
bool worth_absorbing(const Tensor& x, const CrossAttention& w,
                     const std::vector<std::int64_t>& lengths, int heads) {
  const std::int64_t C = x.dim(-1), tokens = x.dim(1) * x.dim(2);
  const bool bf16 = x.dtype() != DType::f32;
  if (Arena::current().device() == DeviceKind::cuda || C % ops::absorbed_padding != 0 ||
      (bf16 && !(w.q.plain() && w.proj.plain())))
    return false;
  return std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t length) {
    return length > 0 && 4 * heads * padded(length) <= 3 * C && (!bf16 || tokens >= 16 * length);
  });
}

// What a dry run, which counts operations by shapes, is shown of kv: the captions' rows, without
// the padding behind them.
Tensor rows_of(const Tensor& kv, const std::vector<std::int64_t>& lengths) {
  if (!ops::planning()) return kv;
  return kv.slice(0, std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
}

// q [B,N,C], kv [sum L, 2C] -> [B,N,C].
Var attend(Context c, const Var& q, const Var& kv, const Tensor& offsets,
           const std::vector<std::int64_t>& lengths, int heads) {
  const Shape& s = q->value.shape();
  Tensor out = Tensor::empty(s, q->value.dtype());
  Tensor lse = Tensor::empty({s[0] * s[1] * heads}, DType::f32);
  ops::cross_attention_forward(q->value, rows_of(kv->value, lengths), offsets, heads, out, lse);
  const Var result = make_var(out);
  if (c.tape.recording())
    c.tape.record([q, kv, offsets, lengths, heads, result, lse] {
      const Tensor dout = std::move(result->grad);
      Tensor dq = Tensor::empty(q->value.shape(), q->value.dtype());
      Tensor dkv = Tensor::empty(kv->value.shape(), kv->value.dtype());
      ops::cross_attention_backward(q->value, rows_of(kv->value, lengths), offsets, heads,
                                    result->value, lse, dout, dq, dkv);
      give_grad(q, dq);
      give_grad(kv, dkv);
    });
  return result;
}

// One sample of the absorbed form: its tokens and caption rows, and what the backward needs.
struct Sample {
  std::int64_t first_row, rows;  // of kv
  Tensor a, a0, b, p;
};

Var attend_absorbed(Context c, const Var& x, const Var& kv, const CrossAttention& w,
                    const std::vector<std::int64_t>& lengths, int heads) {
  use_all(c, w.q);
  use_all(c, w.proj);
  const Shape& s = x->value.shape();
  const std::int64_t B = s[0], N = s[1] * s[2], C = s[3], D = C / heads;
  const DType dtype = x->value.dtype();
  const auto tokens = [B, N, C](const Tensor& t, std::int64_t b) {
    return t.view({B * N, C}).slice(b * N, (b + 1) * N);
  };
  const auto rows = [heads, D](const Tensor& t, const Sample& of) {
    return t.slice(of.first_row, of.first_row + of.rows).view({of.rows, 2, heads, D});
  };
  Tensor y = Tensor::empty(s, dtype);
  const Tensor wq = whole_weight(w.q, dtype), wo = whole_weight(w.proj, dtype);
  const Tensor bq = ops::converted(bias_for(w.q, dtype), DType::f32);
  std::vector<Sample> samples;
  std::int64_t first_row = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    Sample m;
    m.first_row = first_row;
    m.rows = lengths[b];
    first_row += m.rows;
    const std::int64_t columns = heads * padded(m.rows);
    m.a = Tensor::empty({columns, C}, dtype);
    m.a0 = Tensor::empty({columns}, DType::f32);
    m.b = Tensor::empty({C, columns}, dtype);
    m.p = Tensor::empty({N, columns}, dtype);
    ops::absorb_forward(rows(kv->value, m), wq, bq, wo, m.a, m.a0, m.b);
    const Tensor xb = tokens(x->value, b);
    Tensor yb = tokens(y, b);
    // Scores stay f32, as they do in attention: the CPU's product makes them so of bf16, and what
    // is rounded is probabilities.
    Tensor scores = dtype == DType::f32 ? m.p : Tensor::empty(m.p.shape(), DType::f32);
    ops::linear_forward(xb, m.a, m.a0, Tensor(), scores);
    ops::head_softmax_forward(scores, heads, static_cast<int>(m.rows));
    if (dtype != DType::f32) ops::convert(scores, m.p);
    scores.release();
    ops::linear_forward(m.p, m.b, bias_for(w.proj, dtype), xb, yb);
    if (c.tape.recording()) samples.push_back(std::move(m));
  }
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, kv, w, heads, samples = std::move(samples), tokens, rows, out,
                 &table = c.parameters]() mutable {
    const Tensor dy = std::move(out->grad);
    Tensor none, dkv = Tensor::empty(kv->value.shape(), kv->value.dtype());
    if (w.proj.bias->trainable) {
      ops::bias_gradient(dy, w.proj.bias->grad, w.proj.bias->grad_written);
      w.proj.bias->grad_written = true;
    }
    Tensor dwq = whole_gradient(w.q), dwo = whole_gradient(w.proj);
    // Computed again: kept from the forward, they would take the memory of a weight a block.
    const DType dtype = x->value.dtype();
    const Tensor wq = whole_weight(w.q, dtype), wo = whole_weight(w.proj, dtype);
    const Tensor bq = ops::converted(bias_for(w.q, dtype), DType::f32);
    // absorb_backward() wants both of q's gradients or none.
    Tensor dbq = w.q.bias->trainable ? w.q.bias->grad_to_add()
                 : dwq.defined()     ? Tensor::empty(w.q.bias->shape, DType::f32)
                                     : Tensor();
    if (dbq.defined() && !w.q.bias->trainable) ops::fill_zero(dbq);
    // The residual: x's gradient starts as dy, possibly the same memory. Each sample's part of dy
    // is read before its part of dx is added to.
    give_grad(x, dy);
    for (std::size_t b = 0; b < samples.size(); ++b) {
      Sample& m = samples[b];
      const auto index = static_cast<std::int64_t>(b);
      const Tensor dyb = tokens(dy, index), xb = tokens(x->value, index);
      Tensor dxb = tokens(x->grad, index);
      Tensor dp = Tensor::empty(m.p.shape(), m.p.dtype());
      ops::linear_backward_input(dyb, m.b, dp, false);
      Tensor db = Tensor::empty(m.b.shape(), DType::f32);
      ops::linear_backward_weight(dyb, m.p, db, none, false);
      ops::head_softmax_backward(m.p, dp, heads);
      m.p.release();
      Tensor da = Tensor::empty(m.a.shape(), DType::f32);
      Tensor da0 = Tensor::empty(m.a0.shape(), DType::f32);
      ops::linear_backward_weight(dp, xb, da, da0, false);
      ops::linear_backward_input(dp, m.a, dxb, true);
      Tensor dkvb = rows(dkv, m);
      ops::absorb_backward(rows(kv->value, m), wq, bq, wo, da, da0, db, dkvb, dwq, dbq, dwo);
    }
    give_whole_gradient(w.q, dwq);
    give_whole_gradient(w.proj, dwo);
    give_grad(kv, dkv);
    note_all_done(table, w.q);
    note_all_done(table, w.proj);
  });
  return out;
}

}  // namespace

Var cross_attention(Context c, const Var& x, const Var& y, const CrossAttention& w,
                    const Tensor& offsets, const std::vector<std::int64_t>& lengths, int heads) {
  const Shape s = x->value.shape();
  WEFT_ASSERT(s.rank() == 4 && static_cast<std::int64_t>(lengths.size()) == s[0]);
  const Var kv = linear(c, y, w.kv);
  if (worth_absorbing(x->value, w, lengths, heads))
    return attend_absorbed(c, x, kv, w, lengths, heads);
  const Var q = view(c, linear(c, x, w.q), {s[0], s[1] * s[2], s[3]});
  return linear(c, view(c, attend(c, q, kv, offsets, lengths, heads), s), w.proj, x);
}

}  // namespace weft::nn
