// What the fp64 references of the cases are written with: functions of an element, and of matrices.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/kernels/cases.h"

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

// [m,n] = a [m,k] b [k,n], operands read with the given strides: element (i,j) of a lies at i * ai + j * aj.
inline Values product(std::int64_t m, std::int64_t n, std::int64_t k, const Values& a,
                      std::int64_t ai, std::int64_t aj, const Values& b, std::int64_t bi,
                      std::int64_t bj) {
  Values c(m * n);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * ai + l * aj] * b[l * bi + j * bj];
  return c;
}

// The sums of the columns of x [rows,n].
inline Values column_sums(const Values& x, std::int64_t n) {
  Values sums(n);
  for (std::size_t i = 0; i < x.size(); ++i) sums[i % n] += x[i];
  return sums;
}

}  // namespace weft::fp64
