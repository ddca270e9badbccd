// CPU side of ops/vae_loss.h. Sums are made of fixed blocks, so that they do not depend on the thread count.
#include "ops/vae_loss.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 8192;
constexpr float lowest = -30.0f, highest = 20.0f;  // of a log variance

// The sum of part(i) over blocks i, in order, computed in parallel.
template <class F>
double sum_of(std::int64_t parts, F&& part) {
  std::vector<double> sums(static_cast<std::size_t>(parts));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < parts; ++i) sums[static_cast<std::size_t>(i)] = part(i);
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
      const double lv = std::clamp(static_cast<float>(m[at + C]), lowest, highest);
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
      put(at + C, lv < lowest || lv > highest ? 0.0f : weight * 0.5f * (std::exp(lv) - 1.0f));
    }
  });
}

void leaky_relu_forward(const Tensor& x, float slope, Tensor& y) {
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
    each_vector(x.numel(), [&](std::int64_t i, int n) {
      const vf v = load_n(in + i, n);
      store_n(out + i, v > 0.0f ? v : slope * v, n);
    });
  });
}

void leaky_relu_backward(const Tensor& y, float slope, const Tensor& dy, Tensor& dx) {
  with_type(y.dtype(), [&](auto type) {
    const auto* out = y.data<decltype(type)>();
    const auto* from = dy.data<decltype(type)>();
    auto* to = dx.data<decltype(type)>();
    each_vector(y.numel(), [&](std::int64_t i, int n) {
      const vf g = load_n(from + i, n);
      store_n(to + i, load_n(out + i, n) > 0.0f ? g : slope * g, n);
    });
  });
}

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
            if (static_cast<float>(in[at[k] + c]) > static_cast<float>(in[at[best] + c])) best = k;
          to[at[best] + c] = from[(f * h * w + i) * C + c];
        }
      }
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
      // With g = the gradient of the normalised b: db = g / (|b| + e) - b (g b) / (|b| (|b| + e)^2).
      vf along{};
      for_vectors(C, [&](std::int64_t c, int n) {
        const vf v = load_n(y + p * C + c, n);
        const vf g = scale * load_n(factor + c, n) * (load_n(x + p * C + c, n) * rx - v * ry);
        along += g * v;
      });
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

void scaled_add(const Tensor& x, float a, const Tensor& factor, Tensor& y, bool accumulate) {
  const float f = factor.defined() ? a * factor.data<float>()[0] : a;
  with_type(x.dtype(), [&](auto tx) {
    with_type(y.dtype(), [&](auto ty) {
      const auto* in = x.data<decltype(tx)>();
      auto* out = y.data<decltype(ty)>();
      each_vector(x.numel(), [&](std::int64_t i, int n) {
        const vf v = f * load_n(in + i, n);
        store_n(out + i, accumulate ? load_n(out + i, n) + v : v, n);
      });
    });
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

WEFT_CPU_END
