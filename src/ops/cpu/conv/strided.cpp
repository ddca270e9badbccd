// 1x1 convolutions that step over rows and columns: products of the pixels that are seen, gathered
// into rows without the others.
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

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

WEFT_CPU_END
