// What the fp64 references of the cases are written with: functions of an element, of matrices, and
// attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "tests/kernels/cases.h"

namespace weft::fp64 {

// f of every element.
template <class F>
Values map(const Values& x, F f) {
  Values y(x.size());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = f(x[i]);
  return y;
}
template <class F>
Values map(const Values& x, const Values& z, F f) {
  Values y(x.size());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = f(x[i], z[i]);
  return y;
}

// y (+)= x, where `before` is y's value if it is added to, else empty.
inline Values added(Values x, const Values& before) {
  for (std::size_t i = 0; i < before.size(); ++i) x[i] += before[i];
  return x;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
inline double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }
// GELU by the tanh formula, and its derivative.
inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
inline double gelu_slope(double x) {
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

// [m,n] = a [m,k] b [k,n], operands read with the given strides: element (i,j) of a lies at i * ai
// + j * aj.
inline Values product(std::int64_t m, std::int64_t n, std::int64_t k, const Values& a,
                      std::int64_t ai, std::int64_t aj, const Values& b, std::int64_t bi,
                      std::int64_t bj) {
  Values c(m * n);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * ai + l * aj] * b[l * bi + j * bj];
  return c;
}

// x rounded as ops/fp8.h says, by a search among all values of the format: multiples of 2^-9 up to
// 2^-6, then 8 values a power of two, up to 448.
inline Values e4m3(const Values& x) {
  Values finite{0};
  for (int i = 1; i < 8; ++i) finite.push_back(std::ldexp(i, -9));
  for (int exponent = -6; exponent <= 8; ++exponent)
    for (int i = 8; i < 16; ++i) finite.push_back(std::ldexp(i, exponent - 3));
  finite.pop_back();  // 480 stands for NaN
  double largest = 0;
  for (const double v : x)
    if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
  const int power =
      largest > 0 ? std::min(static_cast<int>(std::floor(std::log2(448 / largest))), 117) : 117;
  return map(x, [&](double v) {
    if (!std::isfinite(v)) return static_cast<double>(NAN);
    const double a = std::ldexp(std::abs(v), power);
    std::size_t best = 0;
    for (std::size_t i = 1; i < finite.size(); ++i) {
      const double nearer = std::abs(finite[best] - a) - std::abs(finite[i] - a);
      if (nearer > 0 || (nearer == 0 && i % 2 == 0)) best = i;
    }
    return std::copysign(std::ldexp(finite[best], -power), v);
  });
}

// The sums of the columns of x [rows,n].
inline Values column_sums(const Values& x, std::int64_t n) {
  Values sums(n);
  for (std::size_t i = 0; i < x.size(); ++i) sums[i % n] += x[i];
  return sums;
}

// ---- Attention ----

// A row of a head: q/k RMSNorm by `w` and rotation by `rope` [positions, D/2, 2], both may be
// empty.
inline Values prepared(const double* x, std::int64_t D, const Values& w, const Values& rope,
                       std::int64_t position) {
  Values y(x, x + D);
  if (!w.empty()) {
    double squares = 0;
    for (const double v : y) squares += v * v / static_cast<double>(D);
    for (std::int64_t i = 0; i < D; ++i) y[i] *= w[i] / std::sqrt(squares + 1e-6);
  }
  for (std::int64_t i = 0; i < D / 2 && !rope.empty(); ++i) {
    const double c = rope[position * D + 2 * i], s = rope[position * D + 2 * i + 1];
    const double x0 = y[2 * i], x1 = y[2 * i + 1];
    y[2 * i] = x0 * c - x1 * s, y[2 * i + 1] = x1 * c + x0 * s;
  }
  return y;
}

// out += softmax(scores) v for one query: values are rows of D, `stride` apart. Returns log-sum-exp
// of the scores, 0 for none.
inline double attend(const Values& scores, const double* v, std::int64_t stride, std::int64_t D,
                     double* out) {
  if (scores.empty()) return 0;
  double max = -INFINITY, sum = 0;
  for (const double s : scores) max = std::max(max, s);
  for (const double s : scores) sum += std::exp(s - max);
  for (std::size_t j = 0; j < scores.size(); ++j)
    for (std::int64_t d = 0; d < D; ++d)
      out[d] += std::exp(scores[j] - max) / sum * v[static_cast<std::int64_t>(j) * stride + d];
  return max + std::log(sum);
}

// One query of one head of ops::attention_*: its scores of n keys, rows of D `stride` apart.
inline Values scores_of(const double* q, const double* k, std::int64_t stride, std::int64_t n,
                        std::int64_t D, double last_bias) {
  Values scores(n);
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t d = 0; d < D; ++d)
      scores[j] += q[d] * k[j * stride + d] / std::sqrt(static_cast<double>(D));
  if (n > 0) scores[n - 1] += last_bias;
  return scores;
}

// What that query adds to the gradients: dq [D], and of its keys dk, dv.
inline void attend_backward(const Values& scores, const double* q, const double* k, const double* v,
                            std::int64_t stride, std::int64_t D, const double* dout, double* dq,
                            double* dk, double* dv) {
  const auto n = static_cast<std::int64_t>(scores.size());
  double max = -INFINITY, sum = 0, delta = 0;
  for (const double s : scores) max = std::max(max, s);
  for (const double s : scores) sum += std::exp(s - max);
  Values p(n), dp(n);
  for (std::int64_t j = 0; j < n; ++j) {
    p[j] = std::exp(scores[j] - max) / sum;
    for (std::int64_t d = 0; d < D; ++d) dp[j] += dout[d] * v[j * stride + d];
    delta += p[j] * dp[j];
  }
  for (std::int64_t j = 0; j < n; ++j) {
    const double ds = p[j] * (dp[j] - delta) / std::sqrt(static_cast<double>(D));
    for (std::int64_t d = 0; d < D; ++d) {
      dq[d] += ds * k[j * stride + d];
      if (dk != nullptr) dk[j * stride + d] += ds * q[d];
      if (dv != nullptr) dv[j * stride + d] += p[j] * dout[d];
    }
  }
}

// qkv [B,T,S,3,H,D] -> out [B,T,S,H,D] and lse [sequences,H,length].
inline std::vector<Values> self_attention(std::int64_t B, std::int64_t T, std::int64_t S,
                                          std::int64_t H, std::int64_t D, ops::Axis axis,
                                          const Values& qkv, const Values& wq, const Values& wk,
                                          const Values& rope) {
  const bool space = axis == ops::Axis::space;
  const std::int64_t C = H * D, length = space ? S : T, sequences = B * T * S / length;
  Values out(B * T * S * C), lse;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t first = space ? s * S : s / S * T * S + s % S, step = space ? 1 : S;
    for (std::int64_t h = 0; h < H; ++h) {
      const auto row = [&](std::int64_t i) {
        return qkv.data() + (first + i * step) * 3 * C + h * D;
      };
      std::vector<Values> q, k;
      for (std::int64_t i = 0; i < length; ++i) {
        q.push_back(prepared(row(i), D, wq, rope, i));
        k.push_back(prepared(row(i) + C, D, wk, rope, i));
      }
      for (std::int64_t i = 0; i < length; ++i) {
        Values scores(length);
        for (std::int64_t j = 0; j < length; ++j)
          for (std::int64_t d = 0; d < D; ++d)
            scores[j] += q[i][d] * k[j][d] / std::sqrt(static_cast<double>(D));
        lse.push_back(attend(scores, row(0) + 2 * C, step * 3 * C, D,
                             out.data() + (first + i * step) * C + h * D));
      }
    }
  }
  return {out, lse};
}

}  // namespace weft::fp64
