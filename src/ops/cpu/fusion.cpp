// CPU side of ops/pointwise.h: bound by memory, a pixel at a time.
#include "ops/pointwise.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Calls f(pixel) for all pixels of x [N,T,H,W,C], in parallel.
template <class F>
void for_pixels(const Tensor& x, F&& f) {
  const std::int64_t pixels = x.numel() / x.dim(-1);
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
  for (std::int64_t p = 0; p < pixels; ++p) f(p);
}

// The sum of term(element, lanes) over n elements.
template <class F>
float sum_of(std::int64_t n, F&& term) {
  // Four sums: one would wait for each addition before the next.
  vf sum[4] = {};
  std::int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) sum[k] += term(i + k * W, W);
  for_vectors(n - i, [&](std::int64_t at, int lanes) { sum[0] += term(i + at, lanes); });
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace

void add_outer(const Tensor& x, const Tensor& by_channel, const Tensor& by_pixel, Tensor& y) {
  const std::int64_t C = x.dim(-1), pixels = x.numel() / C / x.dim(0);  // of a sample
  WEFT_ASSERT(!by_channel.defined() || by_channel.numel() == x.dim(0) * C);
  WEFT_ASSERT(!by_pixel.defined() || by_pixel.numel() == x.numel() / C);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    const T* channel = by_channel.defined() ? by_channel.data<T>() : nullptr;
    const T* pixel = by_pixel.defined() ? by_pixel.data<T>() : nullptr;
    T* out = y.data<T>();
    for_pixels(x, [&](std::int64_t p) {
      const vf term = splat(pixel ? static_cast<float>(pixel[p]) : 0.0f);
      const T* terms = channel ? channel + p / pixels * C : nullptr;
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf v = load_n(in + p * C + c, n);
        store_n(out + p * C + c, (terms ? v + load_n(terms + c, n) : v) + term, n);
      });
    });
  });
}

void sum_channels(const Tensor& x, float factor, Tensor& y, bool accumulate) {
  const std::int64_t C = x.dim(-1);
  WEFT_ASSERT(y.numel() == x.numel() / C && x.dtype() == y.dtype());
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
    for_pixels(x, [&](std::int64_t p) {
      const T* from = in + p * C;
      const float sum =
          factor * sum_of(C, [&](std::int64_t c, int n) { return load_n(from + c, n); });
      out[p] = T(accumulate ? static_cast<float>(out[p]) + sum : sum);
    });
  });
}

void repeat_channels(const Tensor& dy, float factor, Tensor& dx, bool accumulate) {
  const std::int64_t C = dx.dim(-1);
  WEFT_ASSERT(dy.numel() == dx.numel() / C && dx.dtype() == dy.dtype());
  with_type(dx.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = dy.data<T>();
    T* out = dx.data<T>();
    for_pixels(dx, [&](std::int64_t p) {
      const vf d = splat(factor * static_cast<float>(in[p]));
      for_vectors(C, [&](std::int64_t c, int n) {
        T* to = out + p * C + c;
        store_n(to, accumulate ? load_n(to, n) + d : d, n);
      });
    });
  });
}

void scale_groups_forward(const Tensor& x, const Tensor& a, Tensor& y) {
  const std::int64_t C = x.dim(-1), G = a.dim(-1), size = C / G;
  WEFT_ASSERT(size * G == C && a.numel() / G == x.numel() / C && x.dtype() == a.dtype());
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = x.data<T>(), *factors = a.data<T>();
    T* out = y.data<T>();
    for_pixels(x, [&](std::int64_t p) {
      for (std::int64_t g = p * G; g < (p + 1) * G; ++g) {
        const vf factor = splat(static_cast<float>(factors[g]));
        for_vectors(size, [&](std::int64_t c, int n) {
          store_n(out + g * size + c, load_n(in + g * size + c, n) * factor, n);
        });
      }
    });
  });
}

void scale_groups_backward(const Tensor& x, const Tensor& a, const Tensor& dy, Tensor& dx,
                           Tensor& da) {
  const std::int64_t C = x.dim(-1), G = a.dim(-1), size = C / G;
  WEFT_ASSERT(size * G == C && a.numel() / G == x.numel() / C && x.dtype() == a.dtype());
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = x.data<T>(), *factors = a.data<T>(), *from = dy.data<T>();
    T* to = dx.defined() ? dx.data<T>() : nullptr;
    T* sums = da.defined() ? da.data<T>() : nullptr;
    for_pixels(x, [&](std::int64_t p) {
      for (std::int64_t g = p * G; g < (p + 1) * G; ++g) {
        const T *v = in + g * size, *d = from + g * size;
        if (sums)
          sums[g] = T(sum_of(
              size, [&](std::int64_t c, int n) { return load_n(v + c, n) * load_n(d + c, n); }));
        if (!to) continue;
        const vf factor = splat(static_cast<float>(factors[g]));
        for_vectors(size, [&](std::int64_t c, int n) {
          store_n(to + g * size + c, load_n(d + c, n) * factor, n);
        });
      }
    });
  });
}

WEFT_CPU_END
