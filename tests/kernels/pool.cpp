// Cases of ops/resize.h (kernels/pool.cu beside src/ops/cpu/pool.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/pointwise.h"
#include "ops/resize.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

void add_max_pool(Cases& cases, const Shape& x, DType dtype) {
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

void add_windows(Cases& cases, const Shape& x, ops::PoolWindow k, DType dtype) {
  const Shape pooled{x[0], x[1], k.count(x[2]), k.count(x[3]), x[4]};
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs,
                       KernelCase::Run run) {
    cases.push_back(bandwidth_case(
        op,
        fmt::format("{} {}x{} stride {} padding {}", x.str(), k.size, k.size, k.stride, k.padding),
        dtype, values, std::move(inputs), std::move(run)));
  };
  // f(element of y, element of x that is the first greatest of its window); x as in the case.
  const auto each = [=](const Values& v, auto f) {
    std::int64_t i = 0;
    for (std::int64_t frame = 0; frame < x[0] * x[1]; ++frame)
      for (std::int64_t r = 0; r < pooled[2]; ++r)
        for (std::int64_t q = 0; q < pooled[3]; ++q)
          for (std::int64_t c = 0; c < x[4]; ++c, ++i) {
            std::int64_t best = -1;
            for (std::int64_t a = r * k.stride - k.padding; a < r * k.stride - k.padding + k.size;
                 ++a)
              for (std::int64_t b = q * k.stride - k.padding; b < q * k.stride - k.padding + k.size;
                   ++b) {
                if (a < 0 || a >= x[2] || b < 0 || b >= x[3]) continue;
                const std::int64_t at = ((frame * x[2] + a) * x[3] + b) * x[4] + c;
                if (best < 0 || v[at] > v[best]) best = at;
              }
            f(i, best);
          }
  };
  const Tensor a = random_tensor(x, dtype, 1);
  add("max_pool_window_forward", x.numel() + pooled.numel(), {a}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(pooled, dtype);
    ops::max_pool_window_forward(in[0], k, y);
    return std::vector<Tensor>{y};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y(pooled.numel());
    each(in[0], [&](std::int64_t i, std::int64_t best) { y[i] = in[0][best]; });
    return std::vector<Values>{y};
  };
  // Rectified, so that greatest elements tie.
  add("max_pool_window_backward", 2 * x.numel() + pooled.numel(),
      {a, random_tensor(pooled, dtype, 3)}, [=](std::vector<Tensor>& in) {
        Tensor dx = Tensor::empty(x, dtype);
        ops::leaky_relu_forward(in[0], 0.0f, in[0]);
        ops::max_pool_window_backward(in[0], k, in[1], dx);
        return std::vector<Tensor>{dx};
      });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values dx(x.numel());
    each(fp64::map(in[0], [](double v) { return std::max(v, 0.0); }),
         [&](std::int64_t i, std::int64_t best) { dx[best] += in[1][i]; });
    return std::vector<Values>{dx};
  };
}

void add_adaptive(Cases& cases, const Shape& x, std::int64_t h, std::int64_t w, DType dtype) {
  const Shape pooled{x[0], x[1], h, w, x[4]};
  const auto add = [&](const char* op, const char* variant, std::int64_t values,
                       std::vector<Tensor> inputs, KernelCase::Run run) {
    cases.push_back(bandwidth_case(op, fmt::format("{} to {}x{}{}", x.str(), h, w, variant), dtype,
                                   values, std::move(inputs), std::move(run)));
  };
  // f(element of y, element of x in its rectangle, 1 / the rectangle's pixels)
  const auto each = [=](auto f) {
    const auto begin = [](std::int64_t i, std::int64_t n, std::int64_t L) { return i * L / n; };
    const auto end = [](std::int64_t i, std::int64_t n, std::int64_t L) {
      return static_cast<std::int64_t>(
          std::ceil(static_cast<double>((i + 1) * L) / static_cast<double>(n)));
    };
    for (std::int64_t i = 0; i < pooled.numel(); ++i) {
      const std::int64_t c = i % x[4], q = i / x[4] % w, r = i / x[4] / w % h,
                         f0 = i / x[4] / w / h;
      const std::int64_t top = begin(r, h, x[2]), bottom = end(r, h, x[2]),
                         left = begin(q, w, x[3]), right = end(q, w, x[3]);
      for (std::int64_t a = top; a < bottom; ++a)
        for (std::int64_t b = left; b < right; ++b)
          f(i, ((f0 * x[2] + a) * x[3] + b) * x[4] + c,
            1.0 / static_cast<double>((bottom - top) * (right - left)));
    }
  };
  const Tensor a = random_tensor(x, dtype, 1, 1.0f, 0.5f), dy = random_tensor(pooled, dtype, 2);
  add("adaptive_pool_forward", "", x.numel() + pooled.numel(), {a}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(pooled, dtype);
    ops::adaptive_pool_forward(in[0], y);
    return std::vector<Tensor>{y};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y(pooled.numel());
    each([&](std::int64_t i, std::int64_t j, double share) { y[i] += share * in[0][j]; });
    return std::vector<Values>{y};
  };
  for (const bool accumulate : {false, true}) {
    add("adaptive_pool_backward", accumulate ? " accumulate" : "",
        pooled.numel() + (accumulate ? 2 : 1) * x.numel(), {dy, a}, [=](std::vector<Tensor>& in) {
          ops::adaptive_pool_backward(in[0], in[1], accumulate);
          return std::vector<Tensor>{in[1]};
        });
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values dx(x.numel());
      each([&](std::int64_t i, std::int64_t j, double share) { dx[j] += share * in[0][i]; });
      return std::vector<Values>{fp64::added(dx, accumulate ? in[1] : Values())};
    };
  }
}

void add_average(Cases& cases, const Shape& pooled, DType dtype) {
  const Shape x{pooled[0], pooled[1], 2 * pooled[2], 2 * pooled[3], pooled[4]};
  // f(element of y, one of its four elements of x)
  const auto each = [=](auto f) {
    for (std::int64_t j = 0; j < x.numel(); ++j) {
      const std::int64_t c = j % x[4], q = j / x[4] % x[3] / 2, r = j / x[4] / x[3] % x[2] / 2,
                         frame = j / x[4] / x[3] / x[2];
      f(((frame * pooled[2] + r) * pooled[3] + q) * x[4] + c, j);
    }
  };
  const Tensor a = random_tensor(x, dtype, 1, 1.0f, 0.5f), dy = random_tensor(pooled, dtype, 2);
  cases.push_back(bandwidth_case("average_pool_2x2_forward", x.str(), dtype,
                                 x.numel() + pooled.numel(), {a}, [=](std::vector<Tensor>& in) {
                                   Tensor y = Tensor::empty(pooled, dtype);
                                   ops::average_pool_2x2_forward(in[0], y);
                                   return std::vector<Tensor>{y};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y(pooled.numel());
    each([&](std::int64_t i, std::int64_t j) { y[i] += in[0][j] / 4; });
    return std::vector<Values>{y};
  };
  for (const bool accumulate : {false, true}) {
    cases.push_back(bandwidth_case(
        "average_pool_2x2_backward", x.str() + (accumulate ? " accumulate" : ""), dtype,
        pooled.numel() + (accumulate ? 2 : 1) * x.numel(), {dy, a}, [=](std::vector<Tensor>& in) {
          ops::average_pool_2x2_backward(in[0], in[1], accumulate);
          return std::vector<Tensor>{in[1]};
        }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values dx(x.numel());
      each([&](std::int64_t i, std::int64_t j) { dx[j] = in[0][i] / 4; });
      return std::vector<Values>{fp64::added(dx, accumulate ? in[1] : Values())};
    };
  }
}

}  // namespace

void pool_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    add_max_pool(cases, {1, 4, 256, 256, 64}, DType::bf16);
    // Behind the stem of a ResNet, and before its pyramid; two images of 512x512.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_windows(cases, {2, 1, 256, 256, 128}, {3, 2, 1}, dtype);
      add_average(cases, {1, 1, 256, 256, 64}, dtype);  // the stem of DBNet++ at 1024x1024
      for (const std::int64_t n : {1, 6}) add_adaptive(cases, {2, 1, 64, 64, 2048}, n, n, dtype);
    }
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_max_pool(cases, {1, 2, 5, 4, 3}, dtype);  // odd rows and columns
    add_max_pool(cases, {2, 1, 6, 7, 24}, dtype);
    add_windows(cases, {2, 1, 7, 8, 19}, {3, 2, 1}, dtype);
    add_windows(cases, {1, 2, 8, 5, 8}, {3, 2, 1}, dtype);
    add_windows(cases, {1, 1, 1, 1, 3}, {3, 2, 1}, dtype);
    add_windows(cases, {1, 1, 7, 9, 16}, {2, 3, 0}, dtype);  // pixels between the windows
    add_windows(cases, {1, 1, 6, 6, 3}, {5, 1, 2}, dtype);
    add_windows(cases, {1, 1, 70, 3, 70}, {3, 2, 1}, dtype);  // more than the CPU's bands
    add_windows(cases, {1, 2, 37, 6, 16}, {3, 2, 1}, dtype);  // a GPU's threads take 16 rows
    add_windows(cases, {1, 1, 6, 5, 8}, {3, 1, 1}, dtype);
    add_adaptive(cases, {2, 1, 11, 9, 72}, 3, 2, dtype);
    add_adaptive(cases, {1, 2, 7, 8, 5}, 6, 6, dtype);
    add_adaptive(cases, {2, 1, 4, 5, 136}, 1, 1, dtype);
    add_adaptive(cases, {1, 1, 2, 3, 8}, 6, 6, dtype);  // more rectangles than pixels
    add_adaptive(cases, {2, 1, 11, 9, 64}, 3, 4, dtype);
    add_adaptive(cases, {1, 1, 23, 25, 24}, 1, 1, dtype);  // a large one
    add_average(cases, {2, 1, 3, 5, 19}, dtype);
    add_average(cases, {1, 2, 4, 1, 40}, dtype);
    add_average(cases, {1, 1, 1, 1, 1}, dtype);
  }
}

}  // namespace weft
