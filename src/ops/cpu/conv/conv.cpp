// CPU side of ops/conv.h: which way a convolution goes. bf16 is converted to f32 and back; the
// kernels are f32 alone.
#include "ops/conv.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "core/error.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/simd.h"

Tensor rows(const Tensor& x) { return x.view({x.numel() / x.dim(-1), x.dim(-1)}); }

// How many of a batch's samples, at least one, are copied and computed together: few, so that the
// copies stay in a cache; as many as that allows, so that weights are transformed seldom. Passes
// are of one size, but for the last. `values`: of a sample's larger tensor.
std::int64_t samples_per_pass(std::int64_t samples, std::int64_t values) {
  const std::int64_t limit = std::clamp<std::int64_t>(values_per_pass / values, 1, samples);
  const std::int64_t passes = (samples + limit - 1) / limit;
  return (samples + passes - 1) / passes;
}
// bf16 is converted to f32 for so many samples at a time.
std::int64_t samples_per_pass(const Tensor& x, const Tensor& y) {
  const std::int64_t n = x.dim(0);
  return x.dtype() == DType::f32 || n < 2 ? n
                                          : samples_per_pass(n, std::max(x.numel(), y.numel()) / n);
}

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

std::int64_t values_per_pass = 8 << 20;

Geometry geometry(const Shape& x, const Shape& y, const Conv& c) {
  Geometry g{x[0],  x[1],     x[2],   x[3],    x[4],       y[4],     y[1],    y[2],
             y[3],  c.kt,     c.kh,   c.kw,    c.stride_t, c.stride, c.front, c.back,
             c.top, c.bottom, c.left, c.right, c.dilation, c.groups};
  return g;
}

// Which algorithm computes a convolution, and the backward of stride 1 as a forward. Depthwise
// convolutions and 1x1 products are found first; then the first of these that fits:
//
//   algorithm (file)  shapes                         models
//   depthwise         one kernel a channel           MobileNetV2; SadTalker before its keypoints
//   matrix product    1x1 of stride 1                all: shortcuts, bottlenecks, heads
//   winograd_volume   3x3x3, all strides 1           temporal VAE; SadTalker's 3D blocks
//   winograd          kt x 3 x 3, stride 1 in the    VAE, LPIPS (VGG), ResNet (dilated in
//                     plane, at least 32 input       segmentation), HRNet, DBNet, FAN,
//                     channels, 0.25 GFLOP or more   RetinaFace, GFPGAN, SadTalker
//                     a sample
//   fourier           5x5 to 9x9, stride 1, at least dense motion's mask (7x7x7)
//                     16 input, 8 output channels
//   blocked           at least 32 input and 8 output strided ones, small maps, PatchGAN (4x4)
//                     channels, one group
//   direct (oneDNN)   everything else                stems of 3 channels, pictures, ResNeXt's
//                                                    groups
//
// Gradients of inputs of stride 1 are such forwards; of other strides they are oneDNN's. Gradients
// of weights are Winograd's where it fits, else oneDNN's.
//
// An algorithm of our own has to gain 10 % of a whole job (validation/results/cpu.md,
// Convolutions); blocked is there for its rounding alone. Frames seen at twice their height and
// width are enlarged first, a few samples at a time.

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

Algorithm algorithm_of(const Geometry& g) {
  if (winograd_fits(g)) return volume_fits(g) ? Algorithm::winograd_volume : Algorithm::winograd;
  if (fourier_fits(g)) return Algorithm::fourier;
  return blocked_fits(g) ? Algorithm::blocked : Algorithm::direct;
}

void plain_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                   float* y) {
  switch (algorithm_of(g)) {
    case Algorithm::winograd_volume:
      return volume_forward(g, x, w, bias, add, y);
    case Algorithm::winograd:
      return winograd_forward(g, x, w, bias, add, y);
    case Algorithm::fourier:
      return fourier_forward(g, x, w, bias, add, y);
    case Algorithm::blocked:
      return blocked_forward(g, x, w, bias, add, y);
    case Algorithm::direct:
      break;
  }
  if (g.front < g.kt || (bias == nullptr && !add))
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

std::optional<Geometry> flipped_geometry(const Geometry& g) {
  // More zeros in front than a kernel is long (clips of few frames) would have to be cut off.
  // oneDNN's own backward is faster for a grouped convolution.
  const std::int64_t high = g.dilation * (g.kh - 1), wide = g.dilation * (g.kw - 1);
  if (g.stride_t != 1 || g.stride != 1 || g.groups != 1 || g.front >= g.kt || g.top > high ||
      g.left > wide)
    return std::nullopt;
  Geometry b = g;
  b.t = g.to, b.h = g.ho, b.w = g.wo, b.cin = g.cout;
  b.to = g.t, b.ho = g.h, b.wo = g.w, b.cout = g.cin;
  b.front = g.kt - 1 - g.front, b.top = high - g.top, b.left = wide - g.left;
  // The zeros behind follow from the sizes.
  b.back = b.to + g.kt - 1 - b.t - b.front;
  b.bottom = b.ho + high - b.h - b.top;
  b.right = b.wo + wide - b.w - b.left;
  return b;
}

void plain_backward_input(const Geometry& g, const float* dy, const float* w, float* dx, bool add) {
  if (const std::optional<Geometry> flipped = flipped_geometry(g)) {
    const Tensor weights = floats(g.w_numel());
    turn_weights(g, w, weights.data<float>());
    plain_forward(*flipped, dy, weights.data<float>(), nullptr, add, dx);
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

// The frames of a pass's samples at twice their height and width, and the convolution over them.
struct Enlarged {
  explicit Enlarged(const Geometry& small)
      : g(small),
        sample(g.t * g.h * g.w * g.cin),
        pass(samples_per_pass(g.n, g.t * g.ho * g.wo * std::max(g.cin, g.cout))) {
    pixels = floats(pass * 4 * sample);
  }
  // Calls f(first sample, the convolution of it and the next ones).
  template <class F>
  void each(F&& f) const {
    Geometry large = g;
    large.h = g.ho, large.w = g.wo;
    for (std::int64_t n = 0; n < g.n; n += pass) {
      large.n = std::min(pass, g.n - n);
      f(n, large);
    }
  }
  // Each pixel of x [n,t,h,w,cin] four times.
  void enlarge(const float* x, std::int64_t n) const {
    if (planning()) return;
    float* to = pixels.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < n * g.t * g.ho; ++i) {
      const float* row = x + (i / g.ho * g.h + i % g.ho / 2) * g.w * g.cin;
      for (std::int64_t j = 0; j < g.wo; ++j)
        std::copy_n(row + j / 2 * g.cin, g.cin, to + (i * g.wo + j) * g.cin);
    }
  }
  // dx [n,t,h,w,cin] (+)= the sums of 2x2 pixels.
  void reduce(float* dx, std::int64_t n, bool add) const {
    if (planning()) return;
    const float* from = pixels.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < n * g.t * g.h; ++i)
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
  Geometry g;
  std::int64_t sample, pass;  // values of a sample of x, samples of a pass
  Tensor pixels;
};

void upsample_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  const Enlarged e(g);
  e.each([&](std::int64_t n, const Geometry& large) {
    e.enlarge(x + n * e.sample, large.n);
    plain_forward(large, e.pixels.data<float>(), w, bias, add, y + n * (g.y_numel() / g.n));
  });
}

void upsample_backward_input(const Geometry& g, const float* dy, const float* w, float* dx,
                             bool add) {
  const Enlarged e(g);
  e.each([&](std::int64_t n, const Geometry& large) {
    plain_backward_input(large, dy + n * (g.y_numel() / g.n), w, e.pixels.data<float>(), false);
    e.reduce(dx + n * e.sample, large.n, add);
  });
}

void upsample_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  const Enlarged e(g);
  e.each([&](std::int64_t n, const Geometry& large) {
    e.enlarge(x + n * e.sample, large.n);
    plain_backward_weight(large, e.pixels.data<float>(), dy + n * (g.y_numel() / g.n), dw,
                          accumulate || n > 0);
  });
}

}  // namespace

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  WEFT_ASSERT(y.shape() == conv.output(x.shape(), w.dim(0)));
  if (y.numel() == 0) return;
  if (is_depthwise(x.shape(), w.dim(0), conv))
    return depthwise_forward(x, w, bias, residual, conv, y);
  if (conv.is_product()) {
    if (planning()) return;
    Tensor out = rows(y);
    linear_forward(rows(x), w.view({w.dim(0), w.dim(1)}), bias,
                   residual.defined() ? rows(residual) : residual, out);
    return;
  }
  if (const std::int64_t pass = samples_per_pass(x, y), all = x.dim(0); pass < all) {
    for (std::int64_t n = 0; n < all; n += pass) {
      const std::int64_t end = std::min(n + pass, all);
      Tensor out = y.slice(n, end);
      conv_forward(x.slice(n, end), w, bias, residual.defined() ? residual.slice(n, end) : residual,
                   conv, out);
    }
    return;
  }
  const Tensor xs = as_f32(x), ws = as_f32(w);
  Result out(y);
  // The residual becomes the result's first value, to which the convolution adds.
  if (residual.defined() && residual.dtype() == DType::bf16)
    to_f32(residual, out.copy);
  else if (residual.defined() && residual.raw() != out.copy.raw() && !planning())
    std::memcpy(out.f32(), residual.raw(), residual.bytes());
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
  if (dx.numel() == 0) return;
  if (is_depthwise(dx.shape(), w.dim(0), conv))
    return depthwise_backward_input(dy, w, conv, dx, accumulate);
  if (conv.is_product()) {
    if (planning()) return;
    Tensor out = rows(dx);
    linear_backward_input(rows(dy), w.view({w.dim(0), w.dim(1)}), out, accumulate);
    return;
  }
  if (const std::int64_t pass = samples_per_pass(dx, dy), all = dx.dim(0); pass < all) {
    for (std::int64_t n = 0; n < all; n += pass) {
      const std::int64_t end = std::min(n + pass, all);
      Tensor out = dx.slice(n, end);
      conv_backward_input(dy.slice(n, end), w, conv, out, accumulate);
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
  if (conv.is_product() || x.numel() == 0) {  // of no samples: zeros, or nothing to add
    if (planning()) return;
    Tensor d = dw.view({dw.dim(0), dw.numel() / dw.dim(0)});
    linear_backward_weight(rows(dy), rows(x), d, dbias, accumulate);
    return;
  }
  if (is_depthwise(x.shape(), dw.dim(0), conv)) {
    if (dbias.defined() && !planning()) bias_gradient(rows(dy), dbias, accumulate);
    return depthwise_backward_weight(x, dy, conv, dw, accumulate);
  }
  if (const std::int64_t pass = samples_per_pass(x, dy), all = x.dim(0); pass < all) {
    for (std::int64_t n = 0; n < all; n += pass) {
      const std::int64_t end = std::min(n + pass, all);
      conv_backward_weight(x.slice(n, end), dy.slice(n, end), conv, dw, dbias, accumulate || n > 0);
    }
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
