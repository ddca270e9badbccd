#include "nn/deform_conv.h"

#include <algorithm>

#include "core/error.h"
#include "nn/detail.h"
#include "ops/conv/deform.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"

namespace weft::nn {

std::int64_t deform_scratch = 64 << 20;

namespace {

// Of the weights [out,C,3,3], the type of the activations.
struct Sizes {
  std::int64_t out, C, frames, pixels;  // pixels of a frame of the result
  DType dtype;

  std::int64_t row() const { return ops::deform_taps * C; }
  // Pixels of the result whose columns are made at a time. Few channels count as 64: the lists of
  // ops/conv/deform.h do not shrink with them.
  std::int64_t band() const {
    const std::int64_t bytes = ops::deform_taps * std::max<std::int64_t>(C, 64) *
                               static_cast<std::int64_t>(size_of(dtype));
    return std::max<std::int64_t>(1, deform_scratch / bytes);
  }
};

// The weights as rows [out, 9 C], as columns are.
Tensor rows_of(const Sizes& s, const ConvWeights& w) {
  const Tensor& weight = s.dtype == DType::bf16 ? w.weight->working : w.weight->value;
  Tensor rows = Tensor::empty({s.out, 1, 3, 3, s.C}, s.dtype);
  ops::to_channels_last(weight.view({s.out, s.C, 1, 3, 3}), rows);
  return rows.view({s.out, s.row()});
}

// dw f32 [out, 9 C] to the weight's gradient.
void give_weight(const Sizes& s, const Tensor& dw, Parameter& weight) {
  Tensor turned = Tensor::empty(weight.shape, DType::f32);
  Tensor to = turned.view({s.out, s.C, 1, 3, 3});
  ops::to_channels_first(dw.view({s.out, 1, 3, 3, s.C}), to);
  ops::scaled_add(turned, 1.0f, Tensor(), weight.grad, weight.grad_written);
  weight.grad_written = true;
}

// t [N,T,...] as [N T,1,...].
Tensor by_frames(const Tensor& t) {
  const Shape& s = t.shape();
  return t.view({s[0] * s[1], 1, s[2], s[3], s[4]});
}

}  // namespace

Var deform_conv(Context c, const Var& x, const Var& offsets, const ConvWeights& w,
                ops::Conv geometry) {
  WEFT_ASSERT(w.bias == nullptr);
  detail::use(c, {w.weight});
  const Shape to = geometry.output(x->value.shape(), w.weight->shape[0]);
  const Sizes s{to[4], x->value.dim(4), to[0] * to[1], to[2] * to[3], x->value.dtype()};
  WEFT_ASSERT(w.weight->shape == (Shape{s.out, s.C, 3, 3}));
  WEFT_ASSERT(offsets->value.shape() == (Shape{to[0], to[1], to[2], to[3], ops::deform_channels}));
  WEFT_ASSERT(offsets->value.dtype() == s.dtype);
  Tensor y = Tensor::empty(to, s.dtype);
  {
    const Tensor weight = rows_of(s, w), rows = y.view({s.frames * s.pixels, s.out});
    for (std::int64_t p = 0; p < rows.dim(0); p += s.band()) {
      Tensor part = rows.slice(p, std::min(p + s.band(), rows.dim(0)));
      Tensor columns = Tensor::empty({part.dim(0), ops::deform_taps, s.C}, s.dtype);
      ops::deform_columns(x->value, offsets->value, geometry, p, columns);
      ops::linear_forward(columns.view({part.dim(0), s.row()}), weight, Tensor(), Tensor(), part);
    }
  }
  const Var result = make_var(y);
  if (!c.tape.recording()) return result;
  c.tape.record([s, x, offsets, w, geometry, result, &table = c.parameters] {
    const Tensor dy = Tensor(std::move(result->grad)).view({s.frames * s.pixels, s.out});
    const Tensor weight = rows_of(s, w);
    const bool learn = w.weight->trainable, of_columns = x->needs_grad || offsets->needs_grad;
    Tensor dw = learn ? Tensor::empty({s.out, s.row()}, DType::f32) : Tensor(), none;
    Tensor doffsets =
        offsets->needs_grad ? Tensor::empty(offsets->value.shape(), s.dtype) : Tensor();
    Tensor dx;
    bool add_dx = false;
    if (x->needs_grad) {
      const GradTarget target = grad_target(x);
      dx = by_frames(target.grad), add_dx = target.accumulate;
    }
    const Tensor in = by_frames(x->value), at = by_frames(offsets->value);
    const std::int64_t frame_bytes =
        in.numel() / s.frames * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t group = std::clamp<std::int64_t>(
        deform_scratch / std::max<std::int64_t>(frame_bytes, 1), 1, s.frames);
    bool written = false;  // dw
    for (std::int64_t f = 0; f < s.frames; f += group) {
      const std::int64_t end = std::min(f + group, s.frames);
      const Tensor own = in.slice(f, end), own_at = at.slice(f, end);
      Tensor own_doffsets = doffsets.defined() ? by_frames(doffsets).slice(f, end) : Tensor();
      Tensor sums;
      if (dx.defined()) {
        sums = Tensor::empty(own.shape(), DType::f32);
        ops::fill_zero(sums);
      }
      const Tensor rows = dy.slice(f * s.pixels, end * s.pixels);
      for (std::int64_t p = 0; p < rows.dim(0); p += s.band()) {
        const Tensor part = rows.slice(p, std::min(p + s.band(), rows.dim(0)));
        Tensor columns = Tensor::empty({part.dim(0), ops::deform_taps, s.C}, s.dtype);
        Tensor as_rows = columns.view({part.dim(0), s.row()});
        if (learn) {
          ops::deform_columns(own, own_at, geometry, p, columns);
          ops::linear_backward_weight(part, as_rows, dw, none, written);
          written = true;
        }
        if (of_columns) ops::linear_backward_input(part, weight, as_rows, false);
        if (doffsets.defined())
          ops::deform_backward_offsets(own, own_at, columns, geometry, p, own_doffsets);
        if (dx.defined()) ops::deform_backward_input(own_at, columns, geometry, p, sums);
      }
      if (dx.defined()) {
        Tensor own_dx = dx.slice(f, end);
        ops::scaled_add(sums, 1.0f, Tensor(), own_dx, add_dx);
      }
    }
    if (learn) give_weight(s, dw, *w.weight);
    if (doffsets.defined()) give_grad(offsets, std::move(doffsets));
    detail::note_done(table, {w.weight});
  });
  return result;
}

}  // namespace weft::nn
