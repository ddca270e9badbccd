// CPU side of ops/norm.h, bound by memory: with v for one array of activations, sums 1 v,
// apply 2 v (3 with a residual), backward 2 v + 3 v, with a residual 4 v + 3 v.
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

// Rows are walked along one by one, which memory likes best, unless what belongs to so many
// channels does not fit into the L1 cache: it is then read once for a few rows.
constexpr std::int64_t many_channels = 1024, rows_at_once = 4;

// Calls f(piece, first row, rows) for all pieces, in parallel.
template <class F>
void for_pieces(const Tensor& x, F&& f) {
  const BatchNormPieces pieces = batch_norm_pieces(x);
  const std::int64_t P = x.numel() / x.dim(-1);
#pragma omp parallel for schedule(static)
  for (std::int64_t k = 0; k < pieces.count; ++k)
    f(k, k * pieces.rows, std::min(pieces.rows, P - k * pieces.rows));
}

// Calls f(row, channel, lanes, rows) for the vectors of channels of one row or of some at once. A
// channel's rows come in order.
template <class F>
void for_tiles(std::int64_t first, std::int64_t rows, std::int64_t C, F&& f) {
  std::int64_t r = first;
  if (C > many_channels)
    for (; r + rows_at_once <= first + rows; r += rows_at_once)
      for_vectors(C, [&](std::int64_t c, int n) { f(r, c, n, rows_at_once); });
  for (; r < first + rows; ++r)
    for_vectors(C, [&](std::int64_t c, int n) { f(r, c, n, std::int64_t{1}); });
}

// sums [2C] = the pieces' sums [count,2,C], added in f64, in order.
void add_pieces(const float* partial, std::int64_t count, std::int64_t C, double* sums) {
  constexpr std::int64_t block = 64;
#pragma omp parallel for schedule(static) if (count * C > 1 << 14)
  for (std::int64_t first = 0; first < 2 * C; first += block) {
    const std::int64_t last = std::min(first + block, 2 * C);
    std::fill(sums + first, sums + last, 0.0);
    for (std::int64_t k = 0; k < count; ++k)
      for (std::int64_t i = first; i < last; ++i)
        sums[i] += static_cast<double>(partial[2 * k * C + i]);
  }
}

// What a channel's normalisation does, as the forward and the backward both compute it: (x - mean)
// scale + beta.
struct Affine {
  const float *mean, *beta;
  std::vector<float> scale;  // gamma / sigma

  Affine(const Tensor& stats, const Tensor& gamma, const Tensor& b)
      : mean(stats.data<float>()),
        beta(b.data<float>()),
        scale(static_cast<std::size_t>(gamma.numel())) {
    for (std::size_t c = 0; c < scale.size(); ++c)
      scale[c] = mean[scale.size() + c] * gamma.data<float>()[c];
  }
};
struct AffineVectors {
  vf mean, scale, beta;
  AffineVectors(const Affine& a, std::int64_t c, int n)
      : mean(load_n(a.mean + c, n)),
        scale(load_n(a.scale.data() + c, n)),
        beta(load_n(a.beta + c, n)) {}
  vf operator()(vf x) const { return (x - mean) * scale + beta; }
};

// 0 where the activation stops the gradient; written so that a NaN in u lets it through.
vf passed(vf g, vf u, ActivationRange range) {
  return (u <= range.low) | (u >= range.high) ? vf{} : g;
}

}  // namespace

void batch_norm_sums(const Tensor& x, Tensor& sums) {
  const std::int64_t C = x.dim(-1), P = x.numel() / C;
  const BatchNormPieces pieces = batch_norm_pieces(x);
  const Tensor partial =
      pieces.count > 0 ? Tensor::empty({pieces.count, 2, C}, DType::f32) : Tensor();
  if (planning()) return;
  float* const to = partial.defined() ? partial.data<float>() : nullptr;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    for_pieces(x, [&](std::int64_t k, std::int64_t first, std::int64_t rows) {
      float *sum = to + 2 * k * C, *squares = sum + C;
      std::fill(sum, sum + 2 * C, 0.0f);
      for_tiles(first, rows, C, [&](std::int64_t r, std::int64_t c, int n, std::int64_t some) {
        const vf pivot = load_n(xs + c, n);
        vf s = load_n(sum + c, n), q = load_n(squares + c, n);
        for (std::int64_t i = 0; i < some; ++i) {
          const vf d = load_n(xs + (r + i) * C + c, n) - pivot;
          s += d;
          q += d * d;
        }
        store_n(sum + c, s, n);
        store_n(squares + c, q, n);
      });
    });
    double* s = sums.data<double>();
    const auto count = static_cast<double>(P);
    add_pieces(to, pieces.count, C, s);
    for (std::int64_t c = 0; c < C && P > 0; ++c) {
      const double pivot = static_cast<float>(xs[c]);
      s[C + c] += pivot * (2 * s[c] + count * pivot);
      s[c] += count * pivot;
    }
    s[2 * C] = count;
  });
}

void batch_norm_statistics(const Tensor& sums, BatchNormForm form, float eps, float momentum,
                           Tensor& stats, Tensor& running_mean, Tensor& running_var,
                           Tensor& tmp_mean, Tensor& tmp_var, Tensor& iter) {
  const std::int64_t C = stats.dim(-1);
  const double *s = sums.data<double>(), count = s[2 * C];
  float* to = stats.data<float>();
  const float keep = 1.0f - momentum;
  const bool synchronised = form == BatchNormForm::synchronised, updates = running_mean.defined();
  float* const iterations = updates && synchronised ? iter.data<float>() : nullptr;
  if (iterations) *iterations = keep * *iterations + 1.0f;
  for (std::int64_t c = 0; c < C; ++c) {
    const double mean = s[c] / count, squares = std::max(0.0, s[C + c] - s[c] * mean);
    const double var = squares / count, floor = eps;
    const bool clamped = synchronised && var < floor;
    to[c] = static_cast<float>(mean);
    to[C + c] =
        static_cast<float>(1.0 / std::sqrt(synchronised ? std::max(var, floor) : var + floor));
    to[2 * C + c] = static_cast<float>(1.0 / count);
    to[3 * C + c] = clamped ? 0.0f : to[2 * C + c];
    if (!updates) continue;
    const float unbiased = static_cast<float>(squares / std::max(1.0, count - 1));
    float &m = running_mean.data<float>()[c], &v = running_var.data<float>()[c];
    if (synchronised) {
      float &tm = tmp_mean.data<float>()[c], &tv = tmp_var.data<float>()[c];
      tm = keep * tm + to[c];
      tv = keep * tv + unbiased;
      m = tm / *iterations;
      v = tv / *iterations;
    } else {
      m = keep * m + momentum * to[c];
      v = keep * v + momentum * unbiased;
    }
  }
}

void batch_norm_running_statistics(const Tensor& running_mean, const Tensor& running_var, float eps,
                                   Tensor& stats) {
  const std::int64_t C = stats.dim(-1);
  float* to = stats.data<float>();
  for (std::int64_t c = 0; c < C; ++c) {
    to[c] = running_mean.data<float>()[c];
    to[C + c] = 1.0f / std::sqrt(running_var.data<float>()[c] + eps);
    to[2 * C + c] = to[3 * C + c] = 0.0f;
  }
}

void batch_norm_apply(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
                      const Tensor& residual, const Tensor& residual_stats,
                      const Tensor& residual_gamma, const Tensor& residual_beta, Activation act,
                      Tensor& y) {
  const std::int64_t C = x.dim(-1);
  const ActivationRange range = range_of(act);
  const Affine mine(stats, gamma, beta);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
    // `other(c, n)` makes what is added to channels c of the value at a place.
    const auto run = [&](const auto& other) {
      for_pieces(x, [&](std::int64_t, std::int64_t first, std::int64_t rows) {
        for_tiles(first, rows, C, [&](std::int64_t r, std::int64_t c, int n, std::int64_t some) {
          const AffineVectors normalised(mine, c, n);
          const auto added = other(c, n);
          for (std::int64_t i = 0; i < some; ++i) {
            const std::int64_t at = (r + i) * C + c;
            const vf u = normalised(load_n(xs + at, n)) + added(at, n);
            const vf low = u < range.low ? splat(range.low) : u;
            store_n(ys + at, low > range.high ? splat(range.high) : low, n);
          }
        });
      });
    };
    const T* rs = residual.defined() ? residual.data<T>() : nullptr;
    if (rs == nullptr)
      run([](std::int64_t, int) { return [](std::int64_t, int) { return vf{}; }; });
    else if (!residual_stats.defined())
      run([=](std::int64_t, int) {
        return [=](std::int64_t at, int n) { return load_n(rs + at, n); };
      });
    else
      run([rs, theirs = Affine(residual_stats, residual_gamma, residual_beta)](std::int64_t c,
                                                                               int n) {
        return [rs, normalised = AffineVectors(theirs, c, n)](std::int64_t at, int m) {
          return normalised(load_n(rs + at, m));
        };
      });
  });
}

void batch_norm_backward_sums(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                              const Tensor& beta, Activation act, const Tensor& y, Tensor& dy,
                              Tensor& sums, Tensor& dgamma, Tensor& dbeta) {
  const std::int64_t C = x.dim(-1);
  const BatchNormPieces pieces = batch_norm_pieces(x);
  const Tensor partial =
      pieces.count > 0 ? Tensor::empty({pieces.count, 2, C}, DType::f32) : Tensor();
  if (planning()) return;
  float* const to = partial.defined() ? partial.data<float>() : nullptr;
  const ActivationRange range = range_of(act);
  const Affine mine(stats, gamma, beta);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* gs = dy.data<T>();
    // The products are of g (x - mean); 1/sigma joins them at the end. `gradient` makes g.
    const auto run = [&](const auto& gradient) {
      for_pieces(x, [&](std::int64_t k, std::int64_t first, std::int64_t rows) {
        float *sum = to + 2 * k * C, *products = sum + C;
        std::fill(sum, sum + 2 * C, 0.0f);
        for_tiles(first, rows, C, [&](std::int64_t r, std::int64_t c, int n, std::int64_t some) {
          const AffineVectors normalised(mine, c, n);
          vf s = load_n(sum + c, n), p = load_n(products + c, n);
          for (std::int64_t i = 0; i < some; ++i) {
            const std::int64_t at = (r + i) * C + c;
            const vf v = load_n(xs + at, n), g = gradient(at, n, v, normalised);
            s += g;
            p += g * (v - normalised.mean);
          }
          store_n(sum + c, s, n);
          store_n(products + c, p, n);
        });
      });
    };
    if (y.defined()) {
      const T* ys = y.data<T>();
      run([=](std::int64_t at, int n, vf, const AffineVectors&) {
        const vf g = passed(load_n(gs + at, n), load_n(ys + at, n), range);
        store_n(gs + at, g, n);
        return g;
      });
    } else if (act == Activation::none) {
      run([=](std::int64_t at, int n, vf, const AffineVectors&) { return load_n(gs + at, n); });
    } else {
      run([=](std::int64_t at, int n, vf v, const AffineVectors& normalised) {
        return passed(load_n(gs + at, n), normalised(v), range);
      });
    }
  });
  double* s = sums.data<double>();
  add_pieces(to, pieces.count, C, s);
  for (std::int64_t c = 0; c < C; ++c) {
    s[C + c] *= mine.mean[C + c];
    if (dbeta.defined()) dbeta.data<float>()[c] += static_cast<float>(s[c]);
    if (dgamma.defined()) dgamma.data<float>()[c] += static_cast<float>(s[C + c]);
  }
}

void batch_norm_backward(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                         const Tensor& beta, Activation act, const Tensor& dy, const Tensor& sums,
                         Tensor& dx, bool accumulate) {
  const std::int64_t C = x.dim(-1);
  const ActivationRange range = range_of(act);
  const Affine mine(stats, gamma, beta);
  // dx = scale g + slope (x - mean) + shift.
  std::vector<float> slopes(C), shifts(slopes.size());
  const float* st = stats.data<float>();
  for (std::int64_t c = 0; c < C; ++c) {
    const auto at = static_cast<std::size_t>(c);
    const double scale = mine.scale[at];
    shifts[at] = static_cast<float>(-scale * st[2 * C + c] * sums.data<double>()[c]);
    slopes[at] =
        static_cast<float>(-scale * st[C + c] * st[3 * C + c] * sums.data<double>()[C + c]);
  }
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *gs = dy.data<T>();
    T* ds = dx.data<T>();
    const bool masks = act != Activation::none;
    for_pieces(x, [&](std::int64_t, std::int64_t first, std::int64_t rows) {
      for_tiles(first, rows, C, [&](std::int64_t r, std::int64_t c, int n, std::int64_t some) {
        const AffineVectors normalised(mine, c, n);
        const vf slope = load_n(slopes.data() + c, n), shift = load_n(shifts.data() + c, n);
        for (std::int64_t i = 0; i < some; ++i) {
          const std::int64_t at = (r + i) * C + c;
          const vf v = load_n(xs + at, n);
          vf g = load_n(gs + at, n);
          if (masks) g = passed(g, normalised(v), range);
          vf d = normalised.scale * g + (slope * (v - normalised.mean) + shift);
          if (accumulate) d += load_n(ds + at, n);
          store_n(ds + at, d, n);
        }
      });
    });
  });
}

WEFT_CPU_END
