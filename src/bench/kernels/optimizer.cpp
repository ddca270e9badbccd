// Cases of ops/optimizer.h (kernels/optimizer.cu beside src/ops/cpu/optimizer.cpp).
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "bench/kernels/cases.h"
#include "ops/optimizer.h"
#include "ops/reduce.h"

namespace weft {
namespace {

struct Variant {
  const char* name;
  bool ema, copy;
  double squares;  // of the global gradient; clipped to norm 1
  bool shifted;    // every tensor starts one element further: no wide access fits
};

void add_step(std::vector<KernelCase>& cases, std::int64_t count, const Variant& v) {
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

void add_squares(std::vector<KernelCase>& cases, std::int64_t count, bool shifted,
                 bool accumulate = false) {
  KernelCase c;
  c.op = "sum_of_squares";
  c.shape = fmt::format("N{}{}{}", count, shifted ? " shifted" : "", accumulate ? " added" : "");
  c.bytes = 4.0 * static_cast<double>(count);
  c.tolerance = 1e-12;  // exact squares, summed in f64
  c.inputs = {random_tensor({count + (shifted ? 1 : 0)}, DType::f32, 1)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor sum = Tensor::empty({1}, DType::f64);
    const double before = 0.25;
    sum.set(std::span<const double>(&before, 1));
    ops::sum_of_squares(shifted ? in[0].slice(1, count + 1) : in[0], sum, accumulate);
    return std::vector<Tensor>{sum};
  };
  cases.push_back(std::move(c));
}

// Finite values must give 0, one that is not NaN: told as a number, because NaN equals nothing.
void add_carry(std::vector<KernelCase>& cases, std::int64_t count, double odd) {
  KernelCase c;
  c.op = "carry_non_finite";
  c.shape = fmt::format("N{} {}", count, odd);
  c.bytes = 8.0 * static_cast<double>(count);
  c.tolerance = 0;
  c.inputs = {};
  c.run = [=](std::vector<Tensor>&) {
    std::vector<double> values(static_cast<std::size_t>(count), 0.5);
    values[static_cast<std::size_t>(count / 2)] = odd;
    const Tensor of = Tensor::from_host(std::span<const double>(values), {count});
    Tensor sum = Tensor::empty({1}, DType::f64);
    const double before = 3;
    sum.set(std::span<const double>(&before, 1));
    ops::carry_non_finite(of, sum);
    const float found = std::isfinite(sum.to_host().data<double>()[0]) ? 1 : 2;
    return std::vector<Tensor>{Tensor::from_host(std::span<const float>(&found, 1), {1})};
  };
  cases.push_back(std::move(c));
}

void add_checksum(std::vector<KernelCase>& cases, std::int64_t count, DType dtype) {
  KernelCase c;
  c.op = "checksum";
  c.shape = fmt::format("N{} {}", count, name_of(dtype));
  c.bytes = static_cast<double>(count) * static_cast<double>(size_of(dtype));
  c.tolerance = 0;  // whole numbers
  c.inputs = {random_tensor({count}, dtype, 1)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor sum = Tensor::empty({2}, DType::f64);
    ops::checksum(in[0], sum);
    return std::vector<Tensor>{sum};
  };
  cases.push_back(std::move(c));
}

}  // namespace

std::vector<KernelCase> optimizer_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    // Far beyond any cache; the whole model has 34 times as many.
    const std::int64_t count = std::int64_t{1} << 25;
    add_step(cases, count, {"", true, false, 4.0, false});
    add_step(cases, count, {" bf16 copy", true, true, 4.0, false});
    add_squares(cases, count, false);
    add_checksum(cases, count, DType::bf16);
    return cases;
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::int64_t count : {1, 1003, 5000})
    for (const Variant& v :
         {Variant{" clipped", true, false, 4.0, false},
          Variant{" not clipped", true, true, 0.25, false},
          Variant{" no EMA", false, true, 4.0, false}, Variant{" shifted", true, true, 4.0, true},
          Variant{" NaN norm", true, true, nan, false},
          Variant{" infinite norm", true, false, infinity, false}})
      add_step(cases, count, v);
  for (const std::int64_t count : {1, 3, 1003, 70001}) add_squares(cases, count, false);
  add_squares(cases, 1003, true);
  for (const std::int64_t count : {1, 700})
    for (const double odd : {1.5, nan, infinity}) add_carry(cases, count, odd);
  add_squares(cases, 70001, false, true);
  for (const std::int64_t count : {2, 1000, 70002}) {
    add_checksum(cases, count, DType::f32);
    add_checksum(cases, count, DType::bf16);
  }
  return cases;
}

}  // namespace weft
