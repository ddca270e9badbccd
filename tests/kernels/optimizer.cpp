// Cases of ops/optimizer.h (kernels/optimizer.cu beside src/ops/cpu/optimizer.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/optimizer.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Variant {
  const char* name;
  bool ema, copy;
  double squares;  // of the global gradient; clipped to norm 1
  bool shifted;    // every tensor starts one element further: no wide access fits
};

void add_step(Cases& cases, std::int64_t count, const Variant& v) {
  const ops::AdamW a{1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.1f, 0.001f, 0.19f, 0.002f, 1.0f, 0.99f};
  KernelCase c;
  c.op = "adamw_step";
  c.shape = fmt::format("N{}{}", count, v.name);
  c.dtype = DType::f32;
  c.bytes = (28.0 + (v.ema ? 8 : 0) + (v.copy ? 2 : 0)) * static_cast<double>(count);
  // f32 but for the copy, where a parameter next to a tie may round to either side.
  c.tolerance = v.copy ? 1.0 / 128 : 1e-5;
  const std::int64_t held = count + (v.shifted ? 1 : 0);
  Tensor squares = Tensor::host({1}, DType::f64);
  squares.data<double>()[0] = v.squares;
  c.inputs = {squares,
              random_tensor({held}, DType::f32, 1),
              random_tensor({held}, DType::f32, 2),
              random_tensor({held}, DType::f32, 3, 0.1f),
              random_tensor({held}, DType::f32, 4, 0.001f, 0.01f),  // a second moment is positive
              v.ema ? random_tensor({held}, DType::f32, 5) : Tensor(),
              v.copy ? random_tensor({held}, DType::bf16, 6) : Tensor()};
  c.run = [=](std::vector<Tensor>& in) {
    std::vector<Tensor> t = in, out;
    for (std::size_t i = 1; i < t.size(); ++i)
      if (v.shifted && t[i].defined()) t[i] = t[i].slice(1, held);
    ops::adamw_step(a, t[0], t[1], t[2], t[3], t[4], t[5], t[6]);
    for (std::size_t i = 2; i < in.size(); ++i)
      if (in[i].defined()) out.push_back(in[i]);
    return out;
  };
  cases.push_back(std::move(c));
}

// Momentum from the second step on; the first finds rubbish in place of it.
void add_sgd(Cases& cases, std::int64_t count, const Variant& v, bool first) {
  const ops::Sgd a{1e-2f, 0.9f, 0.05f, 1.0f, 0.99f, first};
  KernelCase c;
  c.op = "sgd_step";
  c.shape = fmt::format("N{}{}{}", count, v.name, first ? " first" : "");
  c.dtype = DType::f32;
  c.bytes =
      ((first ? 16.0 : 20.0) + (v.ema ? 8 : 0) + (v.copy ? 2 : 0)) * static_cast<double>(count);
  c.tolerance = v.copy ? 1.0 / 128 : 1e-5;
  const std::int64_t skip = v.shifted ? 1 : 0, held = count + skip;
  Tensor squares = Tensor::host({1}, DType::f64);
  squares.data<double>()[0] = v.squares;
  c.inputs = {squares,
              random_tensor({held}, DType::f32, 1),
              random_tensor({held}, DType::f32, 2),
              random_tensor({held}, DType::f32, 3),
              v.ema ? random_tensor({held}, DType::f32, 5) : Tensor(),
              v.copy ? random_tensor({held}, DType::bf16, 6) : Tensor()};
  if (first)
    for (std::int64_t i = 0; i < held; ++i)
      c.inputs[3].data<float>()[i] = std::numeric_limits<float>::quiet_NaN();
  const bool left_out = !std::isfinite(v.squares);
  if (left_out && first) return;  // NaN would stay
  c.run = [=](std::vector<Tensor>& in) {
    std::vector<Tensor> t = in, out;
    for (std::size_t i = 1; i < t.size(); ++i)
      if (v.shifted && t[i].defined()) t[i] = t[i].slice(1, held);
    ops::sgd_step(a, t[0], t[1], t[2], t[3], t[4], t[5]);
    for (std::size_t i = 2; i < in.size(); ++i)
      if (t[i].defined()) out.push_back(t[i]);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    std::vector<Values> t;
    for (std::size_t i = 1; i < in.size(); ++i)
      t.push_back(in[i].empty() ? Values() : Values(in[i].begin() + skip, in[i].end()));
    Values &p = t[1], &m = t[2], &ema = t[3], &copy = t[4];
    const double scale = std::min(1.0, 1.0 / (std::sqrt(v.squares) + 1e-6));
    for (std::size_t i = 0; i < p.size() && !left_out; ++i) {
      m[i] = (first ? 0.0 : 0.9 * m[i]) + scale * t[0][i] + 0.05 * p[i];
      p[i] -= 1e-2 * m[i];
      if (v.ema) ema[i] = 0.99 * ema[i] + 0.01 * p[i];
      if (v.copy) copy[i] = p[i];
    }
    std::vector<Values> out{p, m};
    if (v.ema) out.push_back(ema);
    if (v.copy) out.push_back(copy);
    return out;
  };
  cases.push_back(std::move(c));
}

void add_ema(Cases& cases, std::int64_t count, double norm, bool shifted) {
  const std::int64_t skip = shifted ? 1 : 0;
  KernelCase c;
  c.op = "ema_step";
  c.shape = fmt::format("N{}{}{}", count, shifted ? " shifted" : "",
                        std::isfinite(norm) ? "" : " NaN norm");
  c.dtype = DType::f32;
  c.bytes = 12.0 * static_cast<double>(count);
  c.tolerance = 1e-6;
  Tensor squares = Tensor::host({1}, DType::f64);
  squares.data<double>()[0] = norm;
  c.inputs = {squares, random_tensor({count + skip}, DType::f32, 1),
              random_tensor({count + skip}, DType::f32, 2)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor average = in[2].slice(skip, count + skip);
    ops::ema_step(0.9f, in[0], in[1].slice(skip, count + skip), average);
    return std::vector<Tensor>{in[2]};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values average = in[2];
    for (auto i = static_cast<std::size_t>(skip); i < average.size() && std::isfinite(norm); ++i)
      average[i] = 0.9 * average[i] + 0.1 * in[1][i];
    return std::vector<Values>{average};
  };
  cases.push_back(std::move(c));
}

// `x`: the clip whose discriminator the averages belong to.
void add_running_average(Cases& cases, const Shape& x) {
  Tensor rows = Tensor::host({15}, DType::f64);
  for (int i = 0; i < 15; ++i) rows.data<double>()[i] = 0.1 * i;
  KernelCase c = make_case("running_average", x.str(), DType::f32, 20, 2e-5);
  c.inputs = {rows, random_tensor({2}, DType::f32, 3)};
  c.run = [](std::vector<Tensor>& in) {
    ops::running_average(in[0], 5, 2, 0.25f, 0.9f, in[1]);
    return std::vector<Tensor>{in[1]};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void optimizer_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // Far beyond any cache; the whole model has 34 times as many.
    const std::int64_t count = std::int64_t{1} << 25;
    add_step(cases, count, {"", true, false, 4.0, false});
    add_step(cases, count, {" bf16 copy", true, true, 4.0, false});
    add_sgd(cases, count, {"", false, false, 4.0, false}, false);
    add_sgd(cases, count, {" EMA and bf16 copy", true, true, 4.0, false}, false);
    add_ema(cases, count, 4.0, false);
    return;
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::int64_t count : {1, 1003, 5000})
    for (const Variant& v :
         {Variant{" clipped", true, false, 4.0, false},
          Variant{" not clipped", true, true, 0.25, false},
          Variant{" no EMA", false, true, 4.0, false}, Variant{" shifted", true, true, 4.0, true},
          Variant{" NaN norm", true, true, nan, false},
          Variant{" infinite norm", true, false, infinity, false}}) {
      add_step(cases, count, v);
      for (const bool first : {false, true}) add_sgd(cases, count, v, first);
    }
  for (const std::int64_t count : {1, 1003, 50'000}) {
    add_ema(cases, count, 4.0, false);
    add_ema(cases, count, 4.0, true);
    add_ema(cases, count, nan, false);
  }
  add_running_average(cases, {1, 3, 20, 13, 3});
}

}  // namespace weft
