#include "nn/image_ops.h"

#include <algorithm>

#include "core/error.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/pool.h"
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

Tensor nll(Context c, const Var& logits, const Tensor& labels, float weight) {
  WEFT_ASSERT(labels.numel() == logits->value.numel() / logits->value.dim(-1));
  Tensor stats = Tensor::empty({3}, DType::f64);
  ops::fill_zero(stats);
  ops::nll_forward(logits->value, labels, stats);
  if (c.tape.recording() && logits->needs_grad)
    c.tape.record([logits, labels, stats, weight] {
      Tensor d = Tensor::empty(logits->value.shape(), logits->value.dtype());
      ops::nll_backward(logits->value, labels, stats, weight, d);
      give_grad(logits, std::move(d));
    });
  return stats;
}

}  // namespace weft::nn
