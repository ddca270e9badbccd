// CPU side of ops/critic.h.
#include "ops/critic.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"
}  // namespace

void lecam(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
           Tensor& slope) {
  const float d = std::max(0.0f, sign * (mean.data<float>()[0] - other.data<float>()[0]));
  loss.data<float>()[0] += weight * d * d;
  slope.data<float>()[0] = 2.0f * sign * d;
}

void running_average(const Tensor& rows, std::int64_t width, std::int64_t first, float scale,
                     float decay, Tensor& average) {
  float* a = average.data<float>();
  for (std::int64_t i = 0; i < average.numel(); ++i) {
    double sum = 0;
    for (std::int64_t r = 0; r < rows.numel() / width; ++r)
      sum += rows.data<double>()[r * width + first + i];
    if (!std::isfinite(sum)) continue;
    a[i] = decay * a[i] + (1.0f - decay) * scale * static_cast<float>(sum);
  }
}

void gradient_penalty_forward(const Tensor& g, float weight, Tensor& norms, Tensor& loss) {
  const std::int64_t F = g.dim(1), size = g.numel() / F;
  float* to = norms.data<float>();
  with_type(g.dtype(), [&](auto type) {
    const auto* x = g.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t f = 0; f < F; ++f) {
      double sum = 0;
      for (std::int64_t i = f * size; i < (f + 1) * size; ++i) {
        const double v = static_cast<float>(x[i]);
        sum += v * v;
      }
      to[f] = static_cast<float>(std::sqrt(sum));
    }
  });
  double total = 0;
  for (std::int64_t f = 0; f < F; ++f) total += (to[f] - 1.0) * (to[f] - 1.0);
  loss.data<float>()[0] += static_cast<float>(weight * total / static_cast<double>(F));
}

void gradient_penalty_backward(const Tensor& g, const Tensor& norms, float weight, Tensor& dg) {
  const std::int64_t F = g.dim(1), size = g.numel() / F;
  const float* norm = norms.data<float>();
  with_type(g.dtype(), [&](auto type) {
    const auto* x = g.data<decltype(type)>();
    auto* to = dg.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t f = 0; f < F; ++f) {
      const float a =
          norm[f] > 0 ? 2.0f * weight / static_cast<float>(F) * (norm[f] - 1.0f) / norm[f] : 0.0f;
      for_vectors(size, [&](std::int64_t i, int n) {
        store_n(to + f * size + i, a * load_n(x + f * size + i, n), n);
      });
    }
  });
}

WEFT_CPU_END
