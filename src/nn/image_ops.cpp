#include "nn/image_ops.h"

#include <algorithm>

#include "core/error.h"
#include "nn/nn.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft::nn {

namespace {

// [N,T,height,width,C] of x's N, T, C and type.
Tensor resized_like(const Tensor& x, std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(x.shape().rank() == 5);
  return Tensor::empty({x.dim(0), x.dim(1), height, width, x.dim(4)}, x.dtype());
}

bool same_size(const Tensor& a, const Tensor& b) {
  return a.dim(2) == b.dim(2) && a.dim(3) == b.dim(3);
}

// The result `y` of an operation on x; back(dy) sends x's gradient on.
template <class Back>
Var result(Context c, const Var& x, const Tensor& y, Back back) {
  const Var out = make_var(y, x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([out, back] { back(Tensor(std::move(out->grad))); });
  return out;
}

}  // namespace

Var max_pool_3x3(Context c, const Var& x) {
  const ops::PoolWindow window{3, 2, 1};
  Tensor y = resized_like(x->value, window.count(x->value.dim(2)), window.count(x->value.dim(3)));
  ops::max_pool_window_forward(x->value, window, y);
  return result(c, x, y, [x, window](const Tensor& dy) {
    Tensor dx = Tensor::empty(x->value.shape(), x->value.dtype());
    ops::max_pool_window_backward(x->value, window, dy, dx);
    give_grad(x, std::move(dx));
  });
}

Var adaptive_average_pool(Context c, const Var& x, int size) {
  Tensor y = resized_like(x->value, size, size);
  ops::adaptive_pool_forward(x->value, y);
  return result(c, x, y, [x](const Tensor& dy) {
    const auto [dx, accumulate] = grad_target(x);
    ops::adaptive_pool_backward(dy, dx, accumulate);
  });
}

Var average_pool_2x2(Context c, const Var& x) {
  WEFT_ASSERT(x->value.dim(2) % 2 == 0 && x->value.dim(3) % 2 == 0);
  Tensor y = resized_like(x->value, x->value.dim(2) / 2, x->value.dim(3) / 2);
  ops::average_pool_2x2_forward(x->value, y);
  return result(c, x, y, [x](const Tensor& dy) {
    const auto [dx, accumulate] = grad_target(x);
    ops::average_pool_2x2_backward(dy, dx, accumulate);
  });
}

Var resize_bilinear(Context c, const Var& x, std::int64_t height, std::int64_t width) {
  if (x->value.dim(2) == height && x->value.dim(3) == width) return x;
  Tensor y = resized_like(x->value, height, width);
  ops::bilinear_forward(x->value, y, false);
  return result(c, x, y, [x](const Tensor& dy) {
    const auto [dx, accumulate] = grad_target(x);
    ops::bilinear_backward(dy, dx, accumulate);
  });
}

Var join_channels(Context c, const std::vector<Var>& pieces) {
  const Shape& s = pieces.front()->value.shape();
  std::int64_t channels = 0;
  bool needs_grad = false;
  for (const Var& p : pieces) {
    const Shape& t = p->value.shape();
    WEFT_ASSERT(t.rank() == 5 && t[0] == s[0] && t[1] == s[1] && t[2] == s[2] && t[3] == s[3]);
    channels += t[4];
    needs_grad = needs_grad || p->needs_grad;
  }
  Tensor y = Tensor::empty({s[0], s[1], s[2], s[3], channels}, pieces.front()->value.dtype());
  std::int64_t first = 0;
  for (const Var& p : pieces) {
    ops::put_channels(p->value, first, y);
    first += p->value.dim(4);
  }
  const Var out = make_var(y, needs_grad);
  if (c.tape.recording() && needs_grad)
    c.tape.record([pieces, out] {
      const Tensor dy = std::move(out->grad);
      std::int64_t at = 0;
      for (const Var& p : pieces) {
        if (p->needs_grad) {
          const auto [d, accumulate] = grad_target(p);
          ops::take_channels(dy, at, d, accumulate);
        }
        at += p->value.dim(4);
      }
    });
  return out;
}

namespace {

// The sum, and whether any of the terms needs a gradient.
Var plain_sum(const std::vector<Var>& terms) {
  const Tensor& first = terms.front()->value;
  Tensor y = Tensor::empty(first.shape(), first.dtype());
  bool needs_grad = false;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const Tensor& x = terms[i]->value;
    WEFT_ASSERT(x.dim(0) == y.dim(0) && x.dim(4) == y.dim(4));
    ops::bilinear_forward(x, y, i > 0);
    needs_grad = needs_grad || terms[i]->needs_grad;
  }
  return make_var(y, needs_grad);
}

// Sends the sum's gradient d to every term; the last of the sum's own size takes d's memory.
void give_terms(const std::vector<Var>& terms, Tensor d) {
  std::size_t last = terms.size();
  for (std::size_t i = 0; i < terms.size(); ++i)
    if (terms[i]->needs_grad && same_size(terms[i]->value, d)) last = i;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    if (!terms[i]->needs_grad || i == last) continue;
    const auto [dt, accumulate] = grad_target(terms[i]);
    ops::bilinear_backward(d, dt, accumulate);
  }
  if (last < terms.size()) give_grad(terms[last], std::move(d));
}

}  // namespace

Var sum_terms(Context c, const std::vector<Var>& terms) {
  const Var out = plain_sum(terms);
  if (c.tape.recording() && out->needs_grad)
    c.tape.record([terms, out] { give_terms(terms, std::move(out->grad)); });
  return out;
}

Var sum_relu(Context c, const std::vector<Var>& terms) {
  const Var out = plain_sum(terms);
  ops::leaky_relu_forward(out->value, 0.0f, out->value);
  if (c.tape.recording() && out->needs_grad)
    c.tape.record([terms, out] {
      Tensor d = std::move(out->grad);
      ops::leaky_relu_backward(out->value, 0.0f, d, d);
      give_terms(terms, std::move(d));
    });
  return out;
}

Var add_upsampled(Context c, const Var& a, const Var& b) {
  Tensor y = a->value;
  WEFT_ASSERT(y.dim(0) == b->value.dim(0) && y.dim(1) == b->value.dim(1) &&
              y.dim(4) == b->value.dim(4));
  ops::nearest_forward(b->value, 0, y, true);
  const Var out = make_var(y, a->needs_grad || b->needs_grad);
  if (c.tape.recording() && out->needs_grad)
    c.tape.record([a, b, out] {
      Tensor dy = std::move(out->grad);
      if (b->needs_grad) {
        const auto [db, accumulate] = grad_target(b);
        ops::nearest_backward(dy, 0, db, accumulate);
      }
      if (a->needs_grad) give_grad(a, std::move(dy));
    });
  return out;
}

Var join_upsampled(Context c, const std::vector<Var>& maps) {
  const Shape& s = maps.front()->value.shape();
  std::int64_t channels = 0;
  bool needs_grad = false;
  for (const Var& m : maps) {
    WEFT_ASSERT(m->value.dim(0) == s[0] && m->value.dim(1) == s[1]);
    channels += m->value.dim(4);
    needs_grad = needs_grad || m->needs_grad;
  }
  Tensor y = Tensor::empty({s[0], s[1], s[2], s[3], channels}, maps.front()->value.dtype());
  std::int64_t first = 0;
  for (const Var& m : maps) {
    ops::nearest_forward(m->value, first, y, false);
    first += m->value.dim(4);
  }
  const Var out = make_var(y, needs_grad);
  if (c.tape.recording() && needs_grad)
    c.tape.record([maps, out] {
      const Tensor dy = std::move(out->grad);
      std::int64_t at = 0;
      for (const Var& m : maps) {
        if (m->needs_grad) {
          const auto [d, accumulate] = grad_target(m);
          ops::nearest_backward(dy, at, d, accumulate);
        }
        at += m->value.dim(4);
      }
    });
  return out;
}

Var conv_transpose_2x2(Context c, const Var& x, const ConvWeights& w) {
  detail::use(c, {w.weight, w.bias});
  const Shape s = x->value.shape();
  const DType dtype = x->value.dtype();
  const std::int64_t channels = w.weight->shape[1];
  WEFT_ASSERT(s.rank() == 5 && w.weight->shape == (Shape{s[4], channels, 2, 2}));
  const auto weight = [w, dtype]() -> const Tensor& {
    return dtype == DType::bf16 ? w.weight->working : w.weight->value;
  };
  Tensor y = Tensor::empty({s[0], s[1], 2 * s[2], 2 * s[3], channels}, dtype);
  const Shape products{s[0], s[1], s[2], s[3], 4 * channels};
  {
    // The weights lie as those of a linear layer's backward: [in, 4 out].
    Tensor rows = Tensor::empty(products, dtype);
    ops::linear_backward_input(x->value, weight(), rows, false);
    ops::spread_2x2_forward(rows, w.bias ? w.bias->value : Tensor(), y);
  }
  const Var out = make_var(y);
  if (!c.tape.recording()) return out;
  c.tape.record([x, w, weight, products, dtype, out, &table = c.parameters] {
    Tensor dy = std::move(out->grad);
    if (w.bias && w.bias->trainable) {
      ops::bias_gradient(dy, w.bias->grad, w.bias->grad_written);
      w.bias->grad_written = true;
    }
    Tensor drows = Tensor::empty(products, dtype);
    ops::spread_2x2_backward(dy, drows);
    dy.release();
    if (w.weight->trainable) {
      Tensor none;
      ops::linear_backward_weight(x->value, drows, w.weight->grad, none, w.weight->grad_written);
      w.weight->grad_written = true;
    }
    if (x->needs_grad) {
      Tensor dx = Tensor::empty(x->value.shape(), dtype);
      ops::linear_forward(drows, weight(), Tensor(), Tensor(), dx);
      give_grad(x, std::move(dx));
    }
    detail::note_done(table, {w.weight, w.bias});
  });
  return out;
}

Var sigmoid(Context c, const Var& x) {
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::sigmoid_forward(x->value, y);
  return result(c, x, y, [x, y](Tensor d) {
    ops::sigmoid_backward(y, d, d);
    give_grad(x, std::move(d));
  });
}

namespace {

// The sums over each sample's pixels of d, as the gradient of v [N,1,1,1,C].
void give_channel_sums(const Var& v, const Tensor& d) {
  const Shape& s = d.shape();
  Tensor sums = Tensor::empty({s[0], s[4]}, DType::f32);
  const Tensor rows = d.view({s[0], s[1] * s[2] * s[3], s[4]});
  for (std::int64_t n = 0; n < s[0]; ++n) {
    Tensor of_sample = sums.slice(n, n + 1);
    ops::bias_gradient(rows.slice(n, n + 1), of_sample, false);
  }
  Tensor g = sums.view(v->value.shape());
  if (d.dtype() != DType::f32) {
    g = Tensor::empty(v->value.shape(), d.dtype());
    ops::convert(sums, g);
  }
  give_grad(v, std::move(g));
}

}  // namespace

Var add_outer(Context c, const Var& x, const Var& by_channel, const Var& by_pixel) {
  Tensor y = x->value;
  const auto value = [](const Var& v) { return v ? v->value : Tensor(); };
  const auto learns = [](const Var& v) { return v && v->needs_grad; };
  ops::add_outer(x->value, value(by_channel), value(by_pixel), y);
  const Var out = make_var(y, x->needs_grad || learns(by_channel) || learns(by_pixel));
  if (c.tape.recording() && out->needs_grad)
    c.tape.record([x, by_channel, by_pixel, learns, out] {
      Tensor dy = std::move(out->grad);
      if (learns(by_channel)) give_channel_sums(by_channel, dy);
      if (learns(by_pixel)) {
        const auto [d, accumulate] = grad_target(by_pixel);
        ops::sum_channels(dy, 1.0f, d, accumulate);
      }
      if (x->needs_grad) give_grad(x, std::move(dy));
    });
  return out;
}

Var channel_mean(Context c, const Var& x) {
  const Shape& s = x->value.shape();
  const float share = 1.0f / static_cast<float>(s[4]);
  Tensor y = Tensor::empty({s[0], s[1], s[2], s[3], 1}, x->value.dtype());
  ops::sum_channels(x->value, share, y, false);
  return result(c, x, y, [x, share](const Tensor& dy) {
    const auto [dx, accumulate] = grad_target(x);
    ops::repeat_channels(dy, share, dx, accumulate);
  });
}

Var scale_groups(Context c, const Var& x, const Var& a) {
  // The mode `discard` does not record, but has a second forward, which starts from x again.
  const bool overwrites = !c.tape.recording() && !c.tape.counts_uses();
  Tensor y = overwrites ? x->value : Tensor::empty(x->value.shape(), x->value.dtype());
  ops::scale_groups_forward(x->value, a->value, y);
  const Var out = make_var(y, x->needs_grad || a->needs_grad);
  if (c.tape.recording() && out->needs_grad)
    c.tape.record([x, a, out] {
      Tensor d = std::move(out->grad), da;
      if (a->needs_grad) da = Tensor::empty(a->value.shape(), a->value.dtype());
      Tensor dx = x->needs_grad ? d : Tensor();
      ops::scale_groups_backward(x->value, a->value, d, dx, da);
      if (a->needs_grad) give_grad(a, std::move(da));
      d.release();
      if (x->needs_grad) give_grad(x, std::move(dx));
    });
  return out;
}

Var scale_channels(Context c, const Var& x, const Tensor& keep) {
  if (!keep.defined()) return x;
  WEFT_ASSERT(keep.numel() == x->value.dim(0) * x->value.dim(-1));
  Tensor y = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::scale_channels(x->value, keep, y);
  return result(c, x, y, [x, keep](Tensor d) {
    ops::scale_channels(d, keep, d);
    give_grad(x, std::move(d));
  });
}

Tensor class_loss(Context c, const Var& logits, const Tensor& labels, const Tensor& class_weights,
                  const ops::ClassLoss& loss, float weight) {
  const std::int64_t C = logits->value.dim(-1);
  WEFT_ASSERT(labels.numel() == logits->value.numel() / C && class_weights.numel() == C);
  Tensor stats = Tensor::empty({ops::class_sums + 3 * C}, DType::f64),
         weights = Tensor::empty(labels.shape(), DType::f32);
  ops::class_loss_forward(logits->value, labels, class_weights, loss, weights, stats);
  if (c.tape.recording() && logits->needs_grad)
    c.tape.record([logits, labels, loss, weights, stats, weight] {
      Tensor d = Tensor::empty(logits->value.shape(), logits->value.dtype());
      ops::class_loss_backward(logits->value, labels, loss, weights, stats, weight, d);
      give_grad(logits, std::move(d));
    });
  return stats;
}

Tensor text_loss(Context c, const Var& probability, const Var& threshold, const Tensor& flags,
                 const Tensor& thresholds, float weight) {
  const Tensor &p = probability->value, &t = threshold->value;
  WEFT_ASSERT(p.shape() == t.shape() && p.dtype() == t.dtype());
  WEFT_ASSERT(flags.numel() == p.numel() && thresholds.numel() == p.numel());
  Tensor stats = Tensor::empty({ops::text_stats}, DType::f64);
  ops::text_loss_forward(p, t, flags, thresholds, stats);
  if (c.tape.recording())
    c.tape.record([probability, threshold, flags, thresholds, stats, weight] {
      Tensor dp = Tensor::empty(probability->value.shape(), probability->value.dtype()),
             dt = Tensor::empty(threshold->value.shape(), threshold->value.dtype());
      ops::text_loss_backward(probability->value, threshold->value, flags, thresholds, stats,
                              weight, dp, dt);
      if (probability->needs_grad) give_grad(probability, std::move(dp));
      if (threshold->needs_grad) give_grad(threshold, std::move(dt));
    });
  return stats;
}

}  // namespace weft::nn
