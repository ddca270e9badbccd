// CPU side of the channel norm of ops/norm.h. A position's channels lie together and fit the first
// level of the cache: they are read from memory once, for the length and the result alike.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/norm.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Positions per partial sum of dgamma. Fixed, so that the sums do not depend on the threads.
constexpr std::int64_t chunk_rows = 256;

// sqrt(C) / max(|x|, shortest_channels) of a row, and 1 / |x|^2, 0 where |x| is shorter.
struct RowScale {
  float scale, along;
};
template <class T>
RowScale scale_of(const T* row, std::int64_t C) {
  vf squares{};
  for_vectors(C, [&](std::int64_t i, int n) {
    const vf v = load_n(row + i, n);
    squares += v * v;
  });
  const float sum = hsum(squares), length = std::sqrt(sum);
  return {std::sqrt(static_cast<float>(C)) / std::max(length, shortest_channels),
          length > shortest_channels ? 1.0f / sum : 0.0f};
}

template <class T>
vf silu_slope(vf u) {
  const vf s = vsigmoid_for<T>(u);
  return s * (1.0f + u * (1.0f - s));
}

}  // namespace

void channel_norm_forward(const Tensor& x, const Tensor& gamma, bool silu, Tensor& y) {
  const std::int64_t C = gamma.numel(), rows = x.numel() / C;
  const float* ga = gamma.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* in = xs + r * C;
      T* out = ys + r * C;
      const float scale = scale_of(in, C).scale;
      for_vectors(C, [&](std::int64_t i, int n) {
        const vf u = load_n(in + i, n) * scale * load_n(ga + i, n);
        store_n(out + i, silu ? u * vsigmoid_for<T>(u) : u, n);
      });
    }
  });
}

// With n = x / |x| and b = (the gradient before SiLU) gamma: dx = sqrt(C) / |x| (b - n (n . b)).
void channel_norm_backward(const Tensor& x, const Tensor& gamma, bool silu, const Tensor& dy,
                           Tensor& dx, bool accumulate, Tensor& dgamma) {
  const std::int64_t C = gamma.numel(), rows = x.numel() / C;
  const std::int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  const float* ga = gamma.data<float>();
  struct Partials;
  float* partial = scratch<Partials>(static_cast<std::size_t>(chunks * C));
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *gs = dy.data<T>();
    T* ds = dx.data<T>();
#pragma omp parallel
    {
      struct Row;
      float* g = scratch<Row>(static_cast<std::size_t>(C));  // the gradient before SiLU
#pragma omp for schedule(static)
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        float* sums = partial + chunk * C;
        std::fill_n(sums, C, 0.0f);
        const std::int64_t last = std::min(rows, (chunk + 1) * chunk_rows);
        for (std::int64_t r = chunk * chunk_rows; r < last; ++r) {
          const T *in = xs + r * C, *from = gs + r * C;
          T* out = ds + r * C;
          const RowScale s = scale_of(in, C);
          vf product{};
          for_vectors(C, [&](std::int64_t i, int n) {
            const vf v = load_n(in + i, n), h = v * s.scale, weight = load_n(ga + i, n);
            vf d = load_n(from + i, n);
            if (silu) d *= silu_slope<T>(h * weight);
            store_n(g + i, d, n);
            store_n(sums + i, load_n(sums + i, n) + d * h, n);
            product += d * weight * v;
          });
          const float along = hsum(product) * s.along;
          for_vectors(C, [&](std::int64_t i, int n) {
            vf d = s.scale * (load_n(g + i, n) * load_n(ga + i, n) - load_n(in + i, n) * along);
            if (accumulate) d += load_n(out + i, n);
            store_n(out + i, d, n);
          });
        }
      }
    }
  });
  if (!dgamma.defined()) return;
  float* to = dgamma.data<float>();
  for (std::int64_t c = 0; c < C; ++c) {
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * C + c];
    to[c] += static_cast<float>(sum);
  }
}

WEFT_CPU_END
