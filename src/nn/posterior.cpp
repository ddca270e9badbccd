#include "nn/posterior.h"

#include "core/error.h"
#include "ops/pointwise.h"

namespace weft::nn {

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

Var drop_frames(Context c, const Var& x, std::int64_t first) {
  if (first == 0) return x;
  const Shape& s = x->value.shape();
  const std::int64_t pixels = s[2] * s[3], kept = s[1] - first;
  const Shape all{s[0], s[1], pixels, s[4]}, part{s[0], kept, pixels, s[4]};
  Tensor y = Tensor::empty({s[0], kept, s[2], s[3], s[4]}, x->value.dtype());
  Tensor tokens = y.view(part);
  ops::copy_tokens(x->value.view(all), {kept, pixels, first}, tokens);
  const Var out = make_var(y, x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([x, out, all, part, kept, pixels, first] {
      const Tensor dy = std::move(out->grad);
      Tensor dx = Tensor::empty(x->value.shape(), x->value.dtype());
      ops::fill_zero(dx);
      Tensor grid = dx.view(all);
      ops::copy_tokens(dy.view(part), {kept, pixels, 0, 0, first}, grid);
      give_grad(x, dx);
    });
  return out;
}

}  // namespace weft::nn
