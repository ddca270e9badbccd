// The CUDA side of ops/conv.h's convolutions: which convolutions of cuDNN's they become. CPU twin
// src/ops/cpu/conv/, cases tests/kernels/conv.cpp.
//
//   kernel 1x1x1        a product of rows (product.cuh), bias and residual in its epilogue
//   upsampled           2x2 convolutions of the frame itself (conv_layout.cuh): 16 products for 36;
//                       in bands of rows, so that the phases take a bounded scratch
//   all others          one convolution each, zeros on one side alone included
//
// Operations 2 numel(y) Cin kt kh kw (of the upsampled one 4/9 of that), traffic x, w and y once:
// from 128 channels on the tensor cores are the limit (1152 products an element of y). Scratch
// inside an operation: weights in the library's order, phases of at most 128 MiB, the bias in bf16,
// and 256 MiB for the library's workspace. ops/scratch.cpp plans the same blocks.
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

WeightShape weight_shape(const Conv& k, std::int64_t out, std::int64_t in) {
  return {out, in, static_cast<std::int64_t>(k.kt) * k.kh * k.kw};
}

// x [N,T,H,W,Cin] and y [N,To,Ho,Wo,Cout] as one convolution: of N T frames in two dimensions where
// no time is summed over.
Convolution convolution(Pass pass, const Tensor& x, const Conv& k, const Tensor& y) {
  Convolution c;
  c.pass = pass;
  c.type = x.dtype();
  const bool frames = k.kt == 1 && k.stride_t == 1 && k.front + k.back == 0;
  c.spatial = frames ? 2 : 3;
  c.samples = frames ? x.dim(0) * x.dim(1) : x.dim(0);
  c.in_channels = x.dim(4);
  c.out_channels = y.dim(4);
  c.in = {frames ? 1 : x.dim(1), x.dim(2), x.dim(3)};
  c.out = {frames ? 1 : y.dim(1), y.dim(2), y.dim(3)};
  c.kernel = {k.kt, k.kh, k.kw};
  c.before = {k.front, k.top, k.left};
  c.after = {k.back, k.bottom, k.right};
  c.stride = {k.stride_t, k.stride, k.stride};
  c.dilation = {1, k.dilation, k.dilation};
  c.groups = k.groups;
  return c;
}

// The library's engines for tensor cores read 16 bytes of channels at a time. Where x or y has
// fewer, as pixels do, they first copy it with zeros to the workspace, 8 channels for 3. A batch
// whose copies would not fit there is left to engines that take several times as long, and so it
// is cut into pieces whose copies fill half of the workspace at most.
std::int64_t samples_at_a_time(const Convolution& c) {
  if (c.type != DType::bf16 || c.groups > 1) return c.samples;
  constexpr std::int64_t unit = 8;
  const auto copy = [&](std::int64_t channels, const std::array<std::int64_t, 3>& size) {
    const std::int64_t wide = (channels + unit - 1) / unit * unit;
    return wide == channels ? 0 : 2 * wide * size[0] * size[1] * size[2];
  };
  const std::int64_t bytes = copy(c.in_channels, c.in) + copy(c.out_channels, c.out);
  // One sample too large for that gains nothing from being alone.
  if (bytes == 0 || bytes > conv_scratch.workspace / 2) return c.samples;
  const std::int64_t most = std::min<std::int64_t>(conv_scratch.workspace / 2 / bytes, c.samples);
  const std::int64_t pieces = (c.samples + most - 1) / most;
  return (c.samples + pieces - 1) / pieces;  // of one size, but for the last
}

// Calls f(a tensor's samples, whether they are the first) for each piece of a batch that has to be
// cut; false where it has not. The samples are [n,T,H,W,C].
template <class F>
bool in_pieces(const Convolution& c, F&& f) {
  const std::int64_t most = samples_at_a_time(c);
  if (most == c.samples) return false;
  for (std::int64_t first = 0; first < c.samples; first += most)
    f(
        [&](const Tensor& t) {
          if (!t.defined()) return t;
          const std::int64_t depth = t.dim(0) * t.dim(1) / c.samples;
          return t.view({c.samples, depth, t.dim(2), t.dim(3), t.dim(4)})
              .slice(first, std::min(first + most, c.samples));
        },
        first == 0);
  return true;
}

// The phases' convolution of rows [first, first + rows) of `frames` frames [H,W,Cin]; `above` and
// `below`: whether a row of zeros stands there.
Convolution phase_convolution(Pass pass, DType type, std::int64_t frames, std::int64_t rows,
                              std::int64_t W, const PhaseWeights& weights, bool above, bool below) {
  Convolution c;
  c.pass = pass;
  c.type = type;
  c.samples = frames;
  c.in_channels = weights.in;
  c.out_channels = 4 * weights.out;
  c.in = {1, rows, W};
  c.kernel = {1, 2, 2};
  c.before = {0, above ? 1 : 0, 1};
  c.after = {0, below ? 1 : 0, 1};
  c.stride = {1, 1, 1};
  c.out = {1, rows + c.before[1] + c.after[1] - 1, W + 1};
  return c;
}

// What the phases are made of at a time: a frame, or the whole volume where time is summed over.
struct PhaseUnits {
  std::int64_t depth;  // frames in each of x
  std::int64_t count;
  std::int64_t elements;  // of one's phases
};
PhaseUnits phase_units(const Conv& k, const Shape& small, std::int64_t out) {
  const std::int64_t depth = k.kt > 1 ? small[1] : 1;
  return {depth, small[0] * small[1] / depth, depth * (small[2] + 1) * (small[3] + 1) * 4 * out};
}
std::int64_t units_at_a_time(const PhaseUnits& units, DType type) {
  const std::int64_t limit = conv_scratch.phases / static_cast<std::int64_t>(size_of(type));
  return std::clamp<std::int64_t>(limit / units.elements, 1, units.count);
}

// The phases' convolution of `count` whole units of x [..,T,H,W,Cin].
Convolution phase_convolution(Pass pass, DType type, const Conv& k, const Shape& small,
                              std::int64_t count, const PhaseWeights& weights) {
  Convolution c = phase_convolution(pass, type, count, small[2], small[3], weights, true, true);
  if (k.kt == 1) return c;
  c.spatial = 3;
  c.in[0] = c.out[0] = small[1];
  c.kernel[0] = k.kt;
  c.before[0] = k.front;
  c.after[0] = k.back;
  return c;
}

void run(const Convolution& c, const ConvolutionOperands& at) {
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

// Whole volumes at a time.
void upsampled_volumes(const Tensor& x, const Tensor& weights, const PhaseWeights& shape,
                       const Tensor& bias, const Tensor& residual, const Conv& conv, Tensor& y) {
  const std::int64_t T = x.dim(1), H = x.dim(2), W = x.dim(3), in = T * H * W * shape.in,
                     out = T * 4 * H * W * shape.out;
  const PhaseUnits units = phase_units(conv, x.shape(), shape.out);
  const std::int64_t most = units_at_a_time(units, x.dtype());
  const Tensor phases = Tensor::empty({most, units.elements}, x.dtype());
  for (std::int64_t v = 0; v < units.count; v += most) {
    const std::int64_t n = std::min(most, units.count - v);
    run(phase_convolution(Pass::forward, x.dtype(), conv, x.shape(), n, shape),
        {part(x, v * in, n * in).raw(), weights.raw(), phases.raw()});
    join_phases(phases, {n * T, H, W, shape.out, 0, H}, bias,
                residual.defined() ? part(residual, v * out, n * out) : Tensor(),
                part(y, v * out, n * out));
  }
}

void upsampled_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                       const Conv& conv, Tensor& y) {
  const std::int64_t F = x.dim(0) * x.dim(1), H = x.dim(2), W = x.dim(3), in = x.dim(4),
                     out = y.dim(4);
  const PhaseWeights shape{out, in, conv.kt};
  const Tensor weights = Tensor::empty({4, out, conv.kt, 2, 2, in}, w.dtype());
  phase_weights(w, shape, weights);
  if (conv.kt > 1) return upsampled_volumes(x, weights, shape, bias, residual, conv, y);
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
      run(phase_convolution(Pass::forward, x.dtype(), n, last - first, W, shape, above, below),
          {part(x, (f * H + first) * W * in, (last - first) * W * in).raw(), weights.raw(),
           phases.raw()});
      const std::int64_t frame = 4 * H * W * out;
      join_phases(phases, {n, H, W, out, r, m}, bias,
                  residual.defined() ? part(residual, f * frame, n * frame) : Tensor(),
                  part(y, f * frame, n * frame));
    }
}

// Calls f(number, the first's number, dy's phases) for as many units of x at a time as the scratch
// holds.
template <class F>
void by_phases(const Tensor& dy, const Conv& conv, const Shape& small, F&& f) {
  const std::int64_t H = small[2], W = small[3], out = dy.dim(4);
  const PhaseUnits units = phase_units(conv, small, out);
  const std::int64_t most = units_at_a_time(units, dy.dtype());
  const Tensor phases = Tensor::empty({most, units.elements}, dy.dtype());
  for (std::int64_t first = 0; first < units.count; first += most) {
    const std::int64_t n = std::min(most, units.count - first);
    const std::int64_t size = units.depth * 4 * H * W * out;
    const Tensor some = part(phases, 0, n * units.elements);
    split_phases(part(dy, first * size, n * size), {n * units.depth, H, W, out, 0, H}, some);
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
  const Operands at{x.raw(), w.raw(), residual.raw(), y.raw(), data_or_null<float>(bias), nullptr};
  if (!product_lt(p, at)) product_plain(p, at);
}

}  // namespace

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  if (y.numel() == 0) return;
  if (conv.is_product()) return product_forward(x, w, bias, residual, y);
  if (conv.upsample) return upsampled_forward(x, w, bias, residual, conv, y);
  Convolution c = convolution(Pass::forward, x, conv, y);
  if (in_pieces(c, [&](auto&& some, bool) {
        Tensor of_y = some(y);
        conv_forward(some(x), w, bias, some(residual), conv, of_y);
      }))
    return;
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
    if (convolve(c, {x.raw(), weights.raw(), y.raw(), rounded.raw(), residual.raw()})) return;
    c.bias = c.residual = false;
  }
  const Tensor sums = in_place ? Tensor::empty(y.shape(), y.dtype()) : y;
  run(c, {x.raw(), weights.raw(), sums.raw()});
  if (bias.defined() || residual.defined()) add_behind(sums, bias, residual, c.out_channels, y);
}

void conv_backward_input(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx,
                         bool accumulate) {
  if (dy.numel() == 0 || dx.numel() == 0) return;
  if (conv.is_product()) return linear_backward_input(dy, w, dx, accumulate);
  if (conv.upsample) {
    const PhaseWeights shape{dy.dim(4), dx.dim(4), conv.kt};
    const Tensor weights = Tensor::empty({4, shape.out, conv.kt, 2, 2, shape.in}, w.dtype());
    phase_weights(w, shape, weights);
    const std::int64_t size = dx.numel() / phase_units(conv, dx.shape(), shape.out).count;
    by_phases(dy, conv, dx.shape(), [&](std::int64_t n, std::int64_t first, const Tensor& phases) {
      Convolution c =
          phase_convolution(Pass::backward_input, dx.dtype(), conv, dx.shape(), n, shape);
      c.accumulate = accumulate;
      run(c, {part(dx, first * size, n * size).raw(), weights.raw(), phases.raw()});
    });
    return;
  }
  Convolution c = convolution(Pass::backward_input, dx, conv, dy);
  if (in_pieces(c, [&](auto&& some, bool) {
        Tensor of_dx = some(dx);
        conv_backward_input(some(dy), w, conv, of_dx, accumulate);
      }))
    return;
  c.accumulate = accumulate;
  const WeightShape shape = weight_shape(conv, c.out_channels, c.in_channels / c.groups);
  const Tensor weights = Tensor::empty({shape.numel()}, w.dtype());
  weights_to_library(w, shape, weights);
  run(c, {dx.raw(), weights.raw(), dy.raw()});
}

void conv_backward_weight(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor& dbias,
                          bool accumulate) {
  const std::int64_t in = x.dim(4), out = dy.dim(4);
  if (conv.is_product() || x.numel() == 0)  // of no samples: zeros, or nothing to add
    return linear_backward_weight(dy, x, dw, dbias, accumulate);
  if (dbias.defined()) column_sums(dy, dy.numel() / out, out, data<float>(dbias), accumulate);
  if (conv.upsample) {
    const PhaseWeights shape{out, in, conv.kt};
    const Tensor weights = Tensor::empty({4, out, conv.kt, 2, 2, in}, x.dtype());
    const std::int64_t size = x.numel() / phase_units(conv, x.shape(), out).count;
    by_phases(dy, conv, x.shape(), [&](std::int64_t n, std::int64_t first, const Tensor& phases) {
      run(phase_convolution(Pass::backward_weight, x.dtype(), conv, x.shape(), n, shape),
          {part(x, first * size, n * size).raw(), weights.raw(), phases.raw()});
      phase_weights_backward(weights, shape, dw, accumulate || first > 0);
    });
    return;
  }
  const Convolution c = convolution(Pass::backward_weight, x, conv, dy);
  if (in_pieces(c, [&](auto&& some, bool first) {
        Tensor no_bias;
        conv_backward_weight(some(x), some(dy), conv, dw, no_bias, accumulate || !first);
      }))
    return;
  const WeightShape shape = weight_shape(conv, out, in / conv.groups);
  const Tensor weights = Tensor::empty({shape.numel()}, x.dtype());
  run(c, {x.raw(), weights.raw(), dy.raw()});
  weights_from_library(weights, shape, dw, accumulate);
}

}  // namespace weft::ops::cuda
