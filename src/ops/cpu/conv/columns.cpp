// Gradients of convolutions of few pixels and many channels, whose weights are far larger than what
// they are applied to: as matrix products with the patches of the input written out as rows. The
// products read and write the weights in PyTorch's order as it is; oneDNN's kernels want another,
// and bringing the weights there and back takes as long as the sums.
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>

#include "core/error.h"
#include "ops/conv.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {

// Calls f(tap, pixel of x) for the taps of pixel p of y, all of them in order; pixel -1: padding.
template <class F>
void each_tap(const Geometry& g, std::int64_t p, F&& f) {
  const std::int64_t frame = p / (g.ho * g.wo), top = p / g.wo % g.ho * g.stride - g.top,
                     left = p % g.wo * g.stride - g.left;
  for (std::int64_t u = 0; u < g.kh; ++u)
    for (std::int64_t v = 0; v < g.kw; ++v) {
      const std::int64_t row = top + u * g.dilation, column = left + v * g.dilation;
      const bool inside = row >= 0 && row < g.h && column >= 0 && column < g.w;
      f(u * g.kw + v, inside ? (frame * g.h + row) * g.w + column : -1);
    }
}

std::int64_t pixels_of(const Geometry& g) { return g.n * g.to * g.ho * g.wo; }

// A matrix that lies elsewhere.
Tensor matrix(const float* p, std::int64_t rows, std::int64_t columns) {
  return Tensor::borrow(const_cast<float*>(p), {rows, columns}, DType::f32, DeviceKind::cpu);
}

}  // namespace

bool columns_fit(const Geometry& g) {
  constexpr std::int64_t few = 64, many = 1 << 18;
  return g.kt == 1 && g.stride_t == 1 && g.to == g.t && g.front == 0 && g.groups == 1 &&
         g.kh * g.kw > 1 && g.ho * g.wo <= few && g.h * g.w <= 4 * few && g.w_numel() >= many;
}

void columns_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                             bool accumulate) {
  const std::int64_t taps = g.kh * g.kw, row = g.cin * taps, pixels = pixels_of(g);
  const Tensor columns = floats(pixels * row);
  if (planning()) return;
  float* const to = columns.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t p = 0; p < pixels; ++p)
    each_tap(g, p, [&](std::int64_t tap, std::int64_t pixel) {
      float* at = to + p * row + tap;
      const float* from = x + pixel * g.cin;
      for (std::int64_t c = 0; c < g.cin; ++c) at[c * taps] = pixel < 0 ? 0.0f : from[c];
    });
  Tensor gradient = matrix(dw, g.cout, row), none;
  linear_backward_weight(matrix(dy, pixels, g.cout), columns.view({pixels, row}), gradient, none,
                         accumulate);
}

void columns_backward_input(const Geometry& g, const float* dy, const float* w, float* dx,
                            bool add) {
  const std::int64_t taps = g.kh * g.kw, row = g.cin * taps, pixels = pixels_of(g);
  const Tensor columns = floats(pixels * row);
  if (planning()) return;
  Tensor of_taps = columns.view({pixels, row});
  linear_backward_input(matrix(dy, pixels, g.cout), matrix(w, g.cout, row), of_taps, false);
  const float* const from = columns.data<float>();
  // A thread has some channels of a frame: no two add to the same value.
  constexpr std::int64_t slice = 64;
  const std::int64_t slices = (g.cin + slice - 1) / slice, frames = g.n * g.t;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t f = 0; f < frames; ++f)
    for (std::int64_t s = 0; s < slices; ++s) {
      const std::int64_t first = s * slice, last = std::min(first + slice, g.cin);
      for (std::int64_t q = 0; q < (add ? 0 : g.h * g.w); ++q)
        std::fill(dx + (f * g.h * g.w + q) * g.cin + first, dx + (f * g.h * g.w + q) * g.cin + last,
                  0.0f);
      for (std::int64_t p = f * g.ho * g.wo; p < (f + 1) * g.ho * g.wo; ++p)
        each_tap(g, p, [&](std::int64_t tap, std::int64_t pixel) {
          if (pixel < 0) return;
          float* to = dx + pixel * g.cin;
          const float* at = from + p * row + tap;
          for (std::int64_t c = first; c < last; ++c) to[c] += at[c * taps];
        });
    }
}

WEFT_CPU_END
