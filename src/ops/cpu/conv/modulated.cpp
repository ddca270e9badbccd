// CPU side of ops/conv.h.
#include "ops/conv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "ops/resize.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// An axis of n pixels seen at twice its length.
std::vector<BilinearTap> doubled(std::int64_t n) {
  std::vector<BilinearTap> taps;
  for (int o = 0; o < 2 * n; ++o) taps.push_back(bilinear_tap(o, 0.5f, static_cast<int>(n)));
  return taps;
}

// The four pixels that make one of twice the size, as offsets, and their shares.
struct Square {
  std::int64_t at[4];
  float share[4];

  Square(const BilinearTap& row, const BilinearTap& column, std::int64_t width)
      : at{row.first * width + column.first, row.first * width + column.second,
           row.second * width + column.first, row.second * width + column.second},
        share{(1.0f - row.share) * (1.0f - column.share), (1.0f - row.share) * column.share,
              row.share * (1.0f - column.share), row.share * column.share} {}
};

}  // namespace

void weight_energy(const Tensor& w, Tensor& energy) {
  const std::int64_t pairs = energy.numel(), taps = w.numel() / pairs;
  WEFT_ASSERT(pairs * taps == w.numel());
  float* to = energy.data<float>();
  with_type(w.dtype(), [&](auto type) {
    const auto* from = w.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < pairs; ++i) {
      float sum = 0.0f;
      for (std::int64_t k = 0; k < taps; ++k) {
        const float v = static_cast<float>(from[i * taps + k]);
        sum += v * v;
      }
      to[i] = sum;
    }
  });
}

void demodulation(const Tensor& energy, const Tensor& style, float gain, float eps, Tensor& d) {
  const std::int64_t outs = energy.dim(0), ins = energy.dim(1), count = d.numel();
  WEFT_ASSERT(style.dim(-1) == ins && d.dim(-1) == outs && style.numel() / ins == count / outs);
  const float *e = energy.data<float>(), *s = style.data<float>();
  float* to = d.data<float>();
#pragma omp parallel for schedule(static) if (count * ins > 16384)
  for (std::int64_t i = 0; i < count; ++i) {
    vf sum = {};
    for_vectors(ins, [&](std::int64_t c, int n) {
      const vf factor = load_n(s + i / outs * ins + c, n);
      sum += load_n(e + i % outs * ins + c, n) * factor * factor;
    });
    to[i] = gain / std::sqrt(hsum(sum) + eps);
  }
}

void modulate(const Tensor& x, const Tensor& style, Tensor& y) {
  const std::int64_t frames = x.dim(0) * x.dim(1), h = x.dim(2), w = x.dim(3), C = x.dim(4);
  const bool up = y.dim(2) != h || y.dim(3) != w;
  WEFT_ASSERT(y.numel() == x.numel() * (up ? 4 : 1) && style.numel() == x.dim(0) * C);
  WEFT_ASSERT(!up || (y.dim(2) == 2 * h && y.dim(3) == 2 * w));
  const std::int64_t rows = frames * y.dim(2), width = y.dim(3), rows_of_sample = rows / x.dim(0);
  const std::vector<BilinearTap> down = up ? doubled(h) : std::vector<BilinearTap>(),
                                 across = up ? doubled(w) : down;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
#pragma omp parallel for schedule(static) if (y.numel() > 16384)
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* factor = style.data<float>() + r / rows_of_sample * C;
      const T* frame = in + r / y.dim(2) * h * w * C;
      for (std::int64_t q = 0; q < width; ++q) {
        T* to = out + (r * width + q) * C;
        if (!up) {
          const T* from = in + (r * width + q) * C;
          for_vectors(C, [&](std::int64_t c, int n) {
            store_n(to + c, load_n(from + c, n) * load_n(factor + c, n), n);
          });
          continue;
        }
        const Square s(down[r % (2 * h)], across[q], w);
        const T *a = frame + s.at[0] * C, *b = frame + s.at[1] * C, *c = frame + s.at[2] * C,
                *d = frame + s.at[3] * C;
        for_vectors(C, [&](std::int64_t k, int n) {
          const vf v = s.share[0] * load_n(a + k, n) + s.share[1] * load_n(b + k, n) +
                       s.share[2] * load_n(c + k, n) + s.share[3] * load_n(d + k, n);
          store_n(to + k, v * load_n(factor + k, n), n);
        });
      }
    }
  });
}

void modulated_finish(const Tensor& x, const Tensor& d, const Tensor& noise, const Tensor& strength,
                      const Tensor& bias, float slope, const Tensor& scale, const Tensor& shift,
                      Tensor& y) {
  const std::int64_t C = x.dim(-1), positions = x.numel() / C, each = positions / x.dim(0);
  const std::int64_t plain = scale.defined() ? C / 2 : C;
  WEFT_ASSERT(d.numel() == x.dim(0) * C && bias.numel() == C && y.numel() == x.numel());
  WEFT_ASSERT(!noise.defined() || (noise.numel() == positions && strength.numel() == 1));
  WEFT_ASSERT(!scale.defined() ||
              (C % 2 == 0 && scale.numel() == positions * plain && shift.numel() == scale.numel()));
  const float *factors = d.data<float>(), *b = bias.data<float>(),
              *grain = noise.defined() ? noise.data<float>() : nullptr;
  const float gain = grain ? *strength.data<float>() : 0.0f;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
    const T *times = scale.defined() ? scale.data<T>() : nullptr,
            *plus = scale.defined() ? shift.data<T>() : nullptr;
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
    for (std::int64_t p = 0; p < positions; ++p) {
      const T* from = in + p * C;
      T* to = out + p * C;
      const float* factor = factors + p / each * C;
      const float add = grain ? gain * grain[p] : 0.0f;
      const auto finished = [&](std::int64_t c, int n) {
        const vf v = load_n(from + c, n) * load_n(factor + c, n) + add + load_n(b + c, n);
        return v > 0.0f ? v : slope * v;
      };
      for_vectors(plain, [&](std::int64_t c, int n) { store_n(to + c, finished(c, n), n); });
      if (times == nullptr) continue;
      for_vectors(C - plain, [&](std::int64_t c, int n) {
        const vf v = finished(plain + c, n);
        store_n(to + plain + c,
                v * load_n(times + p * plain + c, n) + load_n(plus + p * plain + c, n), n);
      });
    }
  });
}

void modulated_rgb(const Tensor& x, const Tensor& style, const Tensor& w, const Tensor& bias,
                   const Tensor& skip, Tensor& rgb) {
  const std::int64_t C = x.dim(4), height = x.dim(2), width = x.dim(3);
  const std::int64_t rows = x.dim(0) * x.dim(1) * height, rows_of_sample = rows / x.dim(0);
  WEFT_ASSERT(style.numel() == x.dim(0) * C && w.numel() == 3 * C && bias.numel() == 3);
  WEFT_ASSERT(rgb.numel() == rows * width * 3);
  WEFT_ASSERT(!skip.defined() || (2 * skip.dim(2) == height && 2 * skip.dim(3) == width));
  const float *s = style.data<float>(), *weights = w.data<float>(), *b = bias.data<float>(),
              *before = skip.defined() ? skip.data<float>() : nullptr;
  float* to = rgb.data<float>();
  const std::vector<BilinearTap> down = before ? doubled(height / 2) : std::vector<BilinearTap>(),
                                 across = before ? doubled(width / 2) : down;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* factor = s + r / rows_of_sample * C;
      for (std::int64_t q = 0; q < width; ++q) {
        const T* from = in + (r * width + q) * C;
        vf sum[3] = {};
        for_vectors(C, [&](std::int64_t c, int n) {
          const vf v = load_n(from + c, n) * load_n(factor + c, n);
          for (int o = 0; o < 3; ++o) sum[o] += v * load_n(weights + o * C + c, n);
        });
        float* pixel = to + (r * width + q) * 3;
        for (int o = 0; o < 3; ++o) pixel[o] = hsum(sum[o]) + b[o];
        if (before == nullptr) continue;
        const Square k(down[r % height], across[q], width / 2);
        const float* frame = before + r / height * (height / 2) * (width / 2) * 3;
        for (int o = 0; o < 3; ++o)
          for (int i = 0; i < 4; ++i) pixel[o] += k.share[i] * frame[k.at[i] * 3 + o];
      }
    }
  });
}

WEFT_CPU_END
