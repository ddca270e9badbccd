// CPU side of ops/text.h, but for the attention: each reads and writes every activation once.
#include "ops/text.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr float k0 = 0.79788456080286535588f;  // sqrt(2/pi)
constexpr float k1 = 0.044715f;

}  // namespace

void rms_norm_forward(const Tensor& x, const Tensor& w, float eps, Tensor& y) {
  const std::int64_t c = w.numel(), rows = x.numel() / c;
  const float* weight = w.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* in = xs + r * c;
      T* out = ys + r * c;
      vf squares{};
      for_vectors(c, [&](std::int64_t i, int n) {
        const vf v = load_n(in + i, n);
        squares += v * v;
      });
      const float scale = 1.0f / std::sqrt(hsum(squares) / static_cast<float>(c) + eps);
      for_vectors(c, [&](std::int64_t i, int n) {
        store_n(out + i, load_n(in + i, n) * scale * load_n(weight + i, n), n);
      });
    }
  });
}

void gated_gelu_forward(const Tensor& gu, Tensor& y) {
  const std::int64_t count = gu.numel() / 2, block = 4096;
  with_type(gu.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *gate = gu.data<T>(), *value = gate + count;
    T* out = y.data<T>();
#pragma omp parallel for schedule(static) if (count > 2 * block)
    for (std::int64_t first = 0; first < count; first += block)
      for_vectors(std::min(block, count - first), [&](std::int64_t i, int n) {
        const vf g = load_n(gate + first + i, n);
        // (1 + tanh(u)) / 2 = sigmoid(2u).
        const vf gelu = g * vsigmoid(2.0f * k0 * (g + k1 * g * g * g));
        store_n(out + first + i, gelu * load_n(value + first + i, n), n);
      });
  });
}

void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y) {
  const std::int64_t c = table.dim(1), rows = ids.numel();
  const std::int32_t* id = ids.data<std::int32_t>();
  with_type(table.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = table.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for schedule(static) if (rows * c > 65536)
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(from + id[r] * c, c, to + r * c);
  });
}

WEFT_CPU_END
