// Cases of ops/conv.h (kernels/conv/modulated.cu beside src/ops/cpu/conv/modulated.cpp).
#include "ops/conv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

// The value at element (n, t, row, column, c) of y [N,T,2h,2w,C] that resizing x [N,T,h,w,C]
// makes: 3/4 of the pixel there, 1/4 of its neighbour on that side, along both axes.
double doubled(const Values& x, const Shape& s, std::int64_t frame, std::int64_t row,
               std::int64_t column, std::int64_t c) {
  const auto beside = [](std::int64_t o, std::int64_t n) {
    return std::clamp<std::int64_t>(o / 2 + (o % 2 ? 1 : -1), 0, n - 1);
  };
  const auto at = [&](std::int64_t r, std::int64_t q) {
    return x[((frame * s[2] + r) * s[3] + q) * s[4] + c];
  };
  const std::int64_t r = row / 2, q = column / 2, r2 = beside(row, s[2]), q2 = beside(column, s[3]);
  return (9 * at(r, q) + 3 * at(r2, q) + 3 * at(r, q2) + at(r2, q2)) / 16;
}

void add_energy(Cases& cases, const Shape& w, DType dtype) {
  const std::int64_t pairs = w[0] * w[1], taps = w.numel() / pairs;
  cases.push_back(bandwidth_case("weight_energy", w.str(), dtype, w.numel(),
                                 {random_tensor(w, dtype, 1)}, [=](std::vector<Tensor>& in) {
                                   Tensor to = Tensor::empty({w[0], w[1]}, DType::f32);
                                   ops::weight_energy(in[0], to);
                                   return std::vector<Tensor>{to};
                                 }));
  cases.back().tolerance = 2e-5;  // f32 sums, of either type
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to(pairs);
    for (std::int64_t i = 0; i < w.numel(); ++i) to[i / taps] += in[0][i] * in[0][i];
    return std::vector<Values>{to};
  };
}

void add_demodulation(Cases& cases, std::int64_t N, std::int64_t outs, std::int64_t ins) {
  const float gain = std::sqrt(2.0f), eps = 1e-8f;
  Tensor energy = random_tensor({outs, ins}, DType::f32, 1, 0.1f, 1.0f);
  for (float& e : energy.span<float>()) e = std::abs(e);
  cases.push_back(bandwidth_case("demodulation", fmt::format("N{} {} to {}", N, ins, outs),
                                 DType::f32, outs * ins + N * (ins + outs),
                                 {energy, random_tensor({N, ins}, DType::f32, 2, 0.5f, 1.0f)},
                                 [=](std::vector<Tensor>& in) {
                                   Tensor d = Tensor::empty({N, outs}, DType::f32);
                                   ops::demodulation(in[0], in[1], gain, eps, d);
                                   return std::vector<Tensor>{d};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values d(N * outs, eps);
    for (std::int64_t i = 0; i < N * outs; ++i)
      for (std::int64_t c = 0; c < ins; ++c) {
        const double s = in[1][i / outs * ins + c];
        d[i] += in[0][i % outs * ins + c] * s * s;
      }
    return std::vector<Values>{fp64::map(d, [=](double sum) { return gain / std::sqrt(sum); })};
  };
}

void add_modulate(Cases& cases, const Shape& x, bool up, DType dtype) {
  const std::int64_t C = x[4];
  const Shape y{x[0], x[1], x[2] * (up ? 2 : 1), x[3] * (up ? 2 : 1), C};
  cases.push_back(bandwidth_case(
      "modulate", fmt::format("{}{}", x.str(), up ? " doubled" : ""), dtype, x.numel() + y.numel(),
      {random_tensor(x, dtype, 1), random_tensor({x[0], C}, DType::f32, 2, 0.5f, 1.0f)},
      [=](std::vector<Tensor>& in) {
        Tensor to = up ? Tensor::empty(y, dtype) : in[0];
        ops::modulate(in[0], in[1], to);
        return std::vector<Tensor>{to};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to(y.numel());
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const std::int64_t c = i % C, q = i / C % y[3], r = i / C / y[3] % y[2],
                         frame = i / C / y[3] / y[2];
      to[i] = (up ? doubled(in[0], x, frame, r, q, c) : in[0][i]) * in[1][frame / x[1] * C + c];
    }
    return std::vector<Values>{to};
  };
}

// `noisy`: with noise; `transformed`: half of the channels by scale and shift.
void add_finish(Cases& cases, const Shape& x, bool noisy, bool transformed, DType dtype) {
  const std::int64_t C = x[4], positions = x.numel() / C, each = positions / x[0];
  const float slope = 0.2f;
  const Shape half{x[0], x[1], x[2], x[3], C / 2}, map{x[0], x[1], x[2], x[3]};
  const auto when = [](bool given, Tensor t) { return given ? t : Tensor(); };
  cases.push_back(bandwidth_case(
      "modulated_finish",
      fmt::format("{}{}{}", x.str(), noisy ? " noise" : "", transformed ? " transformed" : ""),
      dtype, (transformed ? 3 : 2) * x.numel() + (noisy ? positions : 0),
      {random_tensor(x, dtype, 1), random_tensor({x[0], C}, DType::f32, 2, 0.3f, 1.0f),
       when(noisy, random_tensor(map, DType::f32, 3)),
       when(noisy, random_tensor({1}, DType::f32, 4)), random_tensor({C}, DType::f32, 5),
       when(transformed, random_tensor(half, dtype, 6)),
       when(transformed, random_tensor(half, dtype, 7))},
      [=](std::vector<Tensor>& in) {
        ops::modulated_finish(in[0], in[1], in[2], in[3], in[4], slope, in[5], in[6], in[0]);
        return std::vector<Tensor>{in[0]};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to(x.numel());
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const std::int64_t c = i % C, p = i / C;
      const double v =
          in[0][i] * in[1][p / each * C + c] + (noisy ? in[3][0] * in[2][p] : 0.0) + in[4][c];
      to[i] = v > 0 ? v : slope * v;
      if (transformed && c >= C / 2) {
        const std::int64_t k = p * (C / 2) + c - C / 2;
        to[i] = to[i] * in[5][k] + in[6][k];
      }
    }
    return std::vector<Values>{to};
  };
}

void add_rgb(Cases& cases, const Shape& x, bool skipped, DType dtype) {
  const std::int64_t C = x[4], positions = x.numel() / C;
  const Shape small{x[0], x[1], x[2] / 2, x[3] / 2, 3}, y{x[0], x[1], x[2], x[3], 3};
  cases.push_back(bandwidth_case(
      "modulated_rgb", fmt::format("{}{}", x.str(), skipped ? " added" : ""), dtype,
      x.numel() + 3 * positions,
      {random_tensor(x, dtype, 1), random_tensor({x[0], C}, DType::f32, 2, 0.5f, 1.0f),
       random_tensor({3, C}, DType::f32, 3), random_tensor({3}, DType::f32, 4),
       skipped ? random_tensor(small, DType::f32, 5) : Tensor()},
      [=](std::vector<Tensor>& in) {
        Tensor rgb = Tensor::empty(y, DType::f32);
        ops::modulated_rgb(in[0], in[1], in[2], in[3], in[4], rgb);
        return std::vector<Tensor>{rgb};
      }));
  cases.back().tolerance = 2e-5;  // f32 sums, of either type
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to(y.numel());
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const std::int64_t o = i % 3, p = i / 3, frame = p / x[3] / x[2];
      to[i] = in[3][o];
      for (std::int64_t c = 0; c < C; ++c)
        to[i] += in[0][p * C + c] * in[1][frame / x[1] * C + c] * in[2][o * C + c];
      if (skipped) to[i] += doubled(in[4], small, frame, p / x[3] % x[2], p % x[3], o);
    }
    return std::vector<Values>{to};
  };
}

}  // namespace

void modulated_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // GFPGAN's levels of 32 and 512 pixels, one face.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_modulate(cases, {1, 1, 16, 16, 512}, true, dtype);
      add_modulate(cases, {1, 1, 256, 256, 128}, true, dtype);
      add_finish(cases, {1, 1, 32, 32, 512}, true, true, dtype);
      add_finish(cases, {1, 1, 512, 512, 64}, true, true, dtype);
      add_rgb(cases, {1, 1, 512, 512, 64}, true, dtype);
    }
    add_demodulation(cases, 1, 512, 512);
    add_energy(cases, {512, 512, 3, 3}, DType::f32);
    return;
  }
  for (const auto& [N, outs, ins] : {std::tuple{1, 1, 1}, {2, 5, 7}, {1, 40, 33}, {3, 16, 64}})
    add_demodulation(cases, N, outs, ins);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_energy(cases, {5, 7, 3, 3}, dtype);
    add_energy(cases, {16, 8, 1, 1}, dtype);
    // Channels that fill no vector, several samples, one pixel, many pixels.
    for (const Shape& x : {Shape{2, 1, 4, 6, 8},
                           {1, 1, 1, 1, 6},
                           {2, 2, 3, 5, 38},
                           {1, 1, 6, 4, 64},
                           {1, 1, 2, 40, 2}}) {
      for (const bool up : {false, true}) add_modulate(cases, x, up, dtype);
      for (const bool noisy : {false, true})
        for (const bool transformed : {false, true})
          add_finish(cases, x, noisy, transformed, dtype);
      add_rgb(cases, x, x[2] % 2 == 0 && x[3] % 2 == 0, dtype);
    }
    add_finish(cases, {1, 1, 3, 3, 7}, true, false, dtype);
    add_rgb(cases, {2, 1, 2, 2, 200}, false, dtype);
    add_rgb(cases, {1, 1, 250, 264, 2}, true, dtype);  // a GPU's blocks take several turns
  }
}

}  // namespace weft
