// Cases of ops/attention.h (kernels/attention/attention.cu, qk_norm.cu, flash_*.cu beside src/ops/cpu/attention.cpp). Self attention
// along few frames has its own: kernel_cases_temporal.cpp.
#include "ops/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/kernels/cases.h"

namespace weft {
namespace {

using Cases = std::vector<KernelCase>;
using Tensors = std::vector<Tensor>;

// f32: sums of some thousand products in another order, and another exponential. bf16: probabilities, their gradient and
// the normalised q and k are rounded to 8 bits where the CPU side keeps 24, and so is every result: a few 2^-8 of the
// largest element, more where several such factors meet in a gradient.
// Large scores move the exponential in f32 by as much as they are large; in bf16 that is lost among the rest.
double tolerance_of(DType dtype, bool backward, float deviation) {
  if (dtype == DType::f32) return (backward ? 1e-5 : 5e-6) * std::max(1.0f, deviation * deviation);
  return (backward ? 6.0 : 4.0) / 256;
}

struct Self {
  std::int64_t B, T, S, H, D;
  ops::Axis axis = ops::Axis::space;
  bool norm = true, rope = false;
  float deviation = 1.0f;
};

// f32 [positions, D/2, 2] = (cos, sin), frequencies as rotary embeddings have them.
Tensor rotary_table(std::int64_t positions, std::int64_t D) {
  Tensor t = Tensor::host({positions, D / 2, 2}, DType::f32);
  float* at = t.data<float>();
  for (std::int64_t p = 0; p < positions; ++p)
    for (std::int64_t i = 0; i < D / 2; ++i) {
      const double angle =
          static_cast<double>(p) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(D));
      *at++ = static_cast<float>(std::cos(angle));
      *at++ = static_cast<float>(std::sin(angle));
    }
  return t;
}

// A tensor that may be missing: its place among a case's inputs, or -1.
Tensor at(const Tensors& in, int place) {
  return place < 0 ? Tensor() : in[static_cast<std::size_t>(place)];
}

void add_self(Cases& cases, const Self& a, DType dtype) {
  const std::int64_t C = a.H * a.D;
  const bool space = a.axis == ops::Axis::space;
  const std::int64_t length = space ? a.S : a.T, sequences = space ? a.B * a.T : a.B * a.S;
  const Shape out_shape{a.B, a.T, a.S, C}, lse_shape{sequences, a.H, length};
  const auto tokens = static_cast<double>(a.B * a.T * a.S);
  const auto element = static_cast<double>(size_of(dtype));
  const double products =
      2.0 * tokens * static_cast<double>(length * C);  // one of the matrix products
  const double statistics = 4.0 * tokens * static_cast<double>(a.H);

  KernelCase f;
  f.op = "self_attention_forward";
  f.shape =
      fmt::format("B{} T{} S{} H{} D{} along {}{}{}{}", a.B, a.T, a.S, a.H, a.D, space ? "S" : "T",
                  a.norm ? " norm" : "", a.rope ? " rope" : "", a.deviation > 1.0f ? " large" : "");
  f.dtype = dtype;
  f.inputs = {random_tensor({a.B, a.T, a.S, 3, a.H, a.D}, dtype, 1, a.deviation)};
  const auto add = [](Tensors& to, Tensor t) {
    to.push_back(std::move(t));
    return static_cast<int>(to.size()) - 1;
  };
  const int wq = a.norm ? add(f.inputs, random_tensor({a.D}, DType::f32, 2, 0.3f, 1.0f)) : -1;
  const int wk = a.norm ? add(f.inputs, random_tensor({a.D}, DType::f32, 3, 0.3f, 1.0f)) : -1;
  const int rope = a.rope ? add(f.inputs, rotary_table(length, a.D)) : -1;
  f.run = [=](Tensors& in) {
    Tensor out = Tensor::empty(out_shape, dtype), lse = Tensor::empty(lse_shape, DType::f32);
    ops::self_attention_forward(in[0], at(in, wq), at(in, wk), at(in, rope), a.axis, out, lse);
    return Tensors{out, lse};
  };
  f.bytes = 4 * element * tokens * static_cast<double>(C) + statistics;
  f.flops = 2 * products;
  // Along T a head has too few rows to keep the tensor cores busy.
  f.bound = space && length >= 256 ? Bound::tensor_cores : Bound::bandwidth;
  f.tolerance = tolerance_of(dtype, false, a.deviation);

  KernelCase b = f;
  b.op = "self_attention_backward";
  Tensor out = Tensor::host(out_shape, dtype), lse = Tensor::host(lse_shape, DType::f32);
  ops::self_attention_forward(f.inputs[0], at(f.inputs, wq), at(f.inputs, wk), at(f.inputs, rope),
                              a.axis, out, lse);
  const int first = add(b.inputs, out);
  add(b.inputs, lse);
  add(b.inputs, random_tensor(out_shape, dtype, 4));
  const int dwq = a.norm ? add(b.inputs, random_tensor({a.D}, DType::f32, 5)) : -1;
  const int dwk = a.norm ? add(b.inputs, random_tensor({a.D}, DType::f32, 6)) : -1;
  b.run = [=](Tensors& in) {
    Tensor dqkv = Tensor::empty(in[0].shape(), dtype), q = at(in, dwq), k = at(in, dwk);
    ops::self_attention_backward(in[0], at(in, wq), at(in, wk), at(in, rope), a.axis, at(in, first),
                                 at(in, first + 1), at(in, first + 2), dqkv, q, k);
    return a.norm ? Tensors{dqkv, q, k} : Tensors{dqkv};
  };
  b.bytes = 8 * element * tokens * static_cast<double>(C) + statistics;
  b.flops = 5 * products;
  b.tolerance = tolerance_of(dtype, true, a.deviation);
  cases.push_back(std::move(f));
  cases.push_back(std::move(b));
}

// Captions of `lengths` tokens, then `padding` rows that belong to nobody.
void add_cross(Cases& cases, std::int64_t N, std::int64_t H, std::int64_t D,
               const std::vector<std::int32_t>& lengths, std::int64_t padding, DType dtype,
               float deviation = 1.0f) {
  const auto B = static_cast<std::int64_t>(lengths.size());
  const std::int64_t C = H * D;
  Tensor offsets = Tensor::host({B + 1}, DType::i32);
  std::int32_t total = 0, longest = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    offsets.data<std::int32_t>()[b] = total;
    total += lengths[static_cast<std::size_t>(b)];
    longest = std::max(longest, lengths[static_cast<std::size_t>(b)]);
  }
  offsets.data<std::int32_t>()[B] = total;
  const std::int64_t rows = total + padding;
  const Shape q_shape{B, N, C}, kv_shape{rows, 2, H, D}, lse_shape{B, H, N};
  const auto element = static_cast<double>(size_of(dtype));
  const double queries = element * static_cast<double>(B * N * C);
  const double keys = element * static_cast<double>(2 * rows * C);
  const double products = 2.0 * static_cast<double>(N * total * C);
  const double statistics = 4.0 * static_cast<double>(B * H * N);

  KernelCase f;
  f.op = "cross_attention_forward";
  f.shape = fmt::format("B{} N{} H{} D{} captions {} padding {}{}", B, N, H, D, total, padding,
                        deviation > 1.0f ? " large" : "");
  f.dtype = dtype;
  f.inputs = {random_tensor(q_shape, dtype, 1, deviation),
              random_tensor(kv_shape, dtype, 2, deviation), offsets};
  // Nobody may read the padding.
  std::memset(static_cast<std::byte*>(f.inputs[1].raw()) +
                  static_cast<std::size_t>(total * 2 * C) * size_of(dtype),
              0xff, static_cast<std::size_t>(padding * 2 * C) * size_of(dtype));
  f.run = [=](Tensors& in) {
    Tensor out = Tensor::empty(q_shape, dtype), lse = Tensor::empty(lse_shape, DType::f32);
    ops::cross_attention_forward(in[0], in[1], in[2], static_cast<int>(H), out, lse);
    return Tensors{out, lse};
  };
  f.bytes = 2 * queries + keys + statistics;
  f.flops = 2 * products;
  f.bound = longest >= 256 ? Bound::tensor_cores : Bound::bandwidth;
  f.tolerance = tolerance_of(dtype, false, deviation);

  KernelCase b = f;
  b.op = "cross_attention_backward";
  Tensor out = Tensor::host(q_shape, dtype), lse = Tensor::host(lse_shape, DType::f32);
  ops::cross_attention_forward(f.inputs[0], f.inputs[1], offsets, static_cast<int>(H), out, lse);
  b.inputs.insert(b.inputs.end(), {out, lse, random_tensor(q_shape, dtype, 3)});
  b.run = [=](Tensors& in) {
    Tensor dq = Tensor::empty(q_shape, dtype), dkv = Tensor::empty(kv_shape, dtype);
    ops::cross_attention_backward(in[0], in[1], in[2], static_cast<int>(H), in[3], in[4], in[5], dq,
                                  dkv);
    return Tensors{dq, dkv};
  };
  b.bytes = 4 * queries + 2 * keys + statistics;
  b.flops = 5 * products;
  b.tolerance = tolerance_of(dtype, true, deviation);
  cases.push_back(std::move(f));
  cases.push_back(std::move(b));
}

void add_small(Cases& cases, DType dtype) {
  using ops::Axis;
  // Every head size of the instances and some between them; lengths below, at and beyond the tiles of 32, 64 and 128.
  for (const Self& a : std::vector<Self>{{1, 1, 1, 1, 8},
                                         {1, 2, 67, 2, 72},
                                         {1, 1, 131, 1, 72, Axis::space, false},
                                         {1, 1, 64, 2, 64},
                                         {1, 1, 97, 1, 128, Axis::space, true, true},
                                         {2, 1, 33, 2, 16, Axis::space, true, true},
                                         {1, 2, 40, 1, 24},
                                         {1, 1, 35, 1, 6},
                                         {1, 1, 39, 1, 70, Axis::space, true, true},
                                         {1, 1, 70, 1, 72, Axis::space, false, false, 8.0f}})
    add_self(cases, a, dtype);
  // Many tiles of keys; more tiles of queries than multiprocessors, for kernels whose blocks stay.
  add_self(cases, {1, 1, 400, 1, 72}, dtype);
  add_self(cases, {2, 20, 5, 4, 72}, dtype);
  // More frames than temporal.cu takes; its own cases are in kernel_cases_temporal.cpp.
  add_self(cases, {1, 131, 2, 1, 72, Axis::time, true, true}, dtype);
  add_cross(cases, 21, 2, 8, {5, 0, 33}, 2, dtype);
  add_cross(cases, 70, 2, 72, {1, 65}, 0, dtype);
  add_cross(cases, 1, 1, 64, {7}, 61, dtype);
  add_cross(cases, 33, 1, 128, {0, 40, 3}, 1, dtype);
  add_cross(cases, 20, 1, 10, {12, 4}, 3, dtype);
  add_cross(cases, 70, 1, 72, {80, 9}, 3, dtype, 8.0f);
  // Enough queries that the key side shares them out over two blocks.
  add_cross(cases, 600, 1, 8, {11, 2}, 1, dtype);
}

void add_real(Cases& cases) {
  using ops::Axis;
  const DType dtype = DType::bf16;
  add_self(cases, {1, 15, 1590, 16, 72}, dtype);
  add_self(cases, {8, 4, 256, 16, 72}, dtype);
  // The kernels without the norm, at the head sizes that others publish.
  for (const std::int64_t D : {64, 72, 128})
    add_self(cases, {1, 9, 1590, 16, D, Axis::space, false}, dtype);
  add_self(cases, {1, 4, 256, 16, 72}, DType::f32);
  add_cross(cases, 23850, 16, 72, {300}, 0, dtype);
  add_cross(cases, 1024, 16, 72, {300, 120, 57, 300, 0, 211, 90, 16}, 10, dtype);
  add_cross(cases, 1024, 16, 72, {300}, 0, DType::f32);
}

}  // namespace

std::vector<KernelCase> attention_cases(CaseSize size) {
  Cases cases;
  if (size == CaseSize::real) {
    add_real(cases);
    return cases;
  }
  add_small(cases, DType::f32);
  add_small(cases, DType::bf16);
  return cases;
}

}  // namespace weft
