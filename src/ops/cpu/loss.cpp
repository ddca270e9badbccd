// CPU side of ops/loss.h. Sums are made of fixed blocks, so that they do not depend on the thread
// count.
#include "ops/loss.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "ops/random.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 8192;

// The sum of part(i) over blocks i, in order, computed in parallel.
template <class F>
double sum_of(std::int64_t parts, F&& part) {
  std::vector<double> sums(parts);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < parts; ++i) sums[i] = part(i);
  double total = 0;
  for (const double s : sums) total += s;
  return total;
}

// The sum of f(i) over elements [0, count).
template <class F>
double sum_elements(std::int64_t count, F&& f) {
  return sum_of((count + block - 1) / block, [&](std::int64_t b) {
    double s = 0;
    const std::int64_t end = std::min(count, (b + 1) * block);
    for (std::int64_t i = b * block; i < end; ++i) s += f(i);
    return s;
  });
}

// Calls f(first, n) with n <= W for the elements [0, count), in parallel.
template <class F>
void each_vector(std::int64_t count, F&& f) {
#pragma omp parallel for schedule(static) if (count > block)
  for (std::int64_t b = 0; b < (count + block - 1) / block; ++b) {
    const std::int64_t first = b * block;
    for_vectors(std::min(block, count - first), [&](std::int64_t i, int n) { f(first + i, n); });
  }
}

void add_to(Tensor& loss, double value) { loss.data<float>()[0] += static_cast<float>(value); }

// Either form takes the exponential of a negative number only: it cannot overflow.
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

}  // namespace

void l1_forward(const Tensor& a, const Tensor& b, float weight, Tensor& loss) {
  double sum = 0;
  with_type(a.dtype(), [&](auto ta) {
    with_type(b.dtype(), [&](auto tb) {
      const auto* x = a.data<decltype(ta)>();
      const auto* y = b.data<decltype(tb)>();
      sum = sum_elements(a.numel(), [&](std::int64_t i) {
        return std::abs(static_cast<float>(x[i]) - static_cast<float>(y[i]));
      });
    });
  });
  add_to(loss, weight * sum);
}

void l1_backward(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate) {
  with_type(a.dtype(), [&](auto ta) {
    with_type(b.dtype(), [&](auto tb) {
      const auto* x = a.data<decltype(ta)>();
      const auto* y = b.data<decltype(tb)>();
      auto* d = da.data<decltype(ta)>();
      each_vector(a.numel(), [&](std::int64_t i, int n) {
        const vf difference = load_n(x + i, n) - load_n(y + i, n);
        vf g = difference > 0.0f ? splat(weight) : splat(0.0f);
        g = difference < 0.0f ? splat(-weight) : g;
        store_n(d + i, accumulate ? load_n(d + i, n) + g : g, n);
      });
    });
  });
}

void kl_forward(const Tensor& moments, float weight, Tensor& loss) {
  const std::int64_t C = moments.dim(-1) / 2;
  double sum = 0;
  with_type(moments.dtype(), [&](auto type) {
    const auto* m = moments.data<decltype(type)>();
    sum = sum_elements(moments.numel() / 2, [&](std::int64_t i) {
      const std::int64_t at = i / C * 2 * C + i % C;
      const double mu = static_cast<float>(m[at]);
      const double lv =
          std::clamp(static_cast<float>(m[at + C]), lowest_log_variance, highest_log_variance);
      return 0.5 * (mu * mu + std::exp(lv) - 1 - lv);
    });
  });
  add_to(loss, weight * sum);
}

void kl_backward(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate) {
  const std::int64_t C = moments.dim(-1) / 2, count = moments.numel() / 2;
  with_type(moments.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* m = moments.data<T>();
    T* d = dmoments.data<T>();
    const auto put = [&](std::int64_t at, float g) {
      d[at] = T(accumulate ? static_cast<float>(d[at]) + g : g);
    };
#pragma omp parallel for schedule(static) if (count > block)
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = i / C * 2 * C + i % C;
      const float lv = static_cast<float>(m[at + C]);
      put(at, weight * static_cast<float>(m[at]));
      put(at + C, lv < lowest_log_variance || lv > highest_log_variance
                      ? 0.0f
                      : weight * 0.5f * (std::exp(lv) - 1.0f));
    }
  });
}

void lpips_forward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss) {
  const std::int64_t C = a.dim(-1), positions = a.numel() / C;
  const std::int64_t a_frame = a.dim(2) * a.dim(3);
  const float* factor = w.data<float>();
  double sum = 0;
  with_type(a.dtype(), [&](auto type) {
    const auto *x = a.data<decltype(type)>(), *y = b.data<decltype(type)>();
    sum = sum_of(positions, [&](std::int64_t p) {
      vf xx{}, yy{};
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf u = load_n(x + p * C + c, n), v = load_n(y + p * C + c, n);
        xx += u * u, yy += v * v;
      });
      const float rx = 1.0f / (std::sqrt(hsum(xx)) + 1e-10f);
      const float ry = 1.0f / (std::sqrt(hsum(yy)) + 1e-10f);
      vf total{};
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf d = load_n(x + p * C + c, n) * rx - load_n(y + p * C + c, n) * ry;
        total += load_n(factor + c, n) * d * d;
      });
      return static_cast<double>(hsum(total));
    });
  });
  add_to(loss, weight * sum / static_cast<double>(a_frame));
}

void lpips_backward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db) {
  const std::int64_t C = a.dim(-1), positions = a.numel() / C;
  const float* factor = w.data<float>();
  const float scale = -2.0f * weight / static_cast<float>(a.dim(2) * a.dim(3));
  with_type(a.dtype(), [&](auto type) {
    const auto *x = a.data<decltype(type)>(), *y = b.data<decltype(type)>();
    auto* to = db.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t p = 0; p < positions; ++p) {
      vf xx{}, yy{};
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf u = load_n(x + p * C + c, n), v = load_n(y + p * C + c, n);
        xx += u * u, yy += v * v;
      });
      const float norm = std::sqrt(hsum(yy));
      const float rx = 1.0f / (std::sqrt(hsum(xx)) + 1e-10f), ry = 1.0f / (norm + 1e-10f);
      // With g = the gradient of the normalised b: db = g / (|b| + e) - b (g b) / (|b| (|b| +
      // e)^2).
      vf along{};
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf v = load_n(y + p * C + c, n);
        const vf g = scale * load_n(factor + c, n) * (load_n(x + p * C + c, n) * rx - v * ry);
        along += g * v;
      });
      // Where b is 0 its norm has no derivative: the gradient is 0 there (ops/loss.h).
      const float back = norm > 0 ? hsum(along) * ry * ry / norm : 0.0f;
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf v = load_n(y + p * C + c, n);
        const vf g = scale * load_n(factor + c, n) * (load_n(x + p * C + c, n) * rx - v * ry);
        store_n(to + p * C + c, norm > 0 ? g * ry - v * back : splat(0.0f), n);
      });
    }
  });
}

void gan_loss_forward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss) {
  double sum = 0;
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    sum = sum_elements(x.numel(), [&](std::int64_t i) {
      const double v = static_cast<double>(sign) * static_cast<float>(in[i]);
      if (kind == GanLoss::linear) return v;
      return kind == GanLoss::hinge ? std::max(0.0, 1 + v) : softplus(v);
    });
  });
  add_to(loss, weight * sum / static_cast<double>(x.numel()));
}

void gan_loss_backward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& dx,
                       bool accumulate) {
  const std::int64_t count = x.numel();
  const float scale = sign * weight / static_cast<float>(count);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* to = dx.data<T>();
#pragma omp parallel for schedule(static) if (count > block)
    for (std::int64_t i = 0; i < count; ++i) {
      const float v = sign * static_cast<float>(in[i]);
      float g = scale;
      if (kind == GanLoss::hinge && 1.0f + v <= 0.0f) g = 0.0f;
      if (kind == GanLoss::logistic) g = scale / (1.0f + std::exp(-v));
      to[i] = T(accumulate ? static_cast<float>(to[i]) + g : g);
    }
  });
}

void adaptive_weight(const Tensor& n, const Tensor& g, float a, Tensor& weight) {
  const auto norm = [](const Tensor& t) {
    const float* x = t.data<float>();
    return std::sqrt(
        sum_elements(t.numel(), [&](std::int64_t i) { return static_cast<double>(x[i]) * x[i]; }));
  };
  weight.data<float>()[0] = a * static_cast<float>(std::min(norm(n) / (norm(g) + 1e-4), 1e4));
}

void lecam(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
           Tensor& slope) {
  const float d = std::max(0.0f, sign * (mean.data<float>()[0] - other.data<float>()[0]));
  loss.data<float>()[0] += weight * d * d;
  slope.data<float>()[0] = 2.0f * sign * d;
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
