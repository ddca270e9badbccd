// Cases of ops/fp8.h (kernels/matmul/fp8.cu beside src/ops/cpu/matmul/fp8.cpp). The references
// round by a search among all values of the format.
#include <fmt/format.h>

#include <cmath>

#include "ops/fp8.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Size {
  std::int64_t m, n, k;
};

// Results are rounded to bf16 on both sides, after sums of the same products.
constexpr double tolerance = 1.0 / 64;

KernelCase make(const char* op, const Size& s, const std::string& variant) {
  KernelCase c = make_case(op, fmt::format("M{} N{} K{}{}", s.m, s.n, s.k, variant), DType::bf16,
                           2.0 * static_cast<double>(s.m * s.k + s.n * s.k + s.m * s.n), tolerance);
  c.flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  c.bound = Bound::tensor_cores;
  return c;
}

void add_forward(Cases& cases, const Size& s, bool bias, bool residual, DType bias_type,
                 float size = 1.0f) {
  auto c = make("fp8_linear_forward", s,
                std::string(!bias                      ? ""
                            : bias_type == DType::bf16 ? " bf16 bias"
                                                       : " bias") +
                    (residual ? " residual" : ""));
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.k));
  c.inputs = {random_tensor({s.m, s.k}, DType::bf16, 1, size),
              random_tensor({s.n, s.k}, DType::bf16, 2, spread / size)};
  if (bias) c.inputs.push_back(random_tensor({s.n}, bias_type, 3));
  if (residual) c.inputs.push_back(random_tensor({s.m, s.n}, DType::bf16, 4));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({s.m, s.n}, DType::bf16);
    ops::fp8_linear_forward(in[0], in[1], bias ? in[2] : Tensor(), residual ? in.back() : Tensor(),
                            y);
    return std::vector<Tensor>{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values y = fp64::product(s.m, s.n, s.k, fp64::e4m3(in[0]), s.k, 1, fp64::e4m3(in[1]), 1, s.k);
    for (std::size_t i = 0; bias && i < y.size(); ++i) y[i] += in[2][i % s.n];
    return std::vector<Values>{fp64::added(y, residual ? in.back() : Values())};
  };
  cases.push_back(std::move(c));
}

// dx [M,K] = dy [M,N] w [N,K].
void add_backward_input(Cases& cases, const Size& s, bool accumulate, float size = 1.0f) {
  auto c = make("fp8_linear_backward_input", s, accumulate ? " accumulate" : "");
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.n));
  c.inputs = {random_tensor({s.m, s.n}, DType::bf16, 1, size),
              random_tensor({s.n, s.k}, DType::bf16, 2, spread / size)};
  if (accumulate) c.inputs.push_back(random_tensor({s.m, s.k}, DType::bf16, 3));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[2] : Tensor::empty({s.m, s.k}, DType::bf16);
    ops::fp8_linear_backward_input(in[0], in[1], dx, accumulate);
    return std::vector<Tensor>{dx};
  };
  c.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::added(
        fp64::product(s.m, s.k, s.n, fp64::e4m3(in[0]), s.n, 1, fp64::e4m3(in[1]), s.k, 1),
        accumulate ? in[2] : Values())};
  };
  cases.push_back(std::move(c));
}

// Products with the unit matrix are the rounded operands themselves: the same bits everywhere.
// Infinities and NaN become NaN, without a part in the scale.
void add_rounding(Cases& cases, std::int64_t m, std::int64_t k, float size, bool special) {
  for (const bool forward : {true, false}) {
    auto c = make(forward ? "fp8_linear_forward" : "fp8_linear_backward_input", {m, k, k},
                  fmt::format(" unit matrix, values of {}{}", size, special ? ", not finite" : ""));
    c.tolerance = 0;
    Tensor unit = Tensor::host({k, k}, DType::bf16);
    for (std::int64_t i = 0; i < k * k; ++i)
      unit.data<bf16>()[i] = bf16(i % (k + 1) == 0 ? 1.0f : 0.0f);
    c.inputs = {random_tensor({m, k}, DType::bf16, 1, size), unit};
    bf16* const x = c.inputs[0].data<bf16>();
    // Rows of small values reach what e4m3 has below 2^-6.
    for (std::int64_t i = 0; i < m * k; i += 3)
      x[i] = bf16(static_cast<float>(x[i]) * std::ldexp(1.0f, -static_cast<int>(i % 20)));
    if (special) {
      x[1] = bf16(INFINITY);
      x[k + 2] = bf16(-INFINITY);
      x[2 * k] = bf16(NAN);
    }
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = Tensor::empty({m, k}, DType::bf16);
      if (forward)
        ops::fp8_linear_forward(in[0], in[1], Tensor(), Tensor(), y);
      else
        ops::fp8_linear_backward_input(in[0], in[1], y, false);
      return std::vector<Tensor>{y};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values y = fp64::e4m3(in[0]);
      // NaN times 0 is NaN: all of its row.
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < k; ++j)
          if (std::isnan(y[i * k + j])) {
            std::fill_n(y.begin() + i * k, k, NAN);
            break;
          }
      return std::vector<Values>{y};
    };
    cases.push_back(std::move(c));
  }
}

void small_cases(Cases& cases) {
  // With and without dimensions that e4m3 multiplies; tiles that are not full.
  const Size sizes[] = {{1, 16, 16}, {7, 5, 3}, {33, 80, 144}, {70, 130, 50}, {5, 48, 20}};
  for (const Size& s : sizes) {
    add_forward(cases, s, s.m % 2 == 1, false, DType::bf16);
    add_forward(cases, s, true, true, s.m == 33 ? DType::f32 : DType::bf16, 300.0f);
    add_backward_input(cases, s, false);
    add_backward_input(cases, s, true, 1e-6f);
  }
  for (const std::int64_t k : {32, 18})
    for (const float size : {1.0f, 3e-5f, 1e30f, 1e-36f}) add_rounding(cases, 9, k, size, false);
  add_rounding(cases, 6, 16, 0.5f, true);
  add_rounding(cases, 6, 7, 0.5f, true);
  add_rounding(cases, 3, 16, 0.0f, false);
}

// The linear layers of an STDiT3-XL/2 block, and of one of Wan2.1-14B.
void real_cases(Cases& cases) {
  for (const Size s :
       {Size{15 * 1590, 3456, 1152}, Size{15 * 1590, 1152, 1152}, Size{15 * 1590, 4608, 1152},
        Size{15 * 1590, 1152, 4608}, Size{9 * 1560, 5120, 5120}, Size{9 * 1560, 13824, 5120}}) {
    add_forward(cases, s, true, false, DType::bf16);
    add_backward_input(cases, s, false);
  }
}

}  // namespace

void fp8_cases(CaseSize size, Cases& cases) {
  size == CaseSize::small ? small_cases(cases) : real_cases(cases);
}

}  // namespace weft
