// CPU side of ops/pool.h.
#include "ops/pool.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"
}  // namespace

void max_pool_forward(const Tensor& x, Tensor& y) {
  const std::int64_t W_in = x.dim(3), h = y.dim(2), w = y.dim(3), C = y.dim(4);
  const std::int64_t rows = y.dim(0) * y.dim(1) * h;
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto* top = in + (r / h * x.dim(2) + 2 * (r % h)) * W_in * C;
      for (std::int64_t i = 0; i < w; ++i) {
        const auto *a = top + 2 * i * C, *b = a + W_in * C;
        for_vectors(C, [&](std::int64_t c, int n) {
          const vf p = load_n(a + c, n), q = load_n(a + C + c, n);
          const vf s = load_n(b + c, n), t = load_n(b + C + c, n);
          const vf upper = p > q ? p : q, lower = s > t ? s : t;
          store_n(out + (r * w + i) * C + c, upper > lower ? upper : lower, n);
        });
      }
    }
  });
}

void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  const std::int64_t H = x.dim(2), W_in = x.dim(3), h = dy.dim(2), w = dy.dim(3), C = dy.dim(4);
  const std::int64_t frames = x.dim(0) * x.dim(1);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = x.data<T>(), *from = dy.data<T>();
    T* to = dx.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t f = 0; f < frames; ++f) {
      std::fill_n(to + f * H * W_in * C, H * W_in * C, T(0.0f));
      for (std::int64_t i = 0; i < h * w; ++i) {
        const std::int64_t corner = ((f * H + i / w * 2) * W_in + i % w * 2) * C;
        const std::int64_t at[4] = {corner, corner + C, corner + W_in * C, corner + (W_in + 1) * C};
        for (std::int64_t c = 0; c < C; ++c) {
          int best = 0;
          for (int k = 1; k < 4; ++k)
            // Strictly greater: of equal values the first gets the gradient.
            if (static_cast<float>(in[at[k] + c]) > static_cast<float>(in[at[best] + c])) best = k;
          to[at[best] + c] = from[(f * h * w + i) * C + c];
        }
      }
    }
  });
}

WEFT_CPU_END
