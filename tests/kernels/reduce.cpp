// Cases of ops/optimizer.h (kernels/reduce.cu beside src/ops/cpu/reduce.cpp).
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "ops/optimizer.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

void add_squares(Cases& cases, std::int64_t count, bool shifted, bool accumulate = false) {
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
  c.reference = [=](const std::vector<Values>& in) {
    double sum = accumulate ? 0.25 : 0;
    for (std::size_t i = shifted ? 1 : 0; i < in[0].size(); ++i) sum += in[0][i] * in[0][i];
    return std::vector<Values>{{sum}};
  };
  cases.push_back(std::move(c));
}

// Finite values must give 0, one that is not NaN: reported as a number, because NaN equals nothing.
void add_carry(Cases& cases, std::int64_t count, double odd) {
  KernelCase c;
  c.op = "carry_non_finite";
  c.shape = fmt::format("N{} {}", count, odd);
  c.bytes = 8.0 * static_cast<double>(count);
  c.tolerance = 0;
  c.inputs = {};
  c.run = [=](std::vector<Tensor>&) {
    std::vector<double> values(count, 0.5);
    values[count / 2] = odd;
    const Tensor of = Tensor::from_host(std::span<const double>(values), {count});
    Tensor sum = Tensor::empty({1}, DType::f64);
    const double before = 3;
    sum.set(std::span<const double>(&before, 1));
    ops::carry_non_finite(of, sum);
    const float found = std::isfinite(sum.to_host().data<double>()[0]) ? 1 : 2;
    return std::vector<Tensor>{Tensor::from_host(std::span<const float>(&found, 1), {1})};
  };
  c.reference = [=](const std::vector<Values>&) {
    return std::vector<Values>{{std::isfinite(odd) ? 1.0 : 2.0}};
  };
  cases.push_back(std::move(c));
}

void add_checksum(Cases& cases, std::int64_t count, DType dtype) {
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

void add_add_sum(Cases& cases, std::int64_t n) {
  KernelCase c = make_case("add_sum", fmt::format("N{}", n), DType::f32,
                           4.0 * static_cast<double>(n) + 16, 1e-14);
  c.inputs = {random_tensor({n}, DType::f32, 1, 1.0f, 1.0f), Tensor::host({1}, DType::f64)};
  c.inputs[1].data<double>()[0] = 0.125;
  // Both add in order, in f64.
  c.run = [](std::vector<Tensor>& in) {
    ops::add_sum(in[0], in[1]);
    return std::vector<Tensor>{in[1]};
  };
  c.reference = [](const std::vector<Values>& in) {
    double sum = in[1][0];
    for (const double v : in[0]) sum += v;
    return std::vector<Values>{{sum}};
  };
  cases.push_back(std::move(c));
}

KernelCase sum_case(std::int64_t ranks, std::int64_t count, DType dtype) {
  KernelCase c;
  c.op = "sum_parts";
  c.shape = fmt::format("R{} N{}", ranks, count);
  c.dtype = dtype;
  c.tolerance = 0;  // both sides add in the order of ranks
  c.bytes = static_cast<double>(count) *
            (static_cast<double>(ranks) * static_cast<double>(size_of(dtype)) + 4);
  c.inputs = {random_tensor({ranks, count}, dtype, 1)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor sum = Tensor::empty({count}, DType::f32);
    ops::sum_parts(in[0], sum, Stream::compute);
    return std::vector<Tensor>{sum};
  };
  return c;
}

// `shifted`: every tensor starts one element further, so that no wide access fits.
KernelCase convert_case(std::int64_t count, bool shifted, DType from, DType to) {
  KernelCase c;
  c.op = "convert_for_wire";
  c.shape = fmt::format("N{}{} to {}", count, shifted ? " shifted" : "", name_of(to));
  c.dtype = from;
  c.tolerance = 0;  // both sides round to nearest even
  c.bytes = static_cast<double>(count) * 6;
  const std::int64_t first = shifted ? 1 : 0;
  c.inputs = {random_tensor({count + first}, from, 2)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({count + first}, to).slice(first, count + first);
    ops::convert_on_stream(in[0].slice(first, count + first), y, Stream::compute);
    return std::vector<Tensor>{y};
  };
  return c;
}

}  // namespace

void reduce_cases(CaseSize size, Cases& cases) {
  const bool small = size == CaseSize::small;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::int64_t ranks : {2, 8})
      cases.push_back(sum_case(ranks, small ? 2064 : std::int64_t{1} << 20, dtype));
    if (small)
      for (const std::int64_t count : {1, 17, 515}) cases.push_back(sum_case(5, count, dtype));
  }
  for (const auto& [from, to] : {std::pair(DType::f32, DType::bf16), {DType::bf16, DType::f32}}) {
    cases.push_back(convert_case(small ? 4112 : std::int64_t{1} << 24, false, from, to));
    if (small) cases.push_back(convert_case(1027, true, from, to));
  }
  if (!small) {
    const std::int64_t count = std::int64_t{1} << 25;  // far beyond any cache
    add_squares(cases, count, false);
    add_checksum(cases, count, DType::bf16);
    add_add_sum(cases, 8);
    return;
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::int64_t count : {1, 3, 1003, 70001}) add_squares(cases, count, false);
  add_squares(cases, 1003, true);
  add_squares(cases, 70001, false, true);
  for (const std::int64_t count : {1, 700})
    for (const double odd : {1.5, nan, infinity}) add_carry(cases, count, odd);
  for (const std::int64_t count : {2, 1000, 70002}) {
    add_checksum(cases, count, DType::f32);
    add_checksum(cases, count, DType::bf16);
  }
  for (const std::int64_t n : {1, 5, 700}) add_add_sum(cases, n);
}

}  // namespace weft
