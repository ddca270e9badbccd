// Gradients of upsample.cpp's convolutions, without the large frame: row 2i + p of the result sees
// only rows i - 1 + p and i + p of the small frame, so each of the four phases (p, q) is a 2x2
// convolution of the small frame with sums of the 3x3's weights. 16 products a small pixel instead
// of 36. Where Winograd's transforms fit they take the large frame, read or folded through the
// small one.
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/simd.h"

// Which of the two small rows the 3x3's row k falls on in phase p.
constexpr int row_of(int p, int k) { return p == 0 ? (k > 0) : (k > 1); }

// One phase of a sample: of one frame, or of all where the kernel has several.
Geometry phase_geometry(const Geometry& g, int p, int q) {
  Geometry f = g;
  f.n = 1, f.t = f.to = g.kt == 1 ? 1 : g.t;
  f.kh = f.kw = 2, f.ho = g.h, f.wo = g.w;
  f.top = 1 - p, f.bottom = p, f.left = 1 - q, f.right = q;
  return f;
}
std::int64_t samples(const Geometry& g) { return g.kt == 1 ? g.n * g.t : g.n; }

// The 3x3 over the large frame, of which winograd.cpp takes its small one.
Geometry whole(Geometry g) {
  g.h = g.ho, g.w = g.wo;
  return g;
}

// sums [pairs,2,2] of w [pairs,3,3].
void sum_weights(std::int64_t pairs, const float* w, int p, int q, float* sums) {
  if (planning()) return;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < pairs; ++i) {
    float s[4] = {};
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) s[row_of(p, a) * 2 + row_of(q, b)] += w[i * 9 + a * 3 + b];
    std::copy_n(s, 4, sums + i * 4);
  }
}

// Calls f(g, p, q, sums, phase) for each phase, with memory for its weights and for its pixels of
// one sample.
template <class F>
void each_phase(const Geometry& whole, F&& f) {
  for (int p = 0; p < 2; ++p)
    for (int q = 0; q < 2; ++q) {
      const Geometry g = phase_geometry(whole, p, q);
      const Tensor sums = floats(g.w_numel()), phase = floats(g.y_numel());
      f(g, p, q, sums.data<float>(), phase.data<float>());
    }
}

// phase [t,h,w,c] = pixels (2i + p, 2j + q) of the frames [t,2h,2w,c] of sample number `sample`.
void take_phase(const Geometry& g, int p, int q, const float* frames, std::int64_t sample,
                float* phase) {
  if (planning()) return;
  const float* from = frames + sample * 4 * g.y_numel();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < g.t * g.h; ++i)
    for (std::int64_t j = 0; j < g.w; ++j)
      std::copy_n(from + ((2 * i + p) * 2 * g.w + 2 * j + q) * g.cout, g.cout,
                  phase + (i * g.w + j) * g.cout);
}

}  // namespace

void upsample_backward_input(const Geometry& g, const float* dy, const float* w, float* dx,
                             bool add) {
  Geometry back = whole(g);
  std::swap(back.cin, back.cout);
  back.front = g.kt - 1 - g.front, back.back = g.kt - 1 - g.back;
  if (winograd_fits(back)) {
    const Tensor turned = floats(back.w_numel());
    turn_weights(g, w, turned.data<float>());
    winograd_forward(back, 1, dy, turned.data<float>(), nullptr, add, dx);
    return;
  }
  each_phase(g, [&](const Geometry& one, int p, int q, float* sums, float* phase) {
    sum_weights(g.cout * g.cin * g.kt, w, p, q, sums);
    for (std::int64_t s = 0; s < samples(g); ++s) {
      take_phase(one, p, q, dy, s, phase);
      plain_backward_input(one, phase, sums, dx + s * one.x_numel(), add || p + q > 0);
    }
  });
}

void upsample_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  if (const Geometry large = whole(g); winograd_fits(large)) {
    Geometry small = large;
    small.h = g.h, small.w = g.w;
    winograd_backward_weight(small, 1, x, dy, dw, accumulate);
    return;
  }
  const std::int64_t pairs = g.cout * g.cin * g.kt;
  if (!accumulate && !planning()) std::fill_n(dw, pairs * 9, 0.0f);
  each_phase(g, [&](const Geometry& one, int p, int q, float* sums, float* phase) {
    for (std::int64_t s = 0; s < samples(g); ++s) {
      take_phase(one, p, q, dy, s, phase);
      direct_backward_weight(one, x + s * one.x_numel(), phase, sums, s > 0);
    }
    if (planning()) return;
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < pairs; ++i)
      for (int a = 0; a < 3; ++a)
        for (int b = 0; b < 3; ++b)
          dw[i * 9 + a * 3 + b] += sums[i * 4 + row_of(p, a) * 2 + row_of(q, b)];
  });
}

WEFT_CPU_END
