// Cases of ops/random.h (kernels/random.cu beside src/ops/cpu/random.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "ops/random.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

// f32: sums in another order. bf16: one unit of the largest value's last place where two sides
// round either way.
double tolerance(DType dtype) { return dtype == DType::bf16 ? 1.0 / 128 : 2e-5; }

// `offset` floats into its tensor, as sample b of a batch may be.
void add_fill_normal(Cases& cases, std::int64_t n, std::int64_t offset) {
  KernelCase c = make_case("fill_normal", fmt::format("N{}{}", n, offset == 0 ? "" : " misaligned"),
                           DType::f32, 4.0 * static_cast<double>(n), 2e-6);
  // The tolerance is that of log, sqrt, sin and cos on either side.
  c.run = [=](std::vector<Tensor>&) {
    Tensor eps = Tensor::empty({n + offset}, DType::f32), here = eps.slice(offset, n + offset);
    // A seed, a step and a sample that need all their bits.
    ops::fill_normal(0x9e3779b97f4a7c15u, static_cast<int>(Purpose::noise), 123456789012u,
                     (std::uint64_t{1} << 40) + 7, here);
    return std::vector<Tensor>{here};
  };
  cases.push_back(std::move(c));
}

void add_posterior(Cases& cases, ops::Channels channels, DType dtype, bool scaled,
                   bool accumulate) {
  const bool last = channels == ops::Channels::last;
  const Shape z = last ? Shape{2, 3, 5, 4} : Shape{2, 4, 3, 5};
  const Shape moments = last ? Shape{2, 3, 5, 8} : Shape{2, 8, 3, 5};
  const Tensor affine = scaled ? random_tensor({2, 4}, DType::f32, 2) : Tensor();
  const auto add = [&](const char* op, std::vector<Tensor> inputs, auto run) {
    auto c = make_case(op,
                       fmt::format("{}{}{}", last ? "last" : "first", scaled ? " scaled" : "",
                                   accumulate ? " accumulate" : ""),
                       dtype, 0, tolerance(dtype));
    c.inputs = std::move(inputs);
    c.run = [=](std::vector<Tensor>& in) { return std::vector<Tensor>{run(in)}; };
    cases.push_back(std::move(c));
  };
  // Some log variances lie beyond the limits.
  const Tensor m = random_tensor(moments, dtype, 1, 12.0f, -4.0f),
               eps = scaled ? random_tensor(z, DType::f32, 3) : Tensor();
  add("posterior_draw_forward", {m, eps, affine}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(z, DType::f32);
    ops::posterior_draw_forward(in[0], in[1], in[2], channels, y);
    return y;
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    const std::int64_t C = 4, inner = last ? 1 : 3 * 5;
    const auto at = [=](std::int64_t i, bool lv) {  // of element i of z, in the moments
      const std::int64_t c = i / inner % C;
      return (i / (inner * C) * 2 * C + c + (lv ? C : 0)) * inner + i % inner;
    };
    Values y(z.numel());
    for (std::int64_t i = 0; i < z.numel(); ++i) {
      y[i] = in[0][at(i, false)];
      if (!in[1].empty())
        y[i] += std::exp(std::clamp(in[0][at(i, true)], -30.0, 20.0) / 2) * in[1][i];
      if (scaled) y[i] = y[i] * in[2][i / inner % C] + in[2][C + i / inner % C];
    }
    return std::vector<Values>{y};
  };
  add("posterior_draw_backward",
      {m, eps, affine, random_tensor(z, DType::f32, 4), random_tensor(moments, dtype, 5)},
      [=](std::vector<Tensor>& in) {
        ops::posterior_draw_backward(in[0], in[1], in[2], channels, in[3], in[4], accumulate);
        return in[4];
      });
  cases.back().reference = [=](const std::vector<Values>& in) {
    const std::int64_t C = 4, inner = last ? 1 : 3 * 5;
    const auto at = [=](std::int64_t i, bool lv) {  // of element i of z, in the moments
      const std::int64_t c = i / inner % C;
      return (i / (inner * C) * 2 * C + c + (lv ? C : 0)) * inner + i % inner;
    };
    Values d(in[0].size());
    for (std::int64_t i = 0; i < z.numel(); ++i) {
      const double g = in[3][i] * (scaled ? in[2][i / inner % C] : 1), lv = in[0][at(i, true)];
      d[at(i, false)] = g;
      if (!in[1].empty() && lv >= -30 && lv <= 20)
        d[at(i, true)] = 0.5 * g * in[1][i] * std::exp(lv / 2);
    }
    return std::vector<Values>{fp64::added(d, accumulate ? in[4] : Values())};
  };
  add("clamp_log_variance_forward", {m}, [=](std::vector<Tensor>& in) {
    ops::clamp_log_variance_forward(in[0], channels, in[0]);
    return in[0];
  });
  add("clamp_log_variance_backward",
      {m, random_tensor(moments, dtype, 4), random_tensor(moments, dtype, 5)},
      [=](std::vector<Tensor>& in) {
        ops::clamp_log_variance_backward(in[0], channels, in[1], in[2], accumulate);
        return in[2];
      });
}

}  // namespace

void random_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    add_fill_normal(cases, std::int64_t{4} * 15 * 60 * 106, 0);
    return;
  }
  add_fill_normal(cases, 1, 0);
  add_fill_normal(cases, 4099, 0);
  add_fill_normal(cases, 1024, 1);
  for (const auto channels : {ops::Channels::first, ops::Channels::last})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool scaled : {false, true})
        add_posterior(cases, channels, dtype, scaled, scaled == (dtype == DType::f32));
}

}  // namespace weft
