// 3x3 of a frame seen at twice its height and width, without that frame: row 2i + p of the result
// sees only rows i - 1 + p and i + p of the small frame, so each of the four phases (p, q) is a 2x2
// convolution of the small frame with sums of the 3x3's weights. 16 products a small pixel instead
// of 36; the backward likewise.
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

// One phase of one frame.
Geometry phase_geometry(const Shape& x, std::int64_t cout, int p, int q) {
  return {1, 1, x[2], x[3], x[4], cout, 1, x[2], x[3], 1, 2, 2, 1, 1, 0, 0, 1 - p, p, 1 - q, q};
}

// The 3x3 over the large frame, of which winograd.cpp takes its small one.
Geometry whole(const Shape& x, std::int64_t cout) {
  return {x[0], x[1], x[2], x[3], x[4], cout, x[1], 2 * x[2], 2 * x[3], 1,
          3,    3,    1,    1,    0,    0,    1,    1,        1,        1};
}

// sums [cout,cin,2,2] of w [cout,cin,3,3].
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

// Every pixel (i, j) of a phase [h,w,c] to or from pixel (2i + p, 2j + q) of a frame [2h,2w,c].
template <class F>
void for_phase(const Geometry& g, int p, int q, F&& f) {
  if (planning()) return;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < g.h; ++i)
    for (std::int64_t j = 0; j < g.w; ++j)
      f((i * g.w + j) * g.cout, ((2 * i + p) * 2 * g.w + 2 * j + q) * g.cout);
}

// Calls f(g, p, q, sums, phase) for each phase, with memory for its weights and for its pixels of
// one frame.
template <class F>
void each_phase(const Shape& x, std::int64_t cout, F&& f) {
  for (int p = 0; p < 2; ++p)
    for (int q = 0; q < 2; ++q) {
      const Geometry g = phase_geometry(x, cout, p, q);
      const Tensor sums = floats(cout * x[4] * 4), phase = floats(g.y_numel());
      f(g, p, q, sums.data<float>(), phase.data<float>());
    }
}

// A phase of the large frame number `f`.
void take_phase(const Geometry& g, int p, int q, const float* frames, std::int64_t f,
                float* phase) {
  const float* from = frames + f * 4 * g.y_numel();
  for_phase(g, p, q,
            [&](std::int64_t to, std::int64_t at) { std::copy_n(from + at, g.cout, phase + to); });
}

}  // namespace

void upsample_forward(const Shape& x, std::int64_t cout, const float* xs, const float* w,
                      const float* bias, bool add, float* y) {
  if (const Geometry g = whole(x, cout); winograd_fits(g)) {
    winograd_forward(g, 1, 0, xs, w, bias, add, y);
    return;
  }
  each_phase(x, cout, [&](const Geometry& g, int p, int q, float* sums, float* phase) {
    sum_weights(cout * x[4], w, p, q, sums);
    for (std::int64_t f = 0; f < x[0] * x[1]; ++f) {
      plain_forward(g, xs + f * g.x_numel(), sums, bias, false, phase);
      float* to = y + f * 4 * g.y_numel();
      for_phase(g, p, q, [&](std::int64_t from, std::int64_t at) {
        for (std::int64_t c = 0; c < cout; ++c)
          to[at + c] = add ? to[at + c] + phase[from + c] : phase[from + c];
      });
    }
  });
}

void upsample_backward_input(const Shape& x, std::int64_t cout, const float* dy, const float* w,
                             float* dx, bool add) {
  Geometry back = whole(x, cout);
  std::swap(back.cin, back.cout);
  if (winograd_fits(back)) {
    const Tensor turned = floats(back.w_numel());
    turn_weights(whole(x, cout), w, turned.data<float>());
    back.h = back.ho, back.w = back.wo;
    winograd_forward(back, 0, 1, dy, turned.data<float>(), nullptr, add, dx);
    return;
  }
  each_phase(x, cout, [&](const Geometry& g, int p, int q, float* sums, float* phase) {
    sum_weights(cout * x[4], w, p, q, sums);
    for (std::int64_t f = 0; f < x[0] * x[1]; ++f) {
      take_phase(g, p, q, dy, f, phase);
      plain_backward_input(g, phase, sums, dx + f * g.x_numel(), add || p + q > 0);
    }
  });
}

void upsample_backward_weight(const Shape& x, std::int64_t cout, const float* xs, const float* dy,
                              float* dw, bool accumulate) {
  if (const Geometry g = whole(x, cout); winograd_fits(g)) {
    winograd_backward_weight(g, 1, xs, dy, dw, accumulate);
    return;
  }
  const std::int64_t pairs = cout * x[4];
  if (!accumulate && !planning()) std::fill_n(dw, pairs * 9, 0.0f);
  each_phase(x, cout, [&](const Geometry& g, int p, int q, float* sums, float* phase) {
    for (std::int64_t f = 0; f < x[0] * x[1]; ++f) {
      take_phase(g, p, q, dy, f, phase);
      direct_backward_weight(g, xs + f * g.x_numel(), phase, sums, f > 0);
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
