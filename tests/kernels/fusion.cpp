// Cases of ops/pointwise.h (kernels/fusion.cu beside src/ops/cpu/fusion.cpp).
#include "ops/pointwise.h"

#include <fmt/format.h>

#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

void add_outer(Cases& cases, const Shape& x, bool channel, bool pixel, DType dtype) {
  const std::int64_t C = x[4], pixels = x.numel() / C, each = pixels / x[0];
  const Shape columns{x[0], 1, 1, 1, C}, rows{x[0], x[1], x[2], x[3], 1};
  cases.push_back(bandwidth_case(
      "add_outer",
      fmt::format("{}{}{}", x.str(), channel ? " by channel" : "", pixel ? " by pixel" : ""), dtype,
      2 * x.numel() + (channel ? x[0] * C : 0) + (pixel ? pixels : 0),
      {random_tensor(x, dtype, 1), channel ? random_tensor(columns, dtype, 2) : Tensor(),
       pixel ? random_tensor(rows, dtype, 3) : Tensor()},
      [=](std::vector<Tensor>& in) {
        Tensor y = Tensor::empty(x, dtype);
        ops::add_outer(in[0], in[1], in[2], y);
        ops::add_outer(in[0], in[1], in[2], in[0]);  // in place
        return std::vector<Tensor>{y, in[0]};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      if (channel) y[i] += in[1][i / C / each * C + i % C];
      if (pixel) y[i] += in[2][i / C];
    }
    return std::vector<Values>{y, y};
  };
}

void add_channel_sums(Cases& cases, const Shape& x, DType dtype) {
  const std::int64_t C = x[4], pixels = x.numel() / C;
  const Shape rows{x[0], x[1], x[2], x[3], 1};
  const float factor = 1.0f / static_cast<float>(C);
  const Tensor large = random_tensor(x, dtype, 1, 1.0f, 0.5f),
               small = random_tensor(rows, dtype, 2);
  for (const bool accumulate : {false, true}) {
    const std::string text = x.str() + (accumulate ? " accumulate" : "");
    cases.push_back(bandwidth_case("sum_channels", text, dtype,
                                   x.numel() + (accumulate ? 2 : 1) * pixels, {large, small},
                                   [=](std::vector<Tensor>& in) {
                                     ops::sum_channels(in[0], factor, in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values y(pixels);
      for (std::int64_t i = 0; i < x.numel(); ++i) y[i / C] += factor * in[0][i];
      return std::vector<Values>{fp64::added(y, accumulate ? in[1] : Values())};
    };
    cases.push_back(bandwidth_case("repeat_channels", text, dtype,
                                   (accumulate ? 2 : 1) * x.numel() + pixels, {small, large},
                                   [=](std::vector<Tensor>& in) {
                                     ops::repeat_channels(in[0], factor, in[1], accumulate);
                                     return std::vector<Tensor>{in[1]};
                                   }));
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values dx(x.numel());
      for (std::int64_t i = 0; i < x.numel(); ++i) dx[i] = factor * in[0][i / C];
      return std::vector<Values>{fp64::added(dx, accumulate ? in[1] : Values())};
    };
  }
}

void add_scaled_groups(Cases& cases, const Shape& x, std::int64_t groups, DType dtype) {
  const std::int64_t size = x[4] / groups, n = x.numel();
  const Shape weights{x[0], x[1], x[2], x[3], groups};
  const std::string text = fmt::format("{} G{}", x.str(), groups);
  const Tensor a = random_tensor(weights, dtype, 1), v = random_tensor(x, dtype, 2),
               dy = random_tensor(x, dtype, 3);
  cases.push_back(bandwidth_case("scale_groups_forward", text, dtype, 2 * n + n / size, {v, a},
                                 [=](std::vector<Tensor>& in) {
                                   Tensor y = Tensor::empty(x, dtype);
                                   ops::scale_groups_forward(in[0], in[1], y);
                                   ops::scale_groups_forward(in[0], in[1], in[0]);  // in place
                                   return std::vector<Tensor>{y, in[0]};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t i = 0; i < n; ++i) y[i] *= in[1][i / size];
    return std::vector<Values>{y, y};
  };
  // Both gradients, as the backward calls it, and each alone.
  for (const auto& [dx, da] : {std::pair{true, true}, {true, false}, {false, true}}) {
    cases.push_back(bandwidth_case(
        "scale_groups_backward",
        fmt::format("{}{}{}", text, dx ? " dx in place" : "", da ? " da" : ""), dtype,
        n + (dx ? n : 0) + (da ? n + 2 * n / size : n / size), {v, a, dy},
        [=, dx = dx, da = da](std::vector<Tensor>& in) {
          Tensor to = dx ? in[2] : Tensor(), sums = da ? Tensor::empty(weights, dtype) : Tensor();
          ops::scale_groups_backward(in[0], in[1], in[2], to, sums);
          std::vector<Tensor> out;
          if (dx) out.push_back(to);
          if (da) out.push_back(sums);
          return out;
        }));
    cases.back().reference = [=, dx = dx, da = da](const std::vector<Values>& in) {
      Values to = in[2], sums(n / size);
      for (std::int64_t i = 0; i < n; ++i) {
        sums[i / size] += in[0][i] * to[i];
        to[i] *= in[1][i / size];
      }
      std::vector<Values> out;
      if (dx) out.push_back(to);
      if (da) out.push_back(sums);
      return out;
    };
  }
}

}  // namespace

void fusion_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // The fusion of DBNet++ over an image of 1024x1024.
    const Shape maps{1, 1, 256, 256, 256};
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_outer(cases, maps, true, false, dtype);
      add_outer(cases, maps, false, true, dtype);
      add_channel_sums(cases, maps, dtype);
      add_scaled_groups(cases, maps, 4, dtype);
    }
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [channel, pixel] : {std::pair{true, true}, {true, false}, {false, true}}) {
      add_outer(cases, {2, 1, 3, 5, 24}, channel, pixel, dtype);
      add_outer(cases, {3, 2, 2, 3, 19}, channel, pixel, dtype);
    }
    add_channel_sums(cases, {2, 1, 3, 5, 24}, dtype);
    add_channel_sums(cases, {1, 2, 5, 7, 37}, dtype);
    add_channel_sums(cases, {1, 1, 3, 3, 600}, dtype);  // several accesses a lane
    add_channel_sums(cases, {1, 1, 9, 31, 1}, dtype);
    add_scaled_groups(cases, {2, 1, 3, 5, 96}, 4, dtype);
    add_scaled_groups(cases, {1, 2, 4, 3, 39}, 3, dtype);  // groups of no whole access
    add_scaled_groups(cases, {1, 1, 5, 5, 4}, 4, dtype);   // a group a channel
    add_scaled_groups(cases, {1, 1, 2, 3, 600}, 1, dtype);
  }
}

}  // namespace weft
