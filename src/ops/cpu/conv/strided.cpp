// Convolutions that step over rows and columns. Those of 1x1 are products of the pixels that are
// seen, gathered into rows without the others. The gradient of larger weights is a product of what
// each pixel of the result sees, gathered into rows: oneDNN 2.6 takes four
// times as long on Zen 5 (validation/results/cpu.md, Kernels).
#include <immintrin.h>

#include <dnnl.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "core/error.h"
#include "ops/conv.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/simd.h"

// Calls f(pixel that is seen, its place among all pixels, channels) for the pixels of x
// [N,T,H,W,C], of which y [N,T,Ho,Wo,.] sees every stride-th row and column.
template <class F>
void each_seen(const Shape& x, const Shape& y, std::int64_t stride, F&& f) {
  const std::int64_t frames = y[0] * y[1], rows = y[2], columns = y[3];
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t n = 0; n < frames; ++n)
    for (std::int64_t h = 0; h < rows; ++h)
      for (std::int64_t w = 0; w < columns; ++w)
        f((n * rows + h) * columns + w, (n * x[2] + h * stride) * x[3] + w * stride);
}

// The pixels that y sees, as rows.
Tensor seen(const Tensor& x, const Shape& y, std::int64_t stride) {
  const std::int64_t C = x.dim(-1);
  Tensor rows = Tensor::empty({y.numel() / y[-1], C}, x.dtype());
  if (planning()) return rows;
  with_type(x.dtype(), [&](auto type) {
    const auto* from = x.data<decltype(type)>();
    auto* to = rows.data<decltype(type)>();
    each_seen(x.shape(), y, stride, [&](std::int64_t row, std::int64_t pixel) {
      std::memcpy(static_cast<void*>(to + row * C), from + pixel * C,
                  static_cast<std::size_t>(C) * sizeof type);
    });
  });
  return rows;
}

// to [rows * wo, kh * kw * cin]: what the pixels of rows first_row ... of a frame's result see.
void gather(const Geometry& g, const float* frame, std::int64_t first_row, std::int64_t rows,
            float* to) {
  const std::int64_t line = g.kw * g.cin;
#pragma omp parallel for schedule(static)
  for (std::int64_t p = 0; p < rows * g.wo; ++p) {
    const std::int64_t left = p % g.wo * g.stride - g.left;
    const std::int64_t skip = std::max<std::int64_t>(0, -left);
    const std::int64_t end = std::min(g.kw, g.w - left);
    for (std::int64_t b = 0; b < g.kh; ++b) {
      float* out = to + (p * g.kh + b) * line;
      const std::int64_t row = (first_row + p / g.wo) * g.stride - g.top + b;
      const bool inside = row >= 0 && row < g.h && skip < end;
      if (!inside || end - skip < g.kw) std::fill_n(out, line, 0.0f);
      if (inside)
        std::copy_n(frame + (row * g.w + left + skip) * g.cin, (end - skip) * g.cin,
                    out + skip * g.cin);
    }
  }
}

Tensor as_rows(const Tensor& t) { return t.view({t.numel() / t.dim(-1), t.dim(-1)}); }
Tensor matrix(const Tensor& w) { return w.view({w.dim(0), w.dim(1)}); }

}  // namespace

void strided_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                     std::int64_t stride, Tensor& y) {
  const Tensor rows = seen(x, y.shape(), stride);
  if (planning()) return;
  Tensor out = as_rows(y);
  linear_forward(rows, matrix(w), bias, residual.defined() ? as_rows(residual) : residual, out);
}

void strided_backward_input(const Tensor& dy, const Tensor& w, std::int64_t stride, Tensor& dx,
                            bool accumulate) {
  const std::int64_t C = dx.dim(-1);
  Tensor rows = Tensor::empty({dy.numel() / dy.dim(-1), C}, dx.dtype());
  if (planning()) return;
  linear_backward_input(as_rows(dy), matrix(w), rows, false);
  if (!accumulate) std::memset(dx.raw(), 0, dx.bytes());
  with_type(dx.dtype(), [&](auto type) {
    const auto* from = rows.data<decltype(type)>();
    auto* to = dx.data<decltype(type)>();
    each_seen(dx.shape(), dy.shape(), stride, [&](std::int64_t row, std::int64_t pixel) {
      for_vectors(C, [&](std::int64_t c, int n) {
        auto* at = to + pixel * C + c;
        store_n(at, load_n(at, n) + load_n(from + row * C + c, n), n);
      });
    });
  });
}

void strided_backward_weight(const Tensor& x, const Tensor& dy, std::int64_t stride, Tensor& dw,
                             Tensor& dbias, bool accumulate) {
  const Tensor rows = seen(x, dy.shape(), stride);
  if (planning()) return;
  Tensor d = matrix(dw);
  linear_backward_weight(as_rows(dy), rows, d, dbias, accumulate);
}

bool gather_fits(const Geometry& g) {
  // Of few channels the rows would be short copies.
  return g.stride > 1 && g.kt == 1 && g.stride_t == 1 && g.front == 0 && g.t == g.to &&
         g.dilation == 1 && g.groups == 1 && g.cin >= 32;
}

void gather_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                            bool accumulate) {
  const std::int64_t each = g.kh * g.kw, K = each * g.cin;
  // Rows of the result at a time: some 8 MB of what they see stay in the cache.
  const std::int64_t most = std::clamp<std::int64_t>((1 << 21) / (g.wo * K), 1, g.ho);
  const Tensor columns = floats(most * g.wo * K), sums = floats(g.cout * K);
  if (planning()) return;
  detail::add_flops(g.flops());
  float *seen_by = columns.data<float>(), *sum = sums.data<float>();
  bool later = false;
  for (std::int64_t frame = 0; frame < g.n * g.t; ++frame)
    for (std::int64_t h = 0; h < g.ho; h += most) {
      const std::int64_t rows = std::min(most, g.ho - h);
      gather(g, x + frame * g.h * g.w * g.cin, h, rows, seen_by);
      const auto status = dnnl_sgemm('T', 'N', g.cout, K, rows * g.wo, 1.0f,
                                     dy + (frame * g.ho + h) * g.wo * g.cout, g.cout, seen_by, K,
                                     std::exchange(later, true) ? 1.0f : 0.0f, sum, K);
      WEFT_ASSERT(status == dnnl_success);
    }
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < g.cout; ++o)
    for (std::int64_t k = 0; k < each; ++k)
      for (std::int64_t i = 0; i < g.cin; ++i) {
        float& to = dw[(o * g.cin + i) * each + k];
        to = (accumulate ? to : 0.0f) + sum[o * K + k * g.cin + i];
      }
}

WEFT_CPU_END
