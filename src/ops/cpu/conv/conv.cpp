// CPU side of ops/conv.h: which way a convolution goes. bf16 is converted to f32 and back; the
// kernels are f32 alone.
#include "ops/conv.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/simd.h"

Geometry geometry(const Shape& x, const Shape& y, const Conv& c) {
  Geometry g{x[0],  x[1],     x[2],   x[3],    x[4],       y[4],     y[1],    y[2],
             y[3],  c.kt,     c.kh,   c.kw,    c.stride_t, c.stride, c.front, c.back,
             c.top, c.bottom, c.left, c.right, c.dilation, c.groups};
  return g;
}

// 1x1 kernels of stride 1 are matrix products.
bool is_linear(const Conv& c) {
  return c.kt * c.kh * c.kw == 1 && c.stride_t == 1 && c.stride == 1 && c.groups == 1 &&
         !c.upsample && c.front + c.back + c.top + c.left + c.bottom + c.right == 0;
}

Tensor rows(const Tensor& x) { return x.view({x.numel() / x.dim(-1), x.dim(-1)}); }

// bf16 goes one by one, so that the copies in f32 are of a frame and not of a whole micro-batch.
bool one_by_one(const Tensor& x) { return x.dtype() == DType::bf16 && x.dim(0) > 1; }

// to, f32, = x in bf16.
void to_f32(const Tensor& x, const Tensor& copy) {
  if (planning()) return;
  float* to = copy.data<float>();
  const bf16* from = x.data<bf16>();
  constexpr std::int64_t run = 4096;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < x.numel(); i += run)
    for_vectors(std::min(run, x.numel() - i),
                [&](std::int64_t at, int n) { store_n(to + i + at, load_n(from + i + at, n), n); });
}

// x in f32: itself, or a copy in the arena.
Tensor as_f32(const Tensor& x) {
  if (x.dtype() == DType::f32) return x;
  Tensor copy = Tensor::empty(x.shape(), DType::f32);
  to_f32(x, copy);
  return copy;
}

// A result that is computed in f32 and stored in y's type by finish().
struct Result {
  explicit Result(Tensor& t)
      : tensor(t), copy(t.dtype() == DType::f32 ? t : Tensor::empty(t.shape(), DType::f32)) {}
  float* f32() const { return copy.data<float>(); }
  void finish() {
    if (tensor.dtype() == DType::f32 || planning()) return;
    const float* from = f32();
    bf16* to = tensor.template data<bf16>();
    constexpr std::int64_t run = 4096;
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < tensor.numel(); i += run)
      for_vectors(std::min(run, tensor.numel() - i), [&](std::int64_t at, int n) {
        store_n(to + i + at, load_n(from + i + at, n), n);
      });
  }
  Tensor& tensor;
  Tensor copy;
};

}  // namespace

// The choice between the ways to compute a convolution, and the backward of stride 1 as a forward.
// The first that fits is taken:
//
//   way (file)        shapes                         models
//   depthwise         a kernel for each channel      MobileNetV2; SadTalker before its keypoints
//   matrix product    1x1 of stride 1                all: shortcuts, bottlenecks, heads
//   winograd_volume   3x3x3, all strides 1           temporal VAE; SadTalker's 3D blocks
//   winograd          kt x 3 x 3, stride 1 in the    VAE, LPIPS (VGG), ResNet (dilated in
//                     plane, 32 or more input        segmentation), HRNet, DBNet, FAN,
//                     channels, 0.25 GFLOP or more   RetinaFace, GFPGAN, SadTalker
//                     a sample
//   fourier           5x5 to 9x9, stride 1, from 16  dense motion's mask (7x7x7)
//                     to 8 or more channels
//   direct (oneDNN)   everything else                stems of 3 channels, strides, last layers,
//                                                    ResNeXt's groups, PatchGAN (4x4), small maps
//
// A way of our own has to be worth 10 % of a whole job: the figures are in
// validation/results/cpu.md, Convolutions. Frames seen at twice their height and width are enlarged
// first, a sample at a time.

// to[i][o][kt-1-a][kh-1-b][kw-1-c] = w[o][i][a][b][c] within each group.
void turn_weights(const Geometry& g, const float* w, float* to) {
  if (planning()) return;
  const std::int64_t k = g.kt * g.kh * g.kw, ins = g.cin / g.groups, outs = g.cout / g.groups;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < g.cin; ++i)
    for (std::int64_t o = 0; o < outs; ++o) {
      const float* from = w + ((i / ins * outs + o) * ins + i % ins) * k;
      for (std::int64_t a = 0; a < k; ++a) to[(i * outs + o) * k + k - 1 - a] = from[a];
    }
}

void plain_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                   float* y) {
  if (winograd_fits(g))
    winograd_forward(g, x, w, bias, add, y);
  else if (fourier_fits(g))
    fourier_forward(g, x, w, bias, add, y);
  else if (g.front < g.kt || (bias == nullptr && !add))
    direct_forward(g, x, w, bias, add, y);
  else {
    // oneDNN 2.6 leaves bias and sum out of frames that see zeros alone: those are written here.
    Geometry rest = g;
    const std::int64_t skip = (g.front - g.kt) / g.stride_t + 1, plane = g.ho * g.wo * g.cout;
    rest.n = 1, rest.to = g.to - skip, rest.front = g.front - skip * g.stride_t;
    for (std::int64_t n = 0; n < g.n; ++n) {
      float* to = y + n * g.to * plane;
      for (std::int64_t i = 0; i < (planning() ? 0 : skip * plane); ++i)
        to[i] = (add ? to[i] : 0.0f) + (bias ? bias[i % g.cout] : 0.0f);
      direct_forward(rest, x + n * rest.x_numel(), w, bias, add, to + skip * plane);
    }
  }
}

void plain_backward_input(const Geometry& g, const float* dy, const float* w, float* dx, bool add) {
  // More zeros in front than a kernel is long (clips of few frames) would have to be cut off: left
  // to oneDNN.
  const std::int64_t high = g.dilation * (g.kh - 1), wide = g.dilation * (g.kw - 1);
  const bool turns = g.front < g.kt && g.top <= high && g.left <= wide;
  // Of a grouped one oneDNN's own backward is the faster.
  if (g.stride_t == 1 && g.stride == 1 && g.groups == 1 && turns) {
    const Tensor turned = floats(g.w_numel());
    turn_weights(g, w, turned.data<float>());
    Geometry b = g;
    b.t = g.to, b.h = g.ho, b.w = g.wo, b.cin = g.cout;
    b.to = g.t, b.ho = g.h, b.wo = g.w, b.cout = g.cin;
    b.front = g.kt - 1 - g.front, b.top = high - g.top, b.left = wide - g.left;
    // The zeros behind follow from the sizes.
    b.back = b.to + g.kt - 1 - b.t - b.front;
    b.bottom = b.ho + high - b.h - b.top;
    b.right = b.wo + wide - b.w - b.left;
    plain_forward(b, dy, turned.data<float>(), nullptr, add, dx);
    return;
  }
  if (!add) {
    direct_backward_input(g, dy, w, dx);
    return;
  }
  // oneDNN's backward only overwrites: a sample at a time through scratch memory.
  Geometry one = g;
  one.n = 1;
  const Tensor scratch = floats(one.x_numel());
  float* sample = scratch.data<float>();
  for (std::int64_t n = 0; n < g.n; ++n) {
    direct_backward_input(one, dy + n * one.y_numel(), w, sample);
    if (planning()) continue;
    float* to = dx + n * one.x_numel();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < one.x_numel(); ++i) to[i] += sample[i];
  }
}

void plain_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                           bool accumulate) {
  if (winograd_fits(g))
    winograd_backward_weight(g, x, dy, dw, accumulate);
  else
    direct_backward_weight(g, x, dy, dw, accumulate);
}

namespace {

// A sample of frames at twice their height and width, and the convolution over them.
struct Enlarged {
  explicit Enlarged(const Geometry& small) : g(small), large(small) {
    large.n = 1, large.h = g.ho, large.w = g.wo;
    pixels = floats(large.x_numel());
  }
  // Each pixel of x [t,h,w,cin] four times.
  void enlarge(const float* x) const {
    if (planning()) return;
    float* to = pixels.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < g.t * g.ho; ++i) {
      const float* row = x + (i / g.ho * g.h + i % g.ho / 2) * g.w * g.cin;
      for (std::int64_t j = 0; j < g.wo; ++j)
        std::copy_n(row + j / 2 * g.cin, g.cin, to + (i * g.wo + j) * g.cin);
    }
  }
  // dx [t,h,w,cin] (+)= the sums of 2x2 pixels.
  void reduce(float* dx, bool add) const {
    if (planning()) return;
    const float* from = pixels.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < g.t * g.h; ++i)
      for (std::int64_t j = 0; j < g.w; ++j) {
        const float* upper = from + (2 * i * g.wo + 2 * j) * g.cin;
        const float* lower = upper + g.wo * g.cin;
        float* to = dx + (i * g.w + j) * g.cin;
        for (std::int64_t c = 0; c < g.cin; ++c) {
          const float sum = upper[c] + upper[g.cin + c] + lower[c] + lower[g.cin + c];
          to[c] = add ? to[c] + sum : sum;
        }
      }
  }
  Geometry g, large;
  Tensor pixels;
};

void upsample_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  const Enlarged e(g);
  for (std::int64_t n = 0; n < g.n; ++n) {
    e.enlarge(x + n * (g.x_numel() / g.n));
    plain_forward(e.large, e.pixels.data<float>(), w, bias, add, y + n * e.large.y_numel());
  }
}

void upsample_backward_input(const Geometry& g, const float* dy, const float* w, float* dx,
                             bool add) {
  const Enlarged e(g);
  for (std::int64_t n = 0; n < g.n; ++n) {
    plain_backward_input(e.large, dy + n * e.large.y_numel(), w, e.pixels.data<float>(), false);
    e.reduce(dx + n * (g.x_numel() / g.n), add);
  }
}

void upsample_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  const Enlarged e(g);
  for (std::int64_t n = 0; n < g.n; ++n) {
    e.enlarge(x + n * (g.x_numel() / g.n));
    plain_backward_weight(e.large, e.pixels.data<float>(), dy + n * e.large.y_numel(), dw,
                          accumulate || n > 0);
  }
}

}  // namespace

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  WEFT_ASSERT(y.shape() == conv.output(x.shape(), w.dim(0)));
  if (is_depthwise(x.shape(), w.dim(0), conv))
    return depthwise_forward(x, w, bias, residual, conv, y);
  if (is_linear(conv)) {
    if (planning()) return;
    Tensor out = rows(y);
    linear_forward(rows(x), w.view({w.dim(0), w.dim(1)}), bias,
                   residual.defined() ? rows(residual) : residual, out);
    return;
  }
  if (one_by_one(x)) {
    for (std::int64_t n = 0; n < x.dim(0); ++n) {
      Tensor out = y.slice(n, n + 1);
      conv_forward(x.slice(n, n + 1), w, bias,
                   residual.defined() ? residual.slice(n, n + 1) : residual, conv, out);
    }
    return;
  }
  const Tensor xs = as_f32(x), ws = as_f32(w);
  Result out(y);
  if (residual.defined()) {
    const Tensor r = as_f32(residual);
    // The residual becomes the result's first value, to which the convolution adds.
    if (r.raw() != out.copy.raw() && !planning())
      std::memcpy(out.f32(), r.raw(), static_cast<std::size_t>(y.numel()) * 4);
  }
  const float* b = bias.defined() ? bias.data<float>() : nullptr;
  if (conv.upsample)
    upsample_forward(geometry(x.shape(), y.shape(), conv), xs.data<float>(), ws.data<float>(), b,
                     residual.defined(), out.f32());
  else
    plain_forward(geometry(x.shape(), y.shape(), conv), xs.data<float>(), ws.data<float>(), b,
                  residual.defined(), out.f32());
  out.finish();
}

void conv_backward_input(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx,
                         bool accumulate) {
  if (is_depthwise(dx.shape(), w.dim(0), conv))
    return depthwise_backward_input(dy, w, conv, dx, accumulate);
  if (is_linear(conv)) {
    if (planning()) return;
    Tensor out = rows(dx);
    linear_backward_input(rows(dy), w.view({w.dim(0), w.dim(1)}), out, accumulate);
    return;
  }
  if (one_by_one(dx)) {
    for (std::int64_t n = 0; n < dx.dim(0); ++n) {
      Tensor out = dx.slice(n, n + 1);
      conv_backward_input(dy.slice(n, n + 1), w, conv, out, accumulate);
    }
    return;
  }
  const Tensor dys = as_f32(dy), ws = as_f32(w);
  Result out(dx);
  if (accumulate && dx.dtype() == DType::bf16) to_f32(dx, out.copy);
  if (conv.upsample)
    upsample_backward_input(geometry(dx.shape(), dy.shape(), conv), dys.data<float>(),
                            ws.data<float>(), out.f32(), accumulate);
  else
    plain_backward_input(geometry(dx.shape(), dy.shape(), conv), dys.data<float>(),
                         ws.data<float>(), out.f32(), accumulate);
  out.finish();
}

void conv_backward_weight(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor& dbias,
                          bool accumulate) {
  if (is_linear(conv)) {
    if (planning()) return;
    Tensor d = dw.view({dw.dim(0), dw.dim(1)});
    linear_backward_weight(rows(dy), rows(x), d, dbias, accumulate);
    return;
  }
  if (is_depthwise(x.shape(), dw.dim(0), conv)) {
    if (dbias.defined() && !planning()) bias_gradient(rows(dy), dbias, accumulate);
    return depthwise_backward_weight(x, dy, conv, dw, accumulate);
  }
  if (one_by_one(x)) {
    for (std::int64_t n = 0; n < x.dim(0); ++n)
      conv_backward_weight(x.slice(n, n + 1), dy.slice(n, n + 1), conv, dw, dbias,
                           accumulate || n > 0);
    return;
  }
  if (dbias.defined() && !planning()) bias_gradient(rows(dy), dbias, accumulate);
  const Tensor xs = as_f32(x), dys = as_f32(dy);
  if (conv.upsample)
    upsample_backward_weight(geometry(x.shape(), dy.shape(), conv), xs.data<float>(),
                             dys.data<float>(), dw.data<float>(), accumulate);
  else
    plain_backward_weight(geometry(x.shape(), dy.shape(), conv), xs.data<float>(),
                          dys.data<float>(), dw.data<float>(), accumulate);
}

WEFT_CPU_END
