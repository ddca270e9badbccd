// Cases of ops/norm.h (kernels/norm/batch_norm.cu beside src/ops/cpu/batch_norm.cpp).
#include "ops/norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using ops::Activation, ops::BatchNormForm;

constexpr const char* names[] = {"", " ReLU", " ReLU6"};
constexpr double eps = 1e-5;

struct Size {
  std::int64_t P, C;

  Shape shape() const { return {1, 1, P, 1, C}; }
  std::string str() const { return fmt::format("P{} C{}", P, C); }
  std::int64_t elements() const { return P * C; }
};

Tensor of_channels(const Size& s, std::uint64_t seed, float mean = 0) {
  return random_tensor({s.C}, DType::f32, seed, 0.5f, mean);
}

// What a channel is normalised by, at any value: mean, 1/sigma, and the two means' shares, of which
// every third channel's second is 0, as where the variance is clamped.
Tensor some_stats(const Size& s, std::uint64_t seed) {
  Tensor t = Tensor::host({4, s.C}, DType::f32);
  for (std::int64_t c = 0; c < s.C; ++c) {
    float* to = t.data<float>() + c;
    to[0] = 0.3f * std::sin(static_cast<float>(static_cast<std::int64_t>(seed) + c));
    to[s.C] = 0.8f + 0.4f * std::cos(static_cast<float>(c));
    to[2 * s.C] = 1.0f / static_cast<float>(2 * s.P);
    to[3 * s.C] = c % 3 == 1 ? 0.0f : to[2 * s.C];
  }
  return t;
}

double range_low(Activation act) { return act == Activation::none ? -INFINITY : 0; }
double range_high(Activation act) { return act == Activation::relu6 ? 6 : INFINITY; }
bool passes(double u, Activation act) { return u > range_low(act) && u < range_high(act); }

// x of element i normalised by stats.
double hat(const Values& x, const Values& stats, std::int64_t i, std::int64_t C) {
  return (x[i] - stats[i % C]) * stats[C + i % C];
}

KernelCase make(const char* op, const Size& s, const std::string& variant, DType dtype, int passes,
                std::vector<Tensor> inputs, KernelCase::Run run) {
  return bandwidth_case(op, s.str() + variant, dtype, passes * s.elements(), std::move(inputs),
                        std::move(run));
}

// A mean of many deviations: sums of squares that are taken as they are would cancel.
void add_sums(Cases& cases, const Size& s, DType dtype) {
  KernelCase c =
      make("batch_norm_sums", s, "", dtype, 1, {random_tensor(s.shape(), dtype, 1, 0.05f, 10.0f)},
           [=](std::vector<Tensor>& in) {
             Tensor sums = Tensor::empty({2 * s.C + 1}, DType::f64);
             ops::batch_norm_sums(in[0], sums);
             return std::vector<Tensor>{sums};
           });
  // Of the sum of squares, hence a thousandth of the variance.
  c.tolerance = 1e-8;
  c.reference = [=](const std::vector<Values>& in) {
    Values sums(2 * s.C + 1);
    for (std::int64_t i = 0; i < s.elements(); ++i) {
      sums[i % s.C] += in[0][i];
      sums[s.C + i % s.C] += in[0][i] * in[0][i];
    }
    sums.back() = static_cast<double>(s.P);
    return std::vector<Values>{sums};
  };
  cases.push_back(std::move(c));
}

// Channels by turns of ordinary variance, of one below eps, and of none.
void add_statistics(Cases& cases, std::int64_t C, BatchNormForm form, bool updates) {
  const Size s{24, C};
  const bool synchronised = form == BatchNormForm::synchronised;
  Tensor sums = Tensor::host({2 * C + 1}, DType::f64);
  for (std::int64_t c = 0; c < C; ++c) {
    const double mean = std::sin(static_cast<double>(c)), n = static_cast<double>(s.P);
    const double var = c % 3 == 0 ? 1 + 0.5 * mean : c % 3 == 1 ? 0.3 * eps : 0;
    sums.data<double>()[c] = mean * n;
    sums.data<double>()[C + c] = (var + mean * mean) * n;
  }
  sums.data<double>()[2 * C] = static_cast<double>(s.P);
  Tensor iter = Tensor::host({1}, DType::f32);
  iter.data<float>()[0] = 1.7f;
  const float momentum = 0.1f;
  KernelCase c =
      make("batch_norm_statistics", {s.P, C},
           fmt::format("{}{}", synchronised ? " synchronised" : "", updates ? " running" : ""),
           DType::f32, 0, {sums}, {});
  c.bytes = static_cast<double>(C) * (32 + (updates ? synchronised ? 32 : 16 : 0));
  if (updates)
    for (const Tensor& t :
         {of_channels(s, 1), of_channels(s, 2, 1), of_channels(s, 3), of_channels(s, 4, 1), iter})
      c.inputs.push_back(t);
  c.run = [=](std::vector<Tensor>& in) {
    Tensor stats = Tensor::empty({4, C}, DType::f32);
    std::vector<Tensor> running(5);
    if (updates) std::copy(in.begin() + 1, in.end(), running.begin());
    ops::batch_norm_statistics(in[0], form, static_cast<float>(eps), momentum, stats, running[0],
                               running[1], running[2], running[3], running[4]);
    std::vector<Tensor> out;
    for (int row = 0; row < 4; ++row) out.push_back(stats.slice(row, row + 1));
    if (updates) out.insert(out.end(), running.begin(), running.end());
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    std::vector<Values> out(4, Values(C));
    std::vector<Values> running(in.begin() + 1, in.end());
    const double n = in[0][2 * C], keep = 1 - static_cast<double>(momentum);
    if (updates && synchronised) running[4][0] = keep * running[4][0] + 1;
    for (std::int64_t k = 0; k < C; ++k) {
      const double mean = in[0][k] / n, var = std::max(0.0, in[0][C + k] / n - mean * mean);
      const double new_var = var * n / (n - 1);
      out[0][k] = mean;
      out[1][k] = 1 / std::sqrt(synchronised ? std::max(var, eps) : var + eps);
      out[2][k] = 1 / n;
      out[3][k] = synchronised && var < eps ? 0 : 1 / n;
      if (!updates) continue;
      if (synchronised) {
        running[2][k] = keep * running[2][k] + mean;
        running[3][k] = keep * running[3][k] + new_var;
        running[0][k] = running[2][k] / running[4][0];
        running[1][k] = running[3][k] / running[4][0];
      } else {
        running[0][k] = keep * running[0][k] + static_cast<double>(momentum) * mean;
        running[1][k] = keep * running[1][k] + static_cast<double>(momentum) * new_var;
      }
    }
    out.insert(out.end(), running.begin(), running.end());
    return out;
  };
  cases.push_back(std::move(c));
}

void add_running(Cases& cases, std::int64_t C) {
  KernelCase c = make_case("batch_norm_running_statistics", fmt::format("C{}", C), DType::f32,
                           24.0 * static_cast<double>(C), 1e-5);
  c.inputs = {random_tensor({C}, DType::f32, 1), random_tensor({C}, DType::f32, 2, 0.1f, 1.0f)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor stats = Tensor::empty({4, C}, DType::f32);
    ops::batch_norm_running_statistics(in[0], in[1], static_cast<float>(eps), stats);
    return std::vector<Tensor>{stats};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values stats(4 * C);
    for (std::int64_t k = 0; k < C; ++k) {
      stats[k] = in[0][k];
      stats[C + k] = 1 / std::sqrt(in[1][k] + eps);
    }
    return std::vector<Values>{stats};
  };
  cases.push_back(std::move(c));
}

enum class Residual { none, plain, normalised };

void add_apply(Cases& cases, const Size& s, DType dtype, Activation act, Residual kind) {
  std::vector<Tensor> inputs{random_tensor(s.shape(), dtype, 1, 3.0f), some_stats(s, 2),
                             of_channels(s, 3, 1), of_channels(s, 4)};
  if (kind != Residual::none) inputs.push_back(random_tensor(s.shape(), dtype, 5, 3.0f));
  if (kind == Residual::normalised)
    for (const Tensor& t : {some_stats(s, 6), of_channels(s, 7, 1), of_channels(s, 8)})
      inputs.push_back(t);
  const char* residual = kind == Residual::none         ? ""
                         : kind == Residual::normalised ? " + batch norm"
                                                        : " + residual";
  KernelCase c =
      make("batch_norm_apply", s, fmt::format("{}{}", residual, names[static_cast<int>(act)]),
           dtype, kind == Residual::none ? 2 : 3, std::move(inputs), [=](std::vector<Tensor>& in) {
             in.resize(8);
             Tensor y = Tensor::empty(s.shape(), dtype);
             ops::batch_norm_apply(in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7], act, y);
             return std::vector<Tensor>{y};
           });
  c.reference = [=](const std::vector<Values>& in) {
    Values y(s.elements());
    for (std::int64_t i = 0; i < s.elements(); ++i) {
      const std::int64_t k = i % s.C;
      y[i] = hat(in[0], in[1], i, s.C) * in[2][k] + in[3][k];
      if (kind == Residual::plain) y[i] += in[4][i];
      if (kind == Residual::normalised) y[i] += hat(in[4], in[5], i, s.C) * in[6][k] + in[7][k];
      y[i] = std::clamp(y[i], range_low(act), range_high(act));
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

void add_backward(Cases& cases, const Size& s, DType dtype, Activation act, bool residual) {
  const std::string variant =
      fmt::format("{}{}", residual ? " + residual" : "", names[static_cast<int>(act)]);
  const Tensor x = random_tensor(s.shape(), dtype, 1, 3.0f), stats = some_stats(s, 2);
  const Tensor gamma = of_channels(s, 3, 1), beta = of_channels(s, 4);
  const Tensor dy = random_tensor(s.shape(), dtype, 5);
  // Whether an element's gradient passes, by x or by y.
  const auto through = [=](const std::vector<Values>& in, const Values& y, std::int64_t i) {
    const std::int64_t k = i % s.C;
    return passes(y.empty() ? hat(in[0], in[1], i, s.C) * in[2][k] + in[3][k] : y[i], act);
  };
  KernelCase sums =
      make("batch_norm_backward_sums", s, variant, dtype, residual ? 4 : 2,
           {x, stats, gamma, beta, dy, of_channels(s, 6), of_channels(s, 7),
            residual ? random_tensor(s.shape(), dtype, 8, 4.0f, 2.0f) : Tensor()},
           [=](std::vector<Tensor>& in) {
             Tensor to = Tensor::empty({2, s.C}, DType::f64);
             ops::batch_norm_backward_sums(in[0], in[1], in[2], in[3], act, in[7], in[4], to, in[5],
                                           in[6]);
             return std::vector<Tensor>{to.slice(0, 1), to.slice(1, 2), in[5], in[6], in[4]};
           });
  sums.reference = [=](const std::vector<Values>& in) {
    Values sum(s.C), product(s.C), dgamma = in[5], dbeta = in[6], g = in[4];
    for (std::int64_t i = 0; i < s.elements(); ++i) {
      const double passed = through(in, in[7], i) ? g[i] : 0;
      sum[i % s.C] += passed;
      product[i % s.C] += passed * hat(in[0], in[1], i, s.C);
      if (residual) g[i] = passed;
    }
    for (std::int64_t k = 0; k < s.C; ++k) dgamma[k] += product[k], dbeta[k] += sum[k];
    return std::vector<Values>{sum, product, dgamma, dbeta, g};
  };
  sums.tolerance = 2e-5;  // in f32, whatever the activations are
  cases.push_back(std::move(sums));
  if (residual) return;
  Tensor totals = Tensor::host({2, s.C}, DType::f64);
  for (std::int64_t i = 0; i < 2 * s.C; ++i)
    totals.data<double>()[i] = static_cast<double>(s.P) * std::sin(static_cast<double>(i));
  for (const bool accumulate : {false, true}) {
    KernelCase c = make(
        "batch_norm_backward", s, variant + (accumulate ? " accumulate" : ""), dtype,
        accumulate ? 4 : 3, {x, stats, gamma, beta, dy, totals}, [=](std::vector<Tensor>& in) {
          Tensor dx = accumulate ? in[6] : in[4];  // or in dy's place
          ops::batch_norm_backward(in[0], in[1], in[2], in[3], act, in[4], in[5], dx, accumulate);
          return std::vector<Tensor>{dx};
        });
    if (accumulate) c.inputs.push_back(random_tensor(s.shape(), dtype, 9));
    c.reference = [=](const std::vector<Values>& in) {
      Values dx = accumulate ? in[6] : Values(s.elements());
      for (std::int64_t i = 0; i < s.elements(); ++i) {
        const std::int64_t k = i % s.C;
        const double g = through(in, {}, i) ? in[4][i] : 0;
        dx[i] += in[1][s.C + k] * in[2][k] *
                 (g - in[1][2 * s.C + k] * in[5][k] -
                  hat(in[0], in[1], i, s.C) * in[1][3 * s.C + k] * in[5][s.C + k]);
      }
      return std::vector<Values>{dx};
    };
    cases.push_back(std::move(c));
  }
}

}  // namespace

// Real: ResNet-50's stem, a middle and the last stage at 1/8 of 480x640, two images.
void batch_norm_cases(CaseSize size, Cases& cases) {
  const bool real = size == CaseSize::real;
  const std::vector<Size> sizes = real
                                      ? std::vector<Size>{{153600, 64}, {9600, 512}, {9600, 2048}}
                                      : std::vector<Size>{{1, 5},   {37, 3},   {263, 64}, {300, 20},
                                                          {5, 515}, {530, 24}, {7, 1030}};
  for (const Size& s : sizes)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_sums(cases, s, dtype);
      for (const Activation act : {Activation::none, Activation::relu, Activation::relu6}) {
        if (real && act != Activation::relu) continue;
        for (const Residual kind : {Residual::none, Residual::plain, Residual::normalised})
          add_apply(cases, s, dtype, act, kind);
        for (const bool residual : {false, true}) add_backward(cases, s, dtype, act, residual);
      }
    }
  for (const std::int64_t C :
       real ? std::vector<std::int64_t>{2048} : std::vector<std::int64_t>{3, 300}) {
    add_running(cases, C);
    for (const BatchNormForm form : {BatchNormForm::ordinary, BatchNormForm::synchronised})
      for (const bool updates : {false, true}) add_statistics(cases, C, form, updates);
  }
}

}  // namespace weft
