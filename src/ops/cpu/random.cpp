// CPU side of ops/random.h. Latents are small beside the frames that they stand for: plain loops.
#include "ops/random.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/philox.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Elements of a tensor with C channels, seen as [outer, C, inner].
struct Grid {
  std::int64_t outer, C, inner;
  Grid(const Tensor& t, Channels channels) {
    C = channels == Channels::last ? t.dim(-1) : t.dim(1);
    outer = channels == Channels::last ? t.numel() / C : t.dim(0);
    inner = channels == Channels::last ? 1 : t.numel() / (outer * C);
  }
  // Calls f(element of z, element of mu, element of lv, channel) for all elements of z.
  template <class F>
  void each(F&& f) const {
#pragma omp parallel for collapse(2) schedule(static) if (outer * C * inner > 16384)
    for (std::int64_t o = 0; o < outer; ++o)
      for (std::int64_t c = 0; c < C; ++c)
        for (std::int64_t i = 0; i < inner; ++i)
          f((o * C + c) * inner + i, (2 * o * C + c) * inner + i, (2 * o * C + C + c) * inner + i,
            c);
  }
};

struct Affine {
  const float *a = nullptr, *b = nullptr;
  explicit Affine(const Tensor& t) {
    if (t.defined()) a = t.data<float>(), b = a + t.dim(1);
  }
  float factor(std::int64_t c) const { return a ? a[c] : 1.0f; }
  float operator()(float x, std::int64_t c) const { return a ? x * a[c] + b[c] : x; }
};

template <class T>
void put(T& to, float value, bool accumulate) {
  to = T(accumulate ? static_cast<float>(to) + value : value);
}

}  // namespace

void fill_normal(std::uint64_t seed, int purpose, std::uint64_t step, std::uint64_t sample,
                 Tensor& eps) {
  const Philox random(seed, static_cast<Purpose>(purpose), step, sample);
  const std::int64_t count = eps.numel();
  float* out = eps.data<float>();
#pragma omp parallel for schedule(static) if (count > 16384)
  // By Philox blocks of four values, each named by its number: threads do not change the result.
  for (std::int64_t i = 0; i < (count + 3) / 4; ++i) {
    const auto u = random.block(static_cast<std::uint32_t>(i));
    for (int j = 0; j < 4 && 4 * i + j < count; ++j)
      out[4 * i + j] = Philox::gauss(u[j / 2 * 2], u[j / 2 * 2 + 1], j % 2 != 0);
  }
}

void posterior_draw_forward(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                            Channels channels, Tensor& z) {
  const Affine scaled(affine);
  const float* e = eps.defined() ? eps.data<float>() : nullptr;
  with_type(moments.dtype(), [&](auto type) {
    const auto* m = moments.data<decltype(type)>();
    with_type(z.dtype(), [&](auto type_of_z) {
      using Z = decltype(type_of_z);
      Z* out = z.data<Z>();
      Grid(z, channels).each([&](auto i, auto mu, auto lv, auto c) {
        float value = static_cast<float>(m[mu]);
        if (e)
          value += std::exp(0.5f * std::clamp(static_cast<float>(m[lv]), lowest_log_variance,
                                              highest_log_variance)) *
                   e[i];
        out[i] = Z(scaled(value, c));
      });
    });
  });
}

void posterior_draw_backward(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                             Channels channels, const Tensor& dz, Tensor& dmoments,
                             bool accumulate) {
  const Affine scaled(affine);
  const float* e = eps.defined() ? eps.data<float>() : nullptr;
  with_type(moments.dtype(), [&](auto type) {
    const auto* m = moments.data<decltype(type)>();
    auto* dm = dmoments.data<decltype(type)>();
    with_type(dz.dtype(), [&](auto type_of_z) {
      const auto* g = dz.data<decltype(type_of_z)>();
      Grid(dz, channels).each([&](auto i, auto mu, auto lv, auto c) {
        const float d = static_cast<float>(g[i]) * scaled.factor(c);
        const float v = static_cast<float>(m[lv]);
        const bool inside = e != nullptr && v >= lowest_log_variance && v <= highest_log_variance;
        put(dm[mu], d, accumulate);
        put(dm[lv], inside ? 0.5f * d * e[i] * std::exp(0.5f * v) : 0.0f, accumulate);
      });
    });
  });
}

void clamp_log_variance_forward(const Tensor& moments, Channels channels, Tensor& y) {
  Grid half(moments, channels);
  half.C /= 2;
  with_type(moments.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* m = moments.data<T>();
    T* out = y.data<T>();
    half.each([&](auto, auto mu, auto lv, auto) {
      out[mu] = m[mu];
      out[lv] = T(std::clamp(static_cast<float>(m[lv]), lowest_log_variance, highest_log_variance));
    });
  });
}

void clamp_log_variance_backward(const Tensor& moments, Channels channels, const Tensor& dy,
                                 Tensor& dmoments, bool accumulate) {
  Grid half(moments, channels);
  half.C /= 2;
  with_type(moments.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *m = moments.data<T>(), *g = dy.data<T>();
    T* dm = dmoments.data<T>();
    half.each([&](auto, auto mu, auto lv, auto) {
      const float v = static_cast<float>(m[lv]);
      put(dm[mu], static_cast<float>(g[mu]), accumulate);
      put(dm[lv],
          v >= lowest_log_variance && v <= highest_log_variance ? static_cast<float>(g[lv]) : 0.0f,
          accumulate);
    });
  });
}

WEFT_CPU_END
