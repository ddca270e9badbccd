#include "nn/frames.h"

#include "core/error.h"
#include "ops/pointwise.h"
#include "ops/pool.h"

namespace weft::nn {

Var leaky_relu(Context c, const Var& x, float slope) {
  Tensor y = x->value;
  ops::leaky_relu_forward(x->value, slope, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, slope, out] {
      Tensor d = std::move(out->grad);
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

}  // namespace weft::nn
