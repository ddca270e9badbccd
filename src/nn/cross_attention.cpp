#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "nn/detail.h"
#include "nn/nn.h"
#include "ops/attention.h"
#include "ops/matmul.h"

namespace weft::nn {
namespace {

using detail::note_done, detail::use;

std::int64_t padded(std::int64_t length) {
  return (length + ops::absorbed_padding - 1) / ops::absorbed_padding * ops::absorbed_padding;
}

// Absorbed, a token costs 4 C H Lp operations a block instead of 4 C^2 + 4 C L: worth it up to
// about 3/4. On GPUs the plain form is the faster one (large products, one attention kernel), and
// the only one. It reads weights in f32, which a bf16 model does not keep on every rank.
bool worth_absorbing(const Tensor& x, const std::vector<std::int64_t>& lengths, int heads) {
  const std::int64_t C = x.dim(-1);
  if (Arena::current().device() == DeviceKind::cuda || x.dtype() != DType::f32 ||
      C % ops::absorbed_padding != 0)
    return false;
  return std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t length) {
    return length > 0 && 4 * heads * padded(length) <= 3 * C;
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
  use(c, {w.q.weight, w.q.bias, w.proj.weight, w.proj.bias});
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
  std::vector<Sample> samples;
  std::int64_t first_row = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    Sample m;
    m.first_row = first_row;
    m.rows = lengths[static_cast<std::size_t>(b)];
    first_row += m.rows;
    const std::int64_t columns = heads * padded(m.rows);
    m.a = Tensor::empty({columns, C}, dtype);
    m.a0 = Tensor::empty({columns}, DType::f32);
    m.b = Tensor::empty({C, columns}, dtype);
    m.p = Tensor::empty({N, columns}, dtype);
    ops::absorb_forward(rows(kv->value, m), w.q.weight->value, w.q.bias->value,
                        w.proj.weight->value, m.a, m.a0, m.b);
    const Tensor xb = tokens(x->value, b);
    Tensor yb = tokens(y, b);
    ops::linear_forward(xb, m.a, m.a0, Tensor(), m.p);
    ops::head_softmax_forward(m.p, heads, static_cast<int>(m.rows));
    ops::linear_forward(m.p, m.b, w.proj.bias->value, xb, yb);
    if (c.tape.recording()) samples.push_back(std::move(m));
  }
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, kv, w, heads, samples = std::move(samples), tokens, rows, out,
                 &table = c.parameters]() mutable {
    const Tensor dy = std::move(out->grad);
    const bool learn = w.q.weight->trainable;
    Tensor none, dkv = Tensor::empty(kv->value.shape(), kv->value.dtype());
    if (learn) {
      ops::bias_gradient(dy, w.proj.bias->grad, w.proj.bias->grad_written);
      w.proj.bias->grad_written = true;
    }
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
      ops::absorb_backward(
          rows(kv->value, m), w.q.weight->value, w.q.bias->value, w.proj.weight->value, da, da0, db,
          dkvb, learn ? w.q.weight->grad_to_add() : none, learn ? w.q.bias->grad_to_add() : none,
          learn ? w.proj.weight->grad_to_add() : none);
    }
    give_grad(kv, dkv);
    note_done(table, {w.q.weight, w.q.bias, w.proj.weight, w.proj.bias});
  });
  return out;
}

}  // namespace

Var cross_attention(Context c, const Var& x, const Var& y, const CrossAttention& w,
                    const Tensor& offsets, const std::vector<std::int64_t>& lengths, int heads) {
  const Shape s = x->value.shape();
  WEFT_ASSERT(s.rank() == 4 && static_cast<std::int64_t>(lengths.size()) == s[0]);
  const Var kv = linear(c, y, w.kv);
  if (worth_absorbing(x->value, lengths, heads))
    return attend_absorbed(c, x, kv, w, lengths, heads);
  const Var q = view(c, linear(c, x, w.q), {s[0], s[1] * s[2], s[3]});
  return linear(c, view(c, attend(c, q, kv, offsets, lengths, heads), s), w.proj, x);
}

}  // namespace weft::nn
