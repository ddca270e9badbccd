// The CUDA side of ops/conv.h's convolutions: which convolutions of cuDNN's they become. CPU twin
// src/ops/cpu/conv/, cases src/bench/kernels/conv.cpp.
//
//   kernel 1x1x1        a product of rows (product.cuh), bias and residual in its epilogue
//   upsampled           2x2 convolutions of the frame itself (conv_layout.cuh): 16 products for 36;
//                       in bands of rows, so that the phases take a bounded scratch
//   all others          one convolution each, zeros on one side alone included
//
// Operations 2 numel(y) Cin kt kh kw (of the upsampled one 4/9 of that), traffic x, w and y once:
// from 128 channels on the tensor cores are the limit (1152 products an element of y). Scratch
// inside an operation: weights in the library's order, phases of at most 128 MiB, the bias in bf16,
// and 256 MiB for the library's workspace. ops/conv.cpp plans the same blocks.
#include "ops/conv.h"

#include <algorithm>

#include "conv/conv_layout.cuh"
#include "conv/convolution.cuh"
#include "core/error.h"
#include "launch.cuh"
#include "matmul/product.cuh"
#include "ops/matmul.h"

namespace weft::ops::cuda {
namespace {

using namespace kernels;

bool is_product(const Conv& k) {
  return k.kt * k.kh * k.kw == 1 && k.stride * k.stride_t == 1 && k.groups == 1 && !k.upsample &&
         k.front + k.top + k.left + k.bottom + k.right == 0;
}

WeightShape weight_shape(const Conv& k, std::int64_t out, std::int64_t in) {
  return {out, in, static_cast<std::int64_t>(k.kt) * k.kh * k.kw};
}

// x [N,T,H,W,Cin] and y [N,To,Ho,Wo,Cout] as one convolution: of N T frames in two dimensions where
// no time is summed over.
Convolution convolution(Pass pass, const Tensor& x, const Conv& k, const Tensor& y) {
  Convolution c;
  c.pass = pass;
  c.type = x.dtype();
  const bool frames = k.kt == 1 && k.stride_t == 1 && k.front == 0;
  c.spatial = frames ? 2 : 3;
  c.samples = frames ? x.dim(0) * x.dim(1) : x.dim(0);
  c.in_channels = x.dim(4);
  c.out_channels = y.dim(4);
  c.in = {frames ? 1 : x.dim(1), x.dim(2), x.dim(3)};
  c.out = {frames ? 1 : y.dim(1), y.dim(2), y.dim(3)};
  c.kernel = {k.kt, k.kh, k.kw};
  c.before = {k.front, k.top, k.left};
  c.after = {0, k.bottom, k.right};
  c.stride = {k.stride_t, k.stride, k.stride};
  c.dilation = {1, k.dilation, k.dilation};
  c.groups = k.groups;
  return c;
}

// The phases' convolution of rows [first, first + rows) of `frames` frames [H,W,Cin]; `above` and
// `below`: whether a row of zeros stands there.
Convolution phase_convolution(Pass pass, DType type, std::int64_t frames, std::int64_t rows,
                              std::int64_t W, std::int64_t in, std::int64_t out, bool above,
                              bool below) {
  Convolution c;
  c.pass = pass;
  c.type = type;
  c.samples = frames;
  c.in_channels = in;
  c.out_channels = 4 * out;
  c.in = {1, rows, W};
  c.kernel = {1, 2, 2};
  c.before = {0, above ? 1 : 0, 1};
  c.after = {0, below ? 1 : 0, 1};
  c.stride = {1, 1, 1};
  c.out = {1, rows + c.before[1] + c.after[1] - 1, W + 1};
  return c;
}

void run(const Convolution& c, const ConvolutionOperands& at) {
  double flops = 2.0 * static_cast<double>(c.samples * c.in_channels / c.groups * c.out_channels);
  for (std::size_t i = 0; i < 3; ++i) flops *= static_cast<double>(c.out[i] * c.kernel[i]);
  detail::add_flops(flops);
  WEFT_CHECK(convolve(c, at), Exit::usage,
             "a newer cuDNN may; or run with device.kind=cpu, and please report it",
             "cuDNN has no deterministic engine within 256 MiB of workspace for the convolution {}",
             describe(c));
}

// Rounded as the library wants it beside operands of `type`.
Tensor bias_in(DType type, const Tensor& bias) {
  if (type == DType::f32 || !bias.defined()) return bias;
  const Tensor rounded = Tensor::empty(bias.shape(), type);
  round_vector(data<float>(bias), rounded.device_data<bf16>(), bias.numel());
  return rounded;
}

// Bytes [at * stride ..) of a tensor, under a shape of one dimension.
Tensor part(const Tensor& t, std::int64_t first, std::int64_t elements) {
  return Tensor::borrow(
      static_cast<std::byte*>(t.raw()) + static_cast<std::size_t>(first) * size_of(t.dtype()),
      {elements}, t.dtype(), t.device());
}

void upsampled_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                       Tensor& y) {
  const std::int64_t F = x.dim(0) * x.dim(1), H = x.dim(2), W = x.dim(3), in = x.dim(4),
                     out = y.dim(4);
  const Tensor weights = Tensor::empty({4, out, 2, 2, in}, w.dtype());
  phase_weights(w, out, in, weights);
  const std::int64_t row = (W + 1) * 4 * out,
                     limit = conv_scratch.phases / static_cast<std::int64_t>(size_of(x.dtype()));
  const std::int64_t rows = std::clamp<std::int64_t>(limit / row - 1, 1, H);
  const std::int64_t frames =
      rows < H ? 1 : std::clamp<std::int64_t>(limit / ((H + 1) * row), 1, F);
  const Tensor phases = Tensor::empty({frames, rows + 1, row}, x.dtype());
  for (std::int64_t f = 0; f < F; f += frames)
    for (std::int64_t r = 0; r < H; r += rows) {
      const std::int64_t n = std::min(frames, F - f), m = std::min(rows, H - r);
      const bool above = r == 0, below = r + m == H;
      const std::int64_t first = above ? 0 : r - 1, last = below ? H : r + m + 1;
      run(phase_convolution(Pass::forward, x.dtype(), n, last - first, W, in, out, above, below),
          {part(x, (f * H + first) * W * in, (last - first) * W * in).raw(), weights.raw(),
           phases.raw()});
      const std::int64_t frame = 4 * H * W * out;
      join_phases(phases, {n, H, W, out, r, m}, bias,
                  residual.defined() ? part(residual, f * frame, n * frame) : Tensor(),
                  part(y, f * frame, n * frame));
    }
}

// Calls f(frames, x's first element, dy's phases) for as many frames at a time as the scratch
// holds.
template <class F>
void by_phases(const Tensor& dy, std::int64_t frames_in_all, std::int64_t H, std::int64_t W,
               F&& f) {
  const std::int64_t out = dy.dim(4), frame = (H + 1) * (W + 1) * 4 * out;
  const std::int64_t limit = conv_scratch.phases / static_cast<std::int64_t>(size_of(dy.dtype()));
  const std::int64_t frames = std::clamp<std::int64_t>(limit / frame, 1, frames_in_all);
  const Tensor phases = Tensor::empty({frames, H + 1, W + 1, 4, out}, dy.dtype());
  for (std::int64_t first = 0; first < frames_in_all; first += frames) {
    const std::int64_t n = std::min(frames, frames_in_all - first);
    const std::int64_t size = 4 * H * W * out;
    const Tensor some = part(phases, 0, n * frame);
    split_phases(part(dy, first * size, n * size), {n, H, W, out, 0, H}, some);
    f(n, first, some);
  }
}

void product_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                     Tensor& y) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  const Product p{m,
                  n,
                  k,
                  false,
                  true,
                  x.dtype(),
                  y.dtype(),
                  bias.defined() ? Epilogue::bias : Epilogue::none,
                  residual.defined()};
  detail::add_flops(2.0 * static_cast<double>(m) * static_cast<double>(n * k));
  const Operands at{x.raw(), w.raw(), residual.raw(), y.raw(), data_or_null<float>(bias), nullptr};
  if (!product_lt(p, at)) product_plain(p, at);
}

}  // namespace

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  if (y.numel() == 0) return;
  if (is_product(conv)) return product_forward(x, w, bias, residual, y);
  if (conv.upsample) return upsampled_forward(x, w, bias, residual, y);
  Convolution c = convolution(Pass::forward, x, conv, y);
  const WeightShape shape = weight_shape(conv, c.out_channels, c.in_channels / c.groups);
  const Tensor weights = Tensor::empty({shape.numel()}, w.dtype());
  weights_to_library(w, shape, weights);
  // The library is not asked to add to what it overwrites: a residual that is y waits for the sums
  // in a scratch.
  const bool in_place = residual.defined() && residual.raw() == y.raw();
  if (bias.defined() && !in_place) {
    c.bias = true;
    c.residual = residual.defined();
    const Tensor rounded = bias_in(x.dtype(), bias);
    if (convolve(c, {x.raw(), weights.raw(), y.raw(), rounded.raw(), residual.raw()})) {
      detail::add_flops(2.0 * static_cast<double>(y.numel()) *
                        static_cast<double>(shape.in * shape.taps));
      return;
    }
    c.bias = c.residual = false;
  }
  const Tensor sums = in_place ? Tensor::empty(y.shape(), y.dtype()) : y;
  run(c, {x.raw(), weights.raw(), sums.raw()});
  if (bias.defined() || residual.defined()) add_behind(sums, bias, residual, c.out_channels, y);
}

void conv_backward_input(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx,
                         bool accumulate) {
  if (dy.numel() == 0 || dx.numel() == 0) return;
  if (is_product(conv)) return linear_backward_input(dy, w, dx, accumulate);
  if (conv.upsample) {
    const std::int64_t H = dx.dim(2), W = dx.dim(3), in = dx.dim(4), out = dy.dim(4);
    const Tensor weights = Tensor::empty({4, out, 2, 2, in}, w.dtype());
    phase_weights(w, out, in, weights);
    by_phases(dy, dx.dim(0) * dx.dim(1), H, W,
              [&](std::int64_t frames, std::int64_t first, const Tensor& phases) {
                Convolution c = phase_convolution(Pass::backward_input, dx.dtype(), frames, H, W,
                                                  in, out, true, true);
                c.accumulate = accumulate;
                run(c, {part(dx, first * H * W * in, frames * H * W * in).raw(), weights.raw(),
                        phases.raw()});
              });
    return;
  }
  Convolution c = convolution(Pass::backward_input, dx, conv, dy);
  c.accumulate = accumulate;
  const WeightShape shape = weight_shape(conv, c.out_channels, c.in_channels / c.groups);
  const Tensor weights = Tensor::empty({shape.numel()}, w.dtype());
  weights_to_library(w, shape, weights);
  run(c, {dx.raw(), weights.raw(), dy.raw()});
}

void conv_backward_weight(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor& dbias,
                          bool accumulate) {
  const std::int64_t in = x.dim(4), out = dy.dim(4);
  if (is_product(conv)) return linear_backward_weight(dy, x, dw, dbias, accumulate);
  if (dbias.defined()) column_sums(dy, dy.numel() / out, out, data<float>(dbias), accumulate);
  if (conv.upsample) {
    const std::int64_t H = x.dim(2), W = x.dim(3);
    const Tensor weights = Tensor::empty({4, out, 2, 2, in}, x.dtype());
    by_phases(dy, x.dim(0) * x.dim(1), H, W,
              [&](std::int64_t frames, std::int64_t first, const Tensor& phases) {
                run(phase_convolution(Pass::backward_weight, x.dtype(), frames, H, W, in, out, true,
                                      true),
                    {part(x, first * H * W * in, frames * H * W * in).raw(), weights.raw(),
                     phases.raw()});
                phase_weights_backward(weights, out, in, dw, accumulate || first > 0);
              });
    return;
  }
  const Convolution c = convolution(Pass::backward_weight, x, conv, dy);
  const WeightShape shape = weight_shape(conv, out, in / conv.groups);
  const Tensor weights = Tensor::empty({shape.numel()}, x.dtype());
  run(c, {x.raw(), weights.raw(), dy.raw()});
  weights_from_library(weights, shape, dw, accumulate);
}

}  // namespace weft::ops::cuda
