// Cases of ops/norm.h (kernels/norm/spade.cu beside src/ops/cpu/spade.cpp).
#include "ops/norm.h"

#include <fmt/format.h>

#include <cmath>

#include "tests/kernels/cases.h"

namespace weft {
namespace {

void add_statistics(Cases& cases, const Shape& x, float mean, float deviation, DType dtype) {
  const std::int64_t N = x[0], C = x[4], P = x.numel() / (N * C);
  KernelCase c = bandwidth_case("instance_statistics", fmt::format("{} mean {}", x.str(), mean),
                                dtype, x.numel(), {random_tensor(x, dtype, 1, deviation, mean)},
                                [=](std::vector<Tensor>& in) {
                                  Tensor y = Tensor::empty({N, 2, C}, DType::f32);
                                  ops::instance_statistics(in[0], y);
                                  return std::vector<Tensor>{y};
                                });
  c.tolerance = 2e-5;  // f32 sums, of either type
  c.reference = [=](const std::vector<Values>& in) {
    Values y(N * 2 * C);
    for (std::int64_t i = 0; i < N * C; ++i) {
      const double* const own = in[0].data() + i / C * P * C + i % C;
      double m = 0, variance = 0;
      for (std::int64_t p = 0; p < P; ++p) m += own[p * C] / static_cast<double>(P);
      for (std::int64_t p = 0; p < P; ++p)
        variance += (own[p * C] - m) * (own[p * C] - m) / static_cast<double>(P);
      y[i / C * 2 * C + i % C] = m;
      y[(i / C * 2 + 1) * C + i % C] = 1 / std::sqrt(variance + 1e-5);
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

void add_spade(Cases& cases, const Shape& y, bool upsample, float slope, DType dtype) {
  const std::int64_t N = y[0], H = y[2], W = y[3], C = y[4], times = upsample ? 2 : 1;
  const Shape from{N, 1, H / times, W / times, C};
  KernelCase c = bandwidth_case(
      "spade", fmt::format("{}{} slope {}", y.str(), upsample ? " upsampled" : "", slope), dtype,
      from.numel() + 3 * y.numel(),
      {random_tensor(from, dtype, 1), random_tensor({N, 2, C}, DType::f32, 2, 0.3f, 0.8f),
       random_tensor({N, 1, H, W, 2 * C}, dtype, 3)},
      [=](std::vector<Tensor>& in) {
        Tensor to = Tensor::empty(y, dtype);
        ops::spade(in[0], in[1], in[2], upsample, slope, to);
        return std::vector<Tensor>{to};
      });
  c.reference = [=](const std::vector<Values>& in) {
    Values to(y.numel());
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const std::int64_t k = i % C, p = i / C, column = p % W / times, row = p / W % H / times,
                         n = p / W / H;
      const double v = in[0][((n * (H / times) + row) * (W / times) + column) * C + k];
      const double z =
          (v - in[1][n * 2 * C + k]) * in[1][(n * 2 + 1) * C + k] * (1 + in[2][p * 2 * C + k]) +
          in[2][(p * 2 + 1) * C + k];
      to[i] = z < 0 ? z * static_cast<double>(slope) : z;
    }
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void spade_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // SadTalker's decoder at 256x256, four frames.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_statistics(cases, {4, 1, 64, 64, 512}, 0.0f, 1.0f, dtype);
      add_statistics(cases, {4, 1, 128, 128, 256}, 0.0f, 1.0f, dtype);
      add_statistics(cases, {4, 1, 256, 256, 64}, 0.0f, 1.0f, dtype);
      add_spade(cases, {4, 1, 64, 64, 512}, false, 0.2f, dtype);
      add_spade(cases, {4, 1, 128, 128, 512}, true, 0.2f, dtype);
      add_spade(cases, {4, 1, 256, 256, 256}, true, 1.0f, dtype);
      add_spade(cases, {4, 1, 256, 256, 64}, false, 0.2f, dtype);
    }
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Means far above the deviation, one position, more pieces than one, channels that fill no
    // vector, several blocks of channels.
    add_statistics(cases, {2, 1, 5, 7, 40}, 0.5f, 1.0f, dtype);
    add_statistics(cases, {1, 2, 13, 9, 19}, 100.0f, 0.5f, dtype);
    add_statistics(cases, {3, 1, 1, 1, 8}, 1.0f, 1.0f, dtype);
    add_statistics(cases, {1, 1, 2, 3, 2100}, 0.0f, 2.0f, dtype);
    add_spade(cases, {2, 1, 5, 7, 40}, false, 0.2f, dtype);
    add_spade(cases, {1, 1, 9, 9, 3}, false, 1.0f, dtype);
    add_spade(cases, {2, 1, 6, 10, 16}, true, 0.2f, dtype);
    add_spade(cases, {1, 1, 14, 12, 5}, true, 1.0f, dtype);
    add_spade(cases, {1, 1, 2, 2, 2100}, true, 0.0f, dtype);
  }
}

}  // namespace weft
