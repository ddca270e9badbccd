// Cases of ops/wire.h (kernels/wire.cu beside src/ops/cpu/wire.cpp).
#include <fmt/format.h>

#include "bench/kernels/cases.h"
#include "ops/reduce.h"

namespace weft {
namespace {

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

std::vector<KernelCase> wire_cases(CaseSize size) {
  const bool small = size == CaseSize::small;
  std::vector<KernelCase> cases;
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
  return cases;
}

}  // namespace weft
