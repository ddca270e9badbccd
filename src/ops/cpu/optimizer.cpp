// CPU side of ops/optimizer.h: one pass, bound by memory (AdamW: 20 bytes an element read, 16
// written with EMA, 2 for a bf16 copy; SGD: 16 and 12; a further EMA: 8 and 4).
#include "ops/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 16384;

vf vsqrt(vf x) {
  vf y;
  for (int i = 0; i < W; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
}

// The factor of the gradient, or none where the step is left out.
std::optional<float> gradient_scale(const Tensor& squares, float grad_clip) {
  const double sum = squares.data<double>()[0];
  if (!std::isfinite(sum)) return std::nullopt;
  const double over = std::sqrt(sum) + 1e-6;
  return grad_clip > 0 && over > grad_clip ? static_cast<float>(grad_clip / over) : 1.0f;
}

}  // namespace

void adamw_step(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& m,
                Tensor& v, Tensor& ema, Tensor& copy) {
  const std::optional<float> verdict = gradient_scale(squares, a.grad_clip);
  if (!verdict) return;
  const float scale = *verdict;
  const std::int64_t count = p.numel();
  const float* g = grad.data<float>();
  float *ps = p.data<float>(), *ms = m.data<float>(), *vs = v.data<float>();
  float* es = ema.defined() && a.ema_decay > 0 ? ema.data<float>() : nullptr;
  bf16* cs = copy.defined() ? copy.data<bf16>() : nullptr;
  const float rc1 = 1.0f / a.correction1, rc2 = 1.0f / std::sqrt(a.correction2);
#pragma omp parallel for schedule(static) if (count > block)
  for (std::int64_t b = 0; b < (count + block - 1) / block; ++b) {
    const std::int64_t first = b * block;
    for_vectors(std::min(block, count - first), [&](std::int64_t at, int n) {
      const std::int64_t i = first + at;
      const vf gi = load_n(g + i, n) * scale;
      const vf mi = a.beta1 * load_n(ms + i, n) + a.rest1 * gi;
      const vf vi = a.beta2 * load_n(vs + i, n) + a.rest2 * gi * gi;
      vf pi = load_n(ps + i, n);
      pi -= a.lr * ((mi * rc1) / (vsqrt(vi) * rc2 + a.eps) + a.weight_decay * pi);
      store_n(ms + i, mi, n);
      store_n(vs + i, vi, n);
      store_n(ps + i, pi, n);
      if (es) store_n(es + i, a.ema_decay * load_n(es + i, n) + (1.0f - a.ema_decay) * pi, n);
      if (cs) store_n(cs + i, pi, n);
    });
  }
}

void sgd_step(const Sgd& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& v,
              Tensor& ema, Tensor& copy) {
  const std::optional<float> verdict = gradient_scale(squares, a.grad_clip);
  if (!verdict) return;
  const float scale = *verdict;
  const std::int64_t count = p.numel();
  const float* g = grad.data<float>();
  float *ps = p.data<float>(), *vs = v.data<float>();
  float* es = ema.defined() && a.ema_decay > 0 ? ema.data<float>() : nullptr;
  bf16* cs = copy.defined() ? copy.data<bf16>() : nullptr;
#pragma omp parallel for schedule(static) if (count > block)
  for (std::int64_t b = 0; b < (count + block - 1) / block; ++b) {
    const std::int64_t first = b * block;
    for_vectors(std::min(block, count - first), [&](std::int64_t at, int n) {
      const std::int64_t i = first + at;
      vf pi = load_n(ps + i, n);
      vf vi = load_n(g + i, n) * scale + a.weight_decay * pi;
      if (!a.first) vi += a.momentum * load_n(vs + i, n);
      pi -= a.lr * vi;
      store_n(vs + i, vi, n);
      store_n(ps + i, pi, n);
      if (es) store_n(es + i, a.ema_decay * load_n(es + i, n) + (1.0f - a.ema_decay) * pi, n);
      if (cs) store_n(cs + i, pi, n);
    });
  }
}

void ema_step(float decay, const Tensor& squares, const Tensor& p, Tensor& ema) {
  if (!std::isfinite(squares.data<double>()[0])) return;
  const std::int64_t count = p.numel();
  const float* ps = p.data<float>();
  float* es = ema.data<float>();
#pragma omp parallel for schedule(static) if (count > block)
  for (std::int64_t b = 0; b < (count + block - 1) / block; ++b) {
    const std::int64_t first = b * block;
    for_vectors(std::min(block, count - first), [&](std::int64_t at, int n) {
      const std::int64_t i = first + at;
      store_n(es + i, decay * load_n(es + i, n) + (1.0f - decay) * load_n(ps + i, n), n);
    });
  }
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

WEFT_CPU_END
