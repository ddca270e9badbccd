// Batch norm in fp64 over the positions of all ranks in one place, as
// docs/models/segmentation.md has it, and derivatives by differences of it.
#pragma once

#include <algorithm>
#include <functional>

#include "nn/batch_norm.h"
#include "tests/ops/reference.h"

namespace weft::test {

struct Moments {
  Vec mean, var, unbiased;
};

// x [P,C].
inline Moments moments_of(const Vec& x, std::size_t C) {
  const double P = static_cast<double>(x.size() / C);
  Moments m{Vec(C), Vec(C), Vec(C)};
  for (std::size_t i = 0; i < x.size(); ++i) m.mean[i % C] += x[i] / P;
  for (std::size_t i = 0; i < x.size(); ++i)
    m.var[i % C] += (x[i] - m.mean[i % C]) * (x[i] - m.mean[i % C]) / P;
  for (std::size_t c = 0; c < C; ++c) m.unbiased[c] = m.var[c] * P / (P - 1);
  return m;
}

inline Vec normalised(const Vec& x, const Vec& gamma, const Vec& beta, bool synchronised) {
  const std::size_t C = gamma.size();
  const Moments m = moments_of(x, C);
  Vec y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t c = i % C;
    const double v = synchronised ? std::max(m.var[c], 1e-5) : m.var[c] + 1e-5;
    y[i] = (x[i] - m.mean[c]) / std::sqrt(v) * gamma[c] + beta[c];
  }
  return y;
}

inline Vec activated(Vec y, nn::Activation act) {
  for (double& v : y) {
    if (act != nn::Activation::none) v = std::max(v, 0.0);
    if (act == nn::Activation::relu6) v = std::min(v, 6.0);
  }
  return y;
}

inline Vec sum(Vec a, const Vec& b) {
  for (std::size_t i = 0; i < b.size(); ++i) a[i] += b[i];
  return a;
}

// The running statistics of a layer through its steps.
struct RunningReference {
  Vec mean, var, tmp_mean, tmp_var;
  double iter = 1;
  explicit RunningReference(std::size_t C) : mean(C), var(C, 1.0), tmp_mean(C), tmp_var(C, 1.0) {}

  void step(const Moments& m, double momentum, bool synchronised) {
    const double keep = 1 - momentum;
    if (synchronised) iter = keep * iter + 1;
    for (std::size_t c = 0; c < mean.size(); ++c) {
      if (synchronised) {
        tmp_mean[c] = keep * tmp_mean[c] + m.mean[c];
        tmp_var[c] = keep * tmp_var[c] + m.unbiased[c];
        mean[c] = tmp_mean[c] / iter;
        var[c] = tmp_var[c] / iter;
      } else {
        mean[c] = keep * mean[c] + momentum * m.mean[c];
        var[c] = keep * var[c] + momentum * m.unbiased[c];
      }
    }
  }
  void expect(const nn::BatchNorm& w) const {
    EXPECT_LT(relative_error(to_values(w.running_mean->value), mean), 1e-6);
    EXPECT_LT(relative_error(to_values(w.running_var->value), var), 1e-6);
    EXPECT_LT(relative_error(to_values(w.tmp_running_mean->value), tmp_mean), 1e-6);
    EXPECT_LT(relative_error(to_values(w.tmp_running_var->value), tmp_var), 1e-6);
    EXPECT_LT(relative_error(to_values(w.running_iter->value), {iter}), 1e-6);
  }
};

// The derivative of `loss` by each element of v, which it reads: in fp64, where central differences
// are good to 1e-8 or so.
inline Vec differences(Vec& v, const std::function<double()>& loss, double h = 1e-5) {
  Vec d;
  for (double& x : v) {
    const double before = x;
    x = before + h;
    const double up = loss();
    x = before - h;
    d.push_back((up - loss()) / (2 * h));
    x = before;
  }
  return d;
}

// As the layers see it: ordinary scales, and shifts that leave ReLU something on either side.
inline void randomise_batch_norm(const nn::BatchNorm& w, std::uint64_t stream) {
  const Vec v = random_values(2 * w.weight->shape[0], stream, 0.4);
  for (std::int64_t c = 0; c < w.weight->shape[0]; ++c) {
    w.weight->value.data<float>()[c] = static_cast<float>(1 + v[2 * c]);
    w.bias->value.data<float>()[c] = static_cast<float>(v[2 * c + 1]);
  }
}

}  // namespace weft::test
