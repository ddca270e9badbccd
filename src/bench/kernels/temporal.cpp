// Cases of self attention along T (kernels/attention/temporal.cu and temporal_mma.cu beside src/ops/cpu/attention.cpp).
#include <fmt/format.h>

#include <cmath>

#include "bench/kernels/cases.h"
#include "ops/attention.h"

namespace weft {
namespace {

struct Size {
  std::int64_t B, T, S, H, D;
  bool norm = true, rope = true;
  // Of q, k and v. Without norm, 12 makes scores of some hundreds, far beyond exp's range; without rotation q' and k' are
  // q and k, so that bf16 rounds nothing that such scores would make large.
  float spread = 1;

  Shape qkv() const { return {B, T, S, 3, H, D}; }
  Shape out() const { return {B, T, S, H * D}; }
  Shape lse() const { return {B * S, H, T}; }
};

// cos and sin of position * 10000^(-2i/D), made on the CPU whatever the rank's device.
Tensor rope_of(const Size& s) {
  Tensor rope = Tensor::host({s.T, s.D / 2, 2}, DType::f32);
  for (std::int64_t t = 0; t < s.T; ++t)
    for (std::int64_t i = 0; i < s.D / 2; ++i) {
      const double angle =
          static_cast<double>(t) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(s.D));
      float* at = rope.data<float>() + (t * (s.D / 2) + i) * 2;
      at[0] = static_cast<float>(std::cos(angle));
      at[1] = static_cast<float>(std::sin(angle));
    }
  return rope;
}

KernelCase make(const char* op, const Size& s, DType dtype) {
  KernelCase c;
  c.op = op;
  c.shape =
      fmt::format("time B{} T{} S{} H{} D{}{}{}{}", s.B, s.T, s.S, s.H, s.D,
                  s.norm ? "" : " no norm", s.rope ? "" : " no rope", s.spread > 1 ? " large" : "");
  c.dtype = dtype;
  c.bound = Bound::bandwidth;
  // q, k, v, and without weights an empty place each.
  c.inputs = {random_tensor(s.qkv(), dtype, 1, s.spread),
              s.norm ? random_tensor({s.D}, DType::f32, 2, 0.5f, 1.0f) : Tensor(),
              s.norm ? random_tensor({s.D}, DType::f32, 3, 0.5f, 1.0f) : Tensor(),
              s.rope ? rope_of(s) : Tensor()};
  // bf16: the probabilities, q' and k' are rounded to 2^-9 each, and so is the result.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 64 : s.spread > 1 ? 2e-4 : 2e-5;
  return c;
}

double elements(const Size& s) { return static_cast<double>(s.B * s.T * s.S * s.H * s.D); }

void add_forward(std::vector<KernelCase>& cases, const Size& s, DType dtype) {
  auto c = make("self_attention_forward", s, dtype);
  c.bytes = 4 * elements(s) * static_cast<double>(size_of(dtype)) +
            4.0 * static_cast<double>(s.lse().numel());
  c.flops = 4 * elements(s) * static_cast<double>(s.T);
  c.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(s.out(), dtype), lse = Tensor::empty(s.lse(), DType::f32);
    ops::self_attention_forward(in[0], in[1], in[2], in[3], ops::Axis::time, out, lse);
    return std::vector<Tensor>{out, lse};
  };
  cases.push_back(std::move(c));
}

void add_backward(std::vector<KernelCase>& cases, const Size& s, DType dtype) {
  auto c = make("self_attention_backward", s, dtype);
  c.bytes = 8 * elements(s) * static_cast<double>(size_of(dtype)) +
            4.0 * static_cast<double>(s.lse().numel());
  c.flops = 10 * elements(s) * static_cast<double>(s.T);
  // `out` and `lse` as the CPU side's forward gives them, so that both sides start from the same.
  Tensor out = Tensor::host(s.out(), dtype), lse = Tensor::host(s.lse(), DType::f32);
  ops::self_attention_forward(c.inputs[0], c.inputs[1], c.inputs[2], c.inputs[3], ops::Axis::time,
                              out, lse);
  c.inputs.insert(c.inputs.end(), {out, lse, random_tensor(s.out(), dtype, 4)});
  if (s.norm) {
    c.inputs.push_back(random_tensor({s.D}, DType::f32, 5));
    c.inputs.push_back(random_tensor({s.D}, DType::f32, 6));
  }
  if (dtype == DType::bf16) c.tolerance = 1.0 / 32;  // dP - delta cancels
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dqkv = Tensor::empty(s.qkv(), dtype);
    Tensor dwq = s.norm ? in[7] : Tensor(), dwk = s.norm ? in[8] : Tensor();
    ops::self_attention_backward(in[0], in[1], in[2], in[3], ops::Axis::time, in[4], in[5], in[6],
                                 dqkv, dwq, dwk);
    std::vector<Tensor> result{dqkv};
    if (s.norm) result.insert(result.end(), {dwq, dwk});
    return result;
  };
  cases.push_back(std::move(c));
}

}  // namespace

std::vector<KernelCase> temporal_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  const auto add = [&](const Size& s, DType dtype) {
    add_forward(cases, s, dtype);
    add_backward(cases, s, dtype);
  };
  if (size == CaseSize::real) {
    for (const Size& s : {Size{1, 15, 1590, 16, 72}, Size{1, 4, 256, 16, 72},
                          Size{1, 30, 1590, 16, 72}, Size{2, 5, 3600, 16, 72}})
      add(s, DType::bf16);
    add({1, 15, 1590, 16, 72}, DType::f32);
    return cases;
  }
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Size& s :
         {Size{1, 1, 3, 2, 72, false, true, 3.0f}, Size{2, 1, 11, 3, 72}, Size{2, 15, 3, 4, 72},
          Size{1, 16, 2, 2, 64}, Size{1, 4, 5, 3, 72}, Size{1, 30, 2, 4, 72},
          Size{1, 17, 1, 2, 128, true, false}, Size{1, 33, 1, 2, 72, false}, Size{1, 100, 1, 2, 64},
          Size{1, 128, 1, 1, 72}, Size{1, 128, 1, 1, 128}, Size{1, 7, 3, 2, 8},
          Size{2, 9, 2, 3, 10, false, false}, Size{1, 15, 2, 4, 64, false, false, 12.0f},
          Size{1, 40, 1, 1, 16, false, false, 12.0f}})
      add(s, dtype);
  return cases;
}

}  // namespace weft
