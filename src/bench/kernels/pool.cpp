// Cases of ops/pool.h (kernels/pool.cu beside src/ops/cpu/pool.cpp).
#include <fmt/format.h>

#include <algorithm>

#include "bench/kernels/cases.h"
#include "bench/kernels/reference.h"
#include "ops/pointwise.h"
#include "ops/pool.h"

namespace weft {
namespace {

void add_max_pool(std::vector<KernelCase>& cases, const Shape& x, DType dtype) {
  const std::int64_t n = x.numel();
  const Shape pooled{x[0], x[1], x[2] / 2, x[3] / 2, x[4]};
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs,
                       KernelCase::Run run) {
    cases.push_back(bandwidth_case(op, x.str(), dtype, values, std::move(inputs), std::move(run)));
  };
  const Tensor a = random_tensor(x, dtype, 1);
  add("max_pool_forward", n + n / 4, {a}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(pooled, dtype);
    ops::max_pool_forward(in[0], y);
    return std::vector<Tensor>{y};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y;
    for (std::int64_t f = 0; f < x[0] * x[1]; ++f)
      for (std::int64_t r = 0; r < pooled[2]; ++r)
        for (std::int64_t q = 0; q < pooled[3]; ++q)
          for (std::int64_t c = 0; c < x[4]; ++c) {
            const auto at = [&](std::int64_t i, std::int64_t j) {
              return in[0][((f * x[2] + 2 * r + i) * x[3] + 2 * q + j) * x[4] + c];
            };
            y.push_back(std::max({at(0, 0), at(0, 1), at(1, 0), at(1, 1)}));
          }
    return std::vector<Values>{y};
  };
  // Rectified, so that greatest elements tie.
  add("max_pool_backward", 2 * n + n / 4, {a, random_tensor(pooled, dtype, 3)},
      [=](std::vector<Tensor>& in) {
        Tensor dx = Tensor::empty(x, dtype);
        ops::leaky_relu_forward(in[0], 0.0f, in[0]);
        ops::max_pool_backward(in[0], in[1], dx);
        return std::vector<Tensor>{dx};
      });
}

}  // namespace

std::vector<KernelCase> pool_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real)
    add_max_pool(cases, {1, 4, 256, 256, 64}, DType::bf16);
  else  // odd rows and columns
    for (const DType dtype : {DType::f32, DType::bf16}) add_max_pool(cases, {1, 2, 5, 4, 3}, dtype);
  return cases;
}

}  // namespace weft
