// CPU side of GroupNorm of ops/norm.h. Channels lie together, groups are runs of them, so every
// pass works on vectors of channels and sums them per channel; groups only appear where a few
// numbers per channel are put together. Forward: two reads, one write of the activations; backward:
// two reads of x and dy, one write.
#include "ops/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Positions per partial sum. Fixed, so that the sums do not depend on the threads.
constexpr std::int64_t chunk_rows = 256;

struct Sizes {
  std::int64_t N, P, C, groups, chunks;  // chunks of positions, a sample
  std::int64_t width() const { return C / groups; }
};

Sizes sizes_of(const Tensor& x, int groups) {
  const std::int64_t N = x.dim(0), C = x.dim(-1), P = x.numel() / (N * C);
  WEFT_ASSERT(C % groups == 0);
  return {N, P, C, groups, (P + chunk_rows - 1) / chunk_rows};
}

// Calls f(sample, first row, rows, chunk) for all chunks of all samples, in parallel.
template <class F>
void for_chunks(const Sizes& s, F&& f) {
#pragma omp parallel for schedule(static)
  for (std::int64_t chunk = 0; chunk < s.N * s.chunks; ++chunk) {
    const std::int64_t n = chunk / s.chunks, first = chunk % s.chunks * chunk_rows;
    f(n, n * s.P + first, std::min(chunk_rows, s.P - first), chunk);
  }
}

// Per chunk and channel: mean and sum of squared deviations from it. Differences from the chunk's
// first row are summed: they do not cancel.
template <class T>
void chunk_moments(const Sizes& s, const T* x, float* partial) {
  for_chunks(s, [&](std::int64_t, std::int64_t first, std::int64_t rows, std::int64_t chunk) {
    const T* in = x + first * s.C;
    const float n = static_cast<float>(rows);
    float* to = partial + chunk * 2 * s.C;
    const auto done = [&](std::int64_t i, vf pivot, vf sum, vf squares, int width) {
      const vf mean = sum / n;
      store_n(to + i, pivot + mean, width);
      store_n(to + s.C + i, squares - sum * mean, width);
    };
    std::int64_t i = 0;
    for (; i + 4 * W <= s.C; i += 4 * W) {
      vf pivot[4], sum[4] = {}, squares[4] = {};
      for (int q = 0; q < 4; ++q) pivot[q] = load(in + i + q * W);
      for (std::int64_t r = 1; r < rows; ++r)
        for (int q = 0; q < 4; ++q) {
          const vf d = load(in + r * s.C + i + q * W) - pivot[q];
          sum[q] += d;
          squares[q] += d * d;
        }
      for (int q = 0; q < 4; ++q) done(i + q * W, pivot[q], sum[q], squares[q], W);
    }
    for_vectors(s.C - i, [&](std::int64_t at, int width) {
      const vf pivot = load_n(in + i + at, width);
      vf sum{}, squares{};
      for (std::int64_t r = 1; r < rows; ++r) {
        const vf d = load_n(in + r * s.C + i + at, width) - pivot;
        sum += d;
        squares += d * d;
      }
      done(i + at, pivot, sum, squares, width);
    });
  });
}

// Mean and 1/sigma of each group from its chunks' and channels' moments.
void group_moments(const Sizes& s, const float* partial, float eps, float* stats) {
  const double count = static_cast<double>(s.P * s.width());
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t n = 0; n < s.N; ++n)
    for (std::int64_t g = 0; g < s.groups; ++g) {
      const auto each = [&](auto&& f) {
        for (std::int64_t k = 0; k < s.chunks; ++k) {
          const double rows = static_cast<double>(std::min(chunk_rows, s.P - k * chunk_rows));
          const float* p = partial + (n * s.chunks + k) * 2 * s.C + g * s.width();
          for (std::int64_t i = 0; i < s.width(); ++i)
            f(rows, static_cast<double>(p[i]), static_cast<double>(p[s.C + i]));
        }
      };
      double mean = 0, squares = 0;
      each([&](double rows, double m, double) { mean += rows * m / count; });
      each([&](double rows, double m, double q) { squares += q + rows * (m - mean) * (m - mean); });
      float* to = stats + (n * s.groups + g) * 2;
      to[0] = static_cast<float>(mean);
      to[1] = static_cast<float>(1.0 / std::sqrt(squares / count + static_cast<double>(eps)));
    }
}

// Per sample and channel what the normalisation does: u = x * scale + shift.
std::vector<float> affine(const Sizes& s, const Tensor& gamma, const Tensor& beta,
                          const float* stats) {
  const float *ga = gamma.data<float>(), *be = beta.data<float>();
  std::vector<float> ab(s.N * 2 * s.C);
  for (std::int64_t n = 0; n < s.N; ++n)
    for (std::int64_t c = 0; c < s.C; ++c) {
      const float* st = stats + (n * s.groups + c / s.width()) * 2;
      float* to = ab.data() + n * 2 * s.C + c;
      to[0] = ga[c] * st[1];
      to[s.C] = be[c] - st[0] * to[0];
    }
  return ab;
}

template <class T>
vf silu_slope(vf u) {
  const vf sig = vsigmoid_for<T>(u);
  return sig * (1.0f + u * (1.0f - sig));
}

}  // namespace

void group_norm_forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, int groups,
                        float eps, bool silu, Tensor& y, Tensor& stats) {
  const Sizes s = sizes_of(x, groups);
  struct Partials;
  float* partial = scratch<Partials>(static_cast<std::size_t>(s.N * s.chunks * 2 * s.C));
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
    chunk_moments(s, xs, partial);
    group_moments(s, partial, eps, stats.data<float>());
    const std::vector<float> ab = affine(s, gamma, beta, stats.data<float>());
    for_chunks(s, [&](std::int64_t n, std::int64_t first, std::int64_t rows, std::int64_t) {
      const float *scale = ab.data() + n * 2 * s.C, *shift = scale + s.C;
      for (std::int64_t r = first; r < first + rows; ++r)
        for_vectors(s.C, [&](std::int64_t i, int width) {
          const vf u =
              load_n(xs + r * s.C + i, width) * load_n(scale + i, width) + load_n(shift + i, width);
          store_n(ys + r * s.C + i, silu ? u * vsigmoid_for<T>(u) : u, width);
        });
    });
  });
}

void group_norm_backward(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                         const Tensor& stats, int groups, bool silu, const Tensor& dy, Tensor& dx,
                         bool accumulate, Tensor& dgamma, Tensor& dbeta) {
  const Sizes s = sizes_of(x, groups);
  const float *ga = gamma.data<float>(), *st = stats.data<float>();
  const std::vector<float> ab = affine(s, gamma, beta, st);
  struct Partials;
  float* partial = scratch<Partials>(static_cast<std::size_t>(s.N * s.chunks * 2 * s.C));
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *gs = dy.data<T>();
    T* ds = dx.data<T>();
    // Gradient of u, the normalisation's result, at one place.
    const auto gradient = [&](std::int64_t at, vf v, vf scale, vf shift, int width) {
      const vf g = load_n(gs + at, width);
      return silu ? g * silu_slope<T>(v * scale + shift) : g;
    };
    // Per chunk and channel: sums of g and of g (x - mean).
    for_chunks(s, [&](std::int64_t n, std::int64_t first, std::int64_t rows, std::int64_t chunk) {
      const float *scale = ab.data() + n * 2 * s.C, *shift = scale + s.C;
      for_vectors(s.C, [&](std::int64_t i, int width) {
        const vf a = load_n(scale + i, width), b = load_n(shift + i, width);
        vf mean{};
        for (int k = 0; k < width; ++k) mean[k] = st[(n * s.groups + (i + k) / s.width()) * 2];
        vf sum{}, product{};
        for (std::int64_t r = first; r < first + rows; ++r) {
          const vf v = load_n(xs + r * s.C + i, width);
          const vf g = gradient(r * s.C + i, v, a, b, width);
          sum += g;
          product += g * (v - mean);
        }
        store_n(partial + chunk * 2 * s.C + i, sum, width);
        store_n(partial + chunk * 2 * s.C + s.C + i, product, width);
      });
    });
    // dx = g a + x b + c per channel (docs/models/video_vae.md, Derivatives), from the sums of the
    // group; dgamma and dbeta on the way.
    std::vector<float> linear(s.N * 2 * s.C);
    std::vector<double> sums(2 * s.C);
    for (std::int64_t n = 0; n < s.N; ++n) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (std::int64_t k = 0; k < s.chunks; ++k) {
        const float* p = partial + (n * s.chunks + k) * 2 * s.C;
        for (std::int64_t c = 0; c < 2 * s.C; ++c) sums[c] += static_cast<double>(p[c]);
      }
      const double* product = sums.data() + s.C;
      for (std::int64_t g = 0; g < s.groups; ++g) {
        const double mean = st[(n * s.groups + g) * 2], rstd = st[(n * s.groups + g) * 2 + 1];
        const double count = static_cast<double>(s.P * s.width());
        double m1 = 0, m2 = 0;
        for (std::int64_t c = g * s.width(); c < (g + 1) * s.width(); ++c) {
          m1 += ga[c] * sums[c] / count;
          m2 += ga[c] * product[c] * rstd / count;
          if (dgamma.defined()) dgamma.data<float>()[c] += static_cast<float>(product[c] * rstd);
          if (dbeta.defined()) dbeta.data<float>()[c] += static_cast<float>(sums[c]);
        }
        for (std::int64_t c = g * s.width(); c < (g + 1) * s.width(); ++c) {
          float* to = linear.data() + n * 2 * s.C + c;
          to[0] = static_cast<float>(-m2 * rstd * rstd);
          to[s.C] = static_cast<float>((m2 * rstd * mean - m1) * rstd);
        }
      }
    }
    for_chunks(s, [&](std::int64_t n, std::int64_t first, std::int64_t rows, std::int64_t) {
      const float *scale = ab.data() + n * 2 * s.C, *shift = scale + s.C;
      const float *b = linear.data() + n * 2 * s.C, *c = b + s.C;
      for (std::int64_t r = first; r < first + rows; ++r)
        for_vectors(s.C, [&](std::int64_t i, int width) {
          const std::int64_t at = r * s.C + i;
          const vf v = load_n(xs + at, width), a = load_n(scale + i, width);
          const vf g = gradient(at, v, a, load_n(shift + i, width), width);
          vf d = g * a + (v * load_n(b + i, width) + load_n(c + i, width));
          if (accumulate) d += load_n(ds + at, width);
          store_n(ds + at, d, width);
        });
    });
  });
}

// With a = dyt, b = xt, means over the positions, p = mean(a xhat), q = mean(b xhat) and
// r = mean(a b) - mean(a) mean(b) - p q, per channel:
//   dx = -gamma / sigma^2 (r xhat + q (a - mean(a) - p xhat) + p (b - mean(b) - q xhat)), dgamma =
//     positions / sigma r.
void batch_norm_tangent_backward(const Tensor& x, const Tensor& gamma, const Tensor& stats,
                                 const Tensor& tangent, const Tensor& dyt, Tensor& dx,
                                 bool accumulate, Tensor& dgamma) {
  const Sizes s = sizes_of(x, static_cast<int>(x.dim(-1)));
  WEFT_ASSERT(s.N == 1);
  constexpr std::int64_t kinds = 5;  // sums of a, b, a b, a (x - mean), b (x - mean)
  struct Partials;
  float* partial = scratch<Partials>(static_cast<std::size_t>(s.chunks * kinds * s.C));
  const float *ga = gamma.data<float>(), *st = stats.data<float>();
  std::vector<float> means(s.C);
  for (std::int64_t c = 0; c < s.C; ++c) means[c] = st[2 * c];
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *as = dyt.data<T>(), *bs = tangent.data<T>();
    T* ds = dx.data<T>();
    for_chunks(s, [&](std::int64_t, std::int64_t first, std::int64_t rows, std::int64_t chunk) {
      for_vectors(s.C, [&](std::int64_t i, int width) {
        const vf mean = load_n(means.data() + i, width);
        vf sums[kinds] = {};
        for (std::int64_t r = first; r < first + rows; ++r) {
          const std::int64_t at = r * s.C + i;
          const vf v = load_n(xs + at, width) - mean;
          const vf a = load_n(as + at, width), b = load_n(bs + at, width);
          sums[0] += a, sums[1] += b, sums[2] += a * b, sums[3] += a * v, sums[4] += b * v;
        }
        for (std::int64_t k = 0; k < kinds; ++k)
          store_n(partial + (chunk * kinds + k) * s.C + i, sums[k], width);
      });
    });
    // dx = of_x x + of_a a + of_b b + rest per channel.
    std::vector<float> linear(4 * s.C);
    const double count = static_cast<double>(s.P);
    for (std::int64_t c = 0; c < s.C; ++c) {
      double sums[kinds] = {};
      for (std::int64_t chunk = 0; chunk < s.chunks; ++chunk)
        for (std::int64_t k = 0; k < kinds; ++k)
          sums[k] += static_cast<double>(partial[(chunk * kinds + k) * s.C + c]) / count;
      const double mean = st[2 * c], rstd = st[2 * c + 1];
      const double p = sums[3] * rstd, q = sums[4] * rstd, r = sums[2] - sums[0] * sums[1] - p * q;
      const double scale = -ga[c] * rstd * rstd, of_x = scale * (r - 2 * p * q) * rstd;
      float* to = linear.data() + c;
      to[0] = static_cast<float>(of_x);
      to[s.C] = static_cast<float>(scale * q);
      to[2 * s.C] = static_cast<float>(scale * p);
      to[3 * s.C] = static_cast<float>(-of_x * mean - scale * (q * sums[0] + p * sums[1]));
      if (dgamma.defined()) dgamma.data<float>()[c] += static_cast<float>(count * rstd * r);
    }
    for_chunks(s, [&](std::int64_t, std::int64_t first, std::int64_t rows, std::int64_t) {
      for (std::int64_t row = first; row < first + rows; ++row)
        for_vectors(s.C, [&](std::int64_t i, int width) {
          const std::int64_t at = row * s.C + i;
          const float* of = linear.data() + i;
          vf d = load_n(of, width) * load_n(xs + at, width) +
                 load_n(of + s.C, width) * load_n(as + at, width) +
                 load_n(of + 2 * s.C, width) * load_n(bs + at, width) + load_n(of + 3 * s.C, width);
          if (accumulate) d += load_n(ds + at, width);
          store_n(ds + at, d, width);
        });
    });
  });
}

WEFT_CPU_END
