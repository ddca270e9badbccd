// The choice between the ways to compute a convolution, and the backward of stride 1 as a forward.
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/conv_parts.h"
namespace {
#include "ops/cpu/simd.h"
}  // namespace

// to[i][o][kt-1-a][kh-1-b][kw-1-c] = w[o][i][a][b][c].
void turn_weights(const Geometry& g, const float* w, float* to) {
  if (planning()) return;
  const std::int64_t k = g.kt * g.kh * g.kw;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < g.cin; ++i)
    for (std::int64_t o = 0; o < g.cout; ++o)
      for (std::int64_t a = 0; a < k; ++a)
        to[(i * g.cout + o) * k + k - 1 - a] = w[(o * g.cin + i) * k + a];
}

void plain_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                   float* y) {
  if (winograd_fits(g))
    winograd_forward(g, 0, 0, x, w, bias, add, y);
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
  // More zeros in front than a kernel is long (clips of few frames) would have to be cut off: left to oneDNN.
  const bool turns = g.front < g.kt && g.top < g.kh && g.left < g.kw;
  if (g.stride_t == 1 && g.stride == 1 && turns) {
    const Tensor turned = floats(g.w_numel());
    turn_weights(g, w, turned.data<float>());
    Geometry b = g;
    b.t = g.to, b.h = g.ho, b.w = g.wo, b.cin = g.cout;
    b.to = g.t, b.ho = g.h, b.wo = g.w, b.cout = g.cin;
    b.front = g.kt - 1 - g.front, b.top = g.kh - 1 - g.top, b.left = g.kw - 1 - g.left;
    // What follows the last is what makes the sizes come out.
    b.back = b.to + g.kt - 1 - b.t - b.front;
    b.bottom = b.ho + g.kh - 1 - b.h - b.top;
    b.right = b.wo + g.kw - 1 - b.w - b.left;
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
    winograd_backward_weight(g, 0, x, dy, dw, accumulate);
  else
    direct_backward_weight(g, x, dy, dw, accumulate);
}

WEFT_CPU_END
