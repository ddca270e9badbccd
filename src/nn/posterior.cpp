#include "nn/posterior.h"

#include <algorithm>

#include "core/error.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"

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

namespace {

// The last frames of x [B,T,H,W,C], `frames` of them; where that is more than T, zeros come first.
Tensor last_frames(const Tensor& x, std::int64_t frames) {
  const Shape& s = x.shape();
  const std::int64_t pixels = s[2] * s[3], kept = std::min(frames, s[1]);
  Tensor y = Tensor::empty({s[0], frames, s[2], s[3], s[4]}, x.dtype());
  if (frames > kept) ops::fill_zero(y);
  Tensor to = y.view({s[0], frames, pixels, s[4]});
  ops::copy_tokens(x.view({s[0], s[1], pixels, s[4]}),
                   {kept, pixels, s[1] - kept, 0, frames - kept, 0}, to);
  return y;
}

Var with_last_frames(Context c, const Var& x, std::int64_t frames) {
  const std::int64_t before = x->value.dim(1);
  if (frames == before) return x;
  const Var out = make_var(last_frames(x->value, frames), x->needs_grad);
  if (c.tape.recording() && x->needs_grad)
    c.tape.record([x, out, before] {
      const Tensor dy = std::move(out->grad);
      give_grad(x, last_frames(dy, before));
    });
  return out;
}

}  // namespace

Var drop_frames(Context c, const Var& x, std::int64_t first) {
  return with_last_frames(c, x, x->value.dim(1) - first);
}

Var pad_frames(Context c, const Var& x, std::int64_t count) {
  return with_last_frames(c, x, x->value.dim(1) + count);
}

}  // namespace weft::nn
