// Cases of ops/resize.h (kernels/resize.cu beside src/ops/cpu/resize.cpp).
#include "ops/resize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

// Calls f(element of x, element of y, share) for every share that the resizing of x to y has.
template <class F>
void each_share(const Shape& x, const Shape& y, F f) {
  struct Tap {
    std::int64_t first, second;
    double share;
  };
  const auto tap = [](std::int64_t to, std::int64_t in, std::int64_t out) {
    const double ratio = static_cast<double>(in) / static_cast<double>(out);
    const double at = std::max((static_cast<double>(to) + 0.5) * ratio - 0.5, 0.0);
    const auto first = std::min(static_cast<std::int64_t>(at), in - 1);
    return Tap{first, std::min(first + 1, in - 1), at - static_cast<double>(first)};
  };
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const std::int64_t c = i % y[4], frame = i / y[4] / y[3] / y[2];
    const Tap column = tap(i / y[4] % y[3], x[3], y[3]),
              row = tap(i / y[4] / y[3] % y[2], x[2], y[2]);
    for (const auto& [r, a] : {std::pair{row.first, 1 - row.share}, {row.second, row.share}})
      for (const auto& [q, b] :
           {std::pair{column.first, 1 - column.share}, {column.second, column.share}})
        f(((frame * x[2] + r) * x[3] + q) * x[4] + c, i, a * b);
  }
}

void add_bilinear(Cases& cases, const Shape& x, std::int64_t H, std::int64_t W, DType dtype) {
  const Shape y{x[0], x[1], H, W, x[4]};
  const Tensor small = random_tensor(x, dtype, 1), large = random_tensor(y, dtype, 2);
  for (const bool accumulate : {false, true}) {
    const std::string text =
        fmt::format("{} to {}x{}{}", x.str(), H, W, accumulate ? " accumulate" : "");
    cases.push_back(bandwidth_case("bilinear_forward", text, dtype,
                                   x.numel() + (accumulate ? 2 : 1) * y.numel(), {small, large},
                                   [=](std::vector<Tensor>& in) {
                                     ops::bilinear_forward(in[0], in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values to(y.numel());
      each_share(x, y,
                 [&](std::int64_t i, std::int64_t o, double share) { to[o] += share * in[0][i]; });
      return std::vector<Values>{fp64::added(to, accumulate ? in[1] : Values())};
    };
    cases.push_back(bandwidth_case("bilinear_backward", text, dtype,
                                   (accumulate ? 2 : 1) * x.numel() + y.numel(), {large, small},
                                   [=](std::vector<Tensor>& in) {
                                     ops::bilinear_backward(in[0], in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values dx(x.numel());
      each_share(x, y,
                 [&](std::int64_t i, std::int64_t o, double share) { dx[i] += share * in[0][o]; });
      return std::vector<Values>{fp64::added(dx, accumulate ? in[1] : Values())};
    };
  }
}

// Channels [first, first + x's) of C.
void add_nearest(Cases& cases, const Shape& x, std::int64_t H, std::int64_t W, std::int64_t first,
                 std::int64_t C, DType dtype) {
  const Shape y{x[0], x[1], H, W, C};
  const std::int64_t moved = y.numel() / C * x[4];
  // f(element of x, element of y that it makes)
  const auto each = [=](auto f) {
    for (std::int64_t p = 0; p < y.numel() / C; ++p)
      for (std::int64_t k = 0; k < x[4]; ++k) {
        const std::int64_t q = p % W * x[3] / W, r = p / W % H * x[2] / H, frame = p / W / H;
        f(((frame * x[2] + r) * x[3] + q) * x[4] + k, p * C + first + k);
      }
  };
  const Tensor small = random_tensor(x, dtype, 1), large = random_tensor(y, dtype, 2);
  for (const bool accumulate : {false, true}) {
    const std::string text = fmt::format("{} to {}x{} at {} of {}{}", x.str(), H, W, first, C,
                                         accumulate ? " accumulate" : "");
    cases.push_back(bandwidth_case("nearest_forward", text, dtype,
                                   x.numel() + (accumulate ? 2 : 1) * moved, {small, large},
                                   [=](std::vector<Tensor>& in) {
                                     ops::nearest_forward(in[0], first, in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values to = in[1];
      each([&](std::int64_t i, std::int64_t o) { to[o] = (accumulate ? to[o] : 0.0) + in[0][i]; });
      return std::vector<Values>{to};
    };
    cases.push_back(bandwidth_case("nearest_backward", text, dtype,
                                   (accumulate ? 2 : 1) * x.numel() + moved, {large, small},
                                   [=](std::vector<Tensor>& in) {
                                     ops::nearest_backward(in[0], first, in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values dx(x.numel());
      each([&](std::int64_t i, std::int64_t o) { dx[i] += in[0][o]; });
      return std::vector<Values>{fp64::added(dx, accumulate ? in[1] : Values())};
    };
  }
}

void add_reflect(Cases& cases, const Shape& x, int up, DType dtype) {
  const Shape y{x[0], x[1], up * x[2] + 2, up * x[3] + 2, x[4]};
  cases.push_back(bandwidth_case(
      "reflect_border", fmt::format("{}{}", x.str(), up == 2 ? " doubled" : ""), dtype,
      x.numel() + y.numel(), {random_tensor(x, dtype, 1)}, [=](std::vector<Tensor>& in) {
        Tensor to = Tensor::empty(y, dtype);
        ops::reflect_border(in[0], up, to);
        return std::vector<Tensor>{to};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    // Where pixel i of the border's axis comes from, in an axis of n pixels.
    const auto mirrored = [](std::int64_t i, std::int64_t n) {
      return std::min(std::abs(i - 1), 2 * (n - 1) - (i - 1));
    };
    Values to(y.numel());
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const std::int64_t c = i % y[4], q = mirrored(i / y[4] % y[3], up * x[3]) / up,
                         r = mirrored(i / y[4] / y[3] % y[2], up * x[2]) / up,
                         frame = i / y[4] / y[3] / y[2];
      to[i] = in[0][((frame * x[2] + r) * x[3] + q) * x[4] + c];
    }
    return std::vector<Values>{to};
  };
}

}  // namespace

void resize_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // Levels of a pyramid over two images of 512x512, and a fusion of HRNet.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t n : {1, 6}) add_bilinear(cases, {2, 1, n, n, 512}, 64, 64, dtype);
      add_bilinear(cases, {2, 1, 64, 64, 48}, 128, 128, dtype);
      // A pyramid of DBNet over 1024x1024: top-down, and its last level beside the others.
      add_nearest(cases, {1, 1, 128, 128, 256}, 256, 256, 0, 256, dtype);
      add_nearest(cases, {1, 1, 32, 32, 64}, 256, 256, 192, 256, dtype);
      // The first block and the last of ParseNet over 512x512.
      add_reflect(cases, {1, 1, 512, 512, 64}, 1, dtype);
      add_reflect(cases, {1, 1, 256, 256, 128}, 2, dtype);
    }
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_bilinear(cases, {2, 1, 3, 4, 19}, 7, 9, dtype);
    add_bilinear(cases, {1, 2, 1, 1, 72}, 5, 6, dtype);
    add_bilinear(cases, {1, 1, 6, 6, 8}, 13, 24, dtype);
    add_bilinear(cases, {1, 1, 9, 11, 16}, 4, 3, dtype);  // smaller
    add_bilinear(cases, {1, 1, 5, 2, 3}, 2, 7, dtype);    // smaller and larger
    add_bilinear(cases, {1, 2, 5, 3, 3}, 5, 3, dtype);    // the same
    add_bilinear(cases, {1, 1, 40, 1, 3}, 7, 1, dtype);   // pixels without a share
    // Doubled: pieces of a row of several pixels, and of one; many outputs a pixel, and very many.
    add_bilinear(cases, {2, 1, 5, 17, 48}, 10, 34, dtype);
    add_bilinear(cases, {1, 1, 2, 3, 24}, 4, 6, dtype);
    add_bilinear(cases, {1, 1, 2, 2, 2080}, 4, 4, dtype);
    add_bilinear(cases, {1, 1, 150, 2, 3}, 300, 4, dtype);
    add_bilinear(cases, {1, 2, 3, 2, 80}, 31, 27, dtype);
    add_bilinear(cases, {1, 1, 1, 2, 40}, 70, 90, dtype);
    add_bilinear(cases, {1, 1, 1, 40, 8}, 90, 7, dtype);
    add_nearest(cases, {2, 1, 3, 4, 19}, 6, 8, 0, 19, dtype);
    add_nearest(cases, {1, 2, 3, 5, 8}, 12, 10, 16, 32, dtype);
    add_nearest(cases, {2, 1, 3, 4, 16}, 7, 9, 5, 24, dtype);  // no whole multiple, odd place
    add_nearest(cases, {1, 1, 9, 2, 24}, 4, 7, 8, 40, dtype);  // fewer rows, more columns
    add_nearest(cases, {1, 2, 5, 3, 32}, 5, 3, 0, 32, dtype);  // the same
    add_nearest(cases, {1, 1, 1, 1, 3}, 70, 90, 1, 5, dtype);
    for (const int up : {1, 2}) {
      add_reflect(cases, {2, 1, 5, 7, 8}, up, dtype);
      add_reflect(cases, {1, 2, 2, 2, 19}, up, dtype);  // as small as may be
    }
    add_reflect(cases, {1, 1, 1, 3, 3}, 2, dtype);
  }
}

}  // namespace weft
