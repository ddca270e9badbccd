// Cases of ops/pointwise.h (kernels/pointwise.cu beside src/ops/cpu/pointwise.cpp).
#include <fmt/format.h>

#include "bench/kernels/cases.h"
#include "ops/layout.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

struct Size {
  std::int64_t count;
  bool shifted = false;    // every tensor starts one element further: no wide access fits
  float deviation = 1.0f;  // large: where exponentials leave f32's range
};

// `moved` counts bytes an element.
KernelCase make(const char* op, const Size& s, DType dtype, const char* variant, double moved) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("N{}{}{}{}", s.count, s.shifted ? " shifted" : "",
                        s.deviation > 1 ? " extreme" : "", variant);
  c.dtype = dtype;
  c.bytes = moved * static_cast<double>(s.count);
  // bf16: one unit of the last place of the largest value.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 2e-6;
  return c;
}

// A tensor of one element more than the case, if it is a shifted one.
Tensor source(const Size& s, DType dtype, std::uint64_t seed) {
  return random_tensor({s.count + (s.shifted ? 1 : 0)}, dtype, seed, s.deviation);
}
Tensor result(const Size& s, DType dtype) {
  return Tensor::empty({s.count + (s.shifted ? 1 : 0)}, dtype);
}
// The part that the operation works on.
Tensor part(const Size& s, const Tensor& t) { return s.shifted ? t.slice(1, s.count + 1) : t; }

void add_gelu(std::vector<KernelCase>& cases, const Size& s, DType dtype) {
  const auto width = static_cast<double>(size_of(dtype));
  const Tensor z = source(s, dtype, 1), dy = source(s, dtype, 2);
  auto forward = make("gelu_forward", s, dtype, "", 2 * width);
  forward.inputs = {z};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, dtype));
    ops::gelu_forward(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(forward));
  // As the MLP calls it (gradient over gradient, activation over its argument), and without the activation.
  for (const bool again : {true, false}) {
    auto c = make("gelu_backward", s, dtype, again ? " in place" : "", (again ? 4 : 3) * width);
    c.inputs = {z, dy};
    c.run = [=](std::vector<Tensor>& in) {
      const Tensor at = part(s, in[0]), gradient = part(s, in[1]);
      Tensor dz = again ? gradient : part(s, result(s, dtype)), y = again ? at : Tensor();
      ops::gelu_backward(at, gradient, dz, y);
      return again ? std::vector<Tensor>{dz, y} : std::vector<Tensor>{dz};
    };
    cases.push_back(std::move(c));
  }
}

void add_silu(std::vector<KernelCase>& cases, const Size& s) {
  const Tensor z = source(s, DType::f32, 1), dy = source(s, DType::f32, 2);
  auto forward = make("silu_forward", s, DType::f32, "", 8);
  forward.inputs = {z};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, DType::f32));
    ops::silu_forward(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(forward));
  for (const bool accumulate : {false, true}) {
    auto c =
        make("silu_backward", s, DType::f32, accumulate ? " accumulate" : "", accumulate ? 16 : 12);
    c.inputs = {z, dy, source(s, DType::f32, 3)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor dz = part(s, accumulate ? in[2] : result(s, DType::f32));
      ops::silu_backward(part(s, in[0]), part(s, in[1]), dz, accumulate);
      return std::vector<Tensor>{dz};
    };
    cases.push_back(std::move(c));
  }
}

void add_moves(std::vector<KernelCase>& cases, const Size& s, DType dtype) {
  const auto width = static_cast<double>(size_of(dtype));
  auto add = make("add_inplace", s, dtype, "", 3 * width);
  add.inputs = {source(s, dtype, 1), source(s, dtype, 2)};
  add.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, in[1]);
    ops::add_inplace(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(add));
  auto zero = make("fill_zero", s, dtype, "", width);
  zero.tolerance = 0;
  zero.inputs = {source(s, dtype, 1)};
  zero.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, in[0]);
    ops::fill_zero(y);
    return std::vector<Tensor>{in[0]};  // with the element before it, which must stay
  };
  cases.push_back(std::move(zero));
  for (const DType to : {DType::f32, DType::bf16}) {
    auto c = make("convert", s, dtype, to == DType::f32 ? " to f32" : " to bf16",
                  width + static_cast<double>(size_of(to)));
    c.tolerance = 0;  // both sides round to nearest even
    c.inputs = {source(s, dtype, 1)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = part(s, result(s, to));
      ops::convert(part(s, in[0]), y);
      return std::vector<Tensor>{y};
    };
    cases.push_back(std::move(c));
  }
}

// Stored latents: f16 to f32, subnormal numbers among them.
void add_widening(std::vector<KernelCase>& cases, const Size& s) {
  auto c = make("convert", s, DType::f16, " to f32", 6);
  c.tolerance = 0;
  const Tensor values = source(s, DType::f32, 1);
  Tensor half = Tensor::host(values.shape(), DType::f16);
  for (std::int64_t i = 0; i < values.numel(); ++i)
    half.data<f16>()[i] = f16(values.data<float>()[i] * (i % 8 == 0 ? 0x1p-20f : 1.0f));
  c.inputs = {half};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, DType::f32));
    ops::convert(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(c));
}

// A block of x [B,T,S,C] that lands at another place of y [B,T',S',C]; the rest of y must stay.
void add_copy(std::vector<KernelCase>& cases, const Shape& from, const Shape& to,
              ops::TokenBlock block, DType dtype) {
  KernelCase c;
  c.op = "copy_tokens";
  c.shape = fmt::format("T{} S{} of {} to {}", block.frames, block.tokens, from.str(), to.str());
  c.dtype = dtype;
  c.bytes = 2.0 * static_cast<double>(size_of(dtype)) *
            static_cast<double>(from[0] * block.frames * block.tokens * from[3]);
  c.tolerance = 0;
  c.inputs = {random_tensor(from, dtype, 1), random_tensor(to, dtype, 2)};
  c.run = [=](std::vector<Tensor>& in) {
    ops::copy_tokens(in[0], block, in[1]);
    return std::vector<Tensor>{in[1]};
  };
  cases.push_back(std::move(c));
}

}  // namespace

std::vector<KernelCase> pointwise_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    // The MLP's hidden layer and the residual stream of one sample at 51 frames 480p.
    const std::int64_t tokens = 15 * 1590;
    add_gelu(cases, {tokens * 4608}, DType::bf16);
    add_gelu(cases, {tokens * 1152}, DType::f32);
    add_silu(cases, {1 << 22});
    for (const DType dtype : {DType::f32, DType::bf16}) add_moves(cases, {tokens * 1152}, dtype);
    add_widening(cases, {tokens * 1152});
    // What one of 8 ranks sends to another between the blocks, two samples.
    add_copy(cases, {2, 2, 1590, 1152}, {2, 2, 199, 1152}, {2, 199, 0, 398, 0, 0}, DType::bf16);
    return cases;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_copy(cases, {2, 5, 7, 3}, {2, 3, 11, 3}, {2, 4, 1, 3, 1, 6}, dtype);
    add_copy(cases, {1, 1, 9, 5}, {1, 1, 9, 5}, {1, 9, 0, 0, 0, 0}, dtype);
    add_copy(cases, {3, 2, 4, 8}, {3, 4, 4, 8}, {2, 0, 0, 1, 2, 1}, dtype);  // nothing to copy
  }
  // One element; less than an access; a rest behind whole accesses; several blocks; addresses that are not aligned;
  // arguments where exponentials overflow.
  for (const Size& s :
       {Size{1}, Size{7}, Size{1003}, Size{20005}, Size{1003, true}, Size{517, false, 1e4f}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_gelu(cases, s, dtype);
      add_moves(cases, s, dtype);
    }
    add_silu(cases, s);
    if (s.deviation == 1) add_widening(cases, s);
  }
  return cases;
}

}  // namespace weft
