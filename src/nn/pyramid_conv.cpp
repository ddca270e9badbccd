#include "nn/pyramid_conv.h"

#include "core/error.h"
#include "nn/detail.h"
#include "ops/conv/pyramid.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"

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

}  // namespace weft::nn
