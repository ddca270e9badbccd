// Cases of ops/embed.h (kernels/embed.cu beside src/ops/cpu/embed.cpp).
#include "ops/embed.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/kernels/cases.h"

namespace weft {
namespace {

using Cases = std::vector<KernelCase>;
using Tensors = std::vector<Tensor>;

constexpr double f32_tolerance =
    1e-6;  // copies and single additions: the same bits, but for contraction
constexpr double bf16_tolerance = 1.0 / 256;  // one rounding that may fall the other way
constexpr double table_tolerance = 4e-6;      // sines of angles that differ in the last place

double tolerance(DType t) { return t == DType::f32 ? f32_tolerance : bf16_tolerance; }

double width(DType t) { return static_cast<double>(size_of(t)); }

// A copy of `t` in host memory at an address that is 4 bytes past a multiple of 16, as slices of a batch may be: it is
// bytes of the device that matter, so the case slices it off again there.
Tensor behind_one(const Tensor& t) {
  Tensor longer = Tensor::host({t.numel() + 1}, t.dtype());
  std::copy_n(t.data<float>(), t.numel(), longer.data<float>() + 1);
  return longer;
}

Tensor integers(const std::vector<std::int32_t>& values) {
  Tensor t = Tensor::host({static_cast<std::int64_t>(values.size())}, DType::i32);
  t.set(std::span<const std::int32_t>(values));
  return t;
}

KernelCase make(const char* op, std::string shape, DType dtype, double bytes, double allowed) {
  KernelCase c;
  c.op = op;
  c.shape = std::move(shape);
  c.dtype = dtype;
  c.bytes = bytes;
  c.tolerance = allowed;
  return c;
}

// Patches of x [B,C,T,H,W], both ways and both orders of a row's elements.
void add_patches(Cases& cases, const Shape& x, ops::PatchGeometry p, DType dtype) {
  const auto patches = [](std::int64_t size, int patch) { return (size + patch - 1) / patch; };
  const Shape rows{x[0], patches(x[2], p.pt), patches(x[3], p.ph) * patches(x[4], p.pw),
                   x[1] * p.pt * p.ph * p.pw};
  const std::string shape = fmt::format("x {} patch {}x{}x{}", x.str(), p.pt, p.ph, p.pw);
  const double bytes =
      4.0 * static_cast<double>(x.numel()) + width(dtype) * static_cast<double>(rows.numel());
  const auto to_rows = [&](const char* op, const auto& call) {
    KernelCase c = make(op, shape, dtype, bytes, tolerance(dtype));
    c.inputs = {random_tensor(x, DType::f32, 1)};
    c.run = [=](Tensors& in) {
      Tensor out = Tensor::empty(rows, dtype);
      call(in[0], p, out);
      return Tensors{out};
    };
    cases.push_back(std::move(c));
  };
  const auto to_pixels = [&](const char* op, const auto& call) {
    KernelCase c = make(op, shape, dtype, bytes, tolerance(dtype));
    c.inputs = {random_tensor(rows, dtype, 2)};
    c.run = [=](Tensors& in) {
      Tensor out = Tensor::empty(x, DType::f32);
      call(in[0], p, out);
      return Tensors{out};
    };
    cases.push_back(std::move(c));
  };
  to_rows("patchify_forward", ops::patchify_forward);
  to_pixels("patchify_backward", ops::patchify_backward);
  to_pixels("unpatchify_forward", ops::unpatchify_forward);
  to_rows("unpatchify_backward", ops::unpatchify_backward);
}

void add_positions(Cases& cases, int H, int W, std::int64_t C, double scale) {
  KernelCase c = make("position_embedding", fmt::format("S {}x{} C{}", H, W, C), DType::f32,
                      4.0 * H * W * static_cast<double>(C), table_tolerance);
  c.run = [=](Tensors&) {
    Tensor p = Tensor::empty({std::int64_t{H} * W, C}, DType::f32);
    ops::position_embedding(H, W, scale, p);
    return Tensors{p};
  };
  cases.push_back(std::move(c));
}

void add_add_position(Cases& cases, const Shape& x, DType dtype) {
  KernelCase c = make(
      "add_position", "x " + x.str(), dtype,
      2 * width(dtype) * static_cast<double>(x.numel()) + 4.0 * static_cast<double>(x[2] * x[3]),
      tolerance(dtype));
  c.inputs = {random_tensor({x[2], x[3]}, DType::f32, 1), random_tensor(x, dtype, 2)};
  c.run = [](Tensors& in) {
    ops::add_position(in[0], in[1]);
    return Tensors{in[1]};
  };
  cases.push_back(std::move(c));
}

void add_tables(Cases& cases, std::int64_t G, std::int64_t half, std::int64_t positions,
                std::int64_t D) {
  KernelCase t = make("timestep_embedding", fmt::format("N{} 2x{}", G, half), DType::f32,
                      8.0 * static_cast<double>(G * half), table_tolerance);
  t.inputs = {random_tensor({G}, DType::f32, 1, 250.0f, 500.0f)};
  t.run = [=](Tensors& in) {
    Tensor e = Tensor::empty({G, 2 * half}, DType::f32);
    ops::timestep_embedding(in[0], e);
    return Tensors{e};
  };
  cases.push_back(std::move(t));

  KernelCase r = make("rope_table", fmt::format("T{} D{}", positions, D), DType::f32,
                      4.0 * static_cast<double>(positions * D), table_tolerance);
  r.inputs = {random_tensor({D / 2}, DType::f32, 2, 0.3f, 0.5f)};
  r.run = [=](Tensors& in) {
    Tensor rope = Tensor::empty({positions, D / 2, 2}, DType::f32);
    ops::rope_table(in[0], rope);
    return Tensors{rope};
  };
  cases.push_back(std::move(r));

  KernelCase a = make("add_rows", fmt::format("G{} C{}", G, 9 * half), DType::f32,
                      12.0 * static_cast<double>(G * 9 * half), f32_tolerance);
  a.inputs = {random_tensor({G, 9 * half}, DType::f32, 3),
              random_tensor({G, 9 * half}, DType::f32, 4)};
  a.run = [](Tensors& in) {
    Tensor y = Tensor::empty(in[0].shape(), DType::f32);
    ops::add_rows(in[0], in[1], y);
    return Tensors{y};
  };
  cases.push_back(std::move(a));
}

void add_modulation_rows(Cases& cases, std::int64_t B, std::int64_t T, bool masked) {
  KernelCase c = make("modulation_rows", fmt::format("B{} T{}{}", B, T, masked ? " mask" : ""),
                      DType::f32, static_cast<double>(24 * B + 9 * B * T), 0);
  c.inputs = {random_tensor({B}, DType::f32, 1, 250.0f, 500.0f),
              random_tensor({B}, DType::f32, 2, 4.0f, 24.0f)};
  if (masked) {
    Tensor mask = Tensor::host({B, T}, DType::u8);
    for (std::int64_t i = 0; i < B * T; ++i)
      mask.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i % 3 != 0);
    c.inputs.push_back(mask);
  }
  c.run = [=](Tensors& in) {
    const std::int64_t G = masked ? 2 * B : B;
    Tensor times = Tensor::empty({G}, DType::f32), rates = Tensor::empty({G}, DType::f32);
    Tensor rows = Tensor::empty({B * T}, DType::i32), samples = Tensor::empty({B * T}, DType::i32);
    ops::modulation_rows(in[0], in[1], masked ? in[2] : Tensor(), times, rates, rows, samples);
    return Tensors{times, rates, rows, samples};
  };
  cases.push_back(std::move(c));
}

// The rows that a batch of captions takes: every other sample has its own, the rest the null caption; two rows pad.
std::vector<std::int32_t> caption_rows(std::int64_t B, std::int64_t L) {
  std::vector<std::int32_t> index;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t l = 0; l < (b % 2 == 0 ? L : L / 2 + 1); ++l)
      index.push_back(static_cast<std::int32_t>(b % 2 == 0 ? b * L + l : -1 - l));
  index.insert(index.end(), 2, ops::padding_row);
  return index;
}

void add_captions(Cases& cases, std::int64_t B, std::int64_t L, std::int64_t C, DType dtype,
                  bool with_y, bool misaligned) {
  std::vector<std::int32_t> index = caption_rows(B, L);
  if (!with_y)
    for (std::int32_t& i : index)
      if (i >= 0) i = static_cast<std::int32_t>(-1 - i % L);
  const auto rows = static_cast<std::int64_t>(index.size());
  const auto own = static_cast<double>(
      std::count_if(index.begin(), index.end(), [](std::int32_t i) { return i >= 0; }));
  const std::string shape = fmt::format("B{} L{} C{}{}{}", B, L, C, with_y ? "" : " null only",
                                        misaligned ? " misaligned" : "");
  KernelCase c =
      make("gather_captions", shape, dtype,
           static_cast<double>((rows - 2) * C) * 4 + static_cast<double>(rows * C) * width(dtype),
           tolerance(dtype));
  const Tensor y = random_tensor({B, L, C}, DType::f32, 1);
  c.inputs = {integers(index), random_tensor({L, C}, DType::f32, 2)};
  if (with_y) c.inputs.push_back(misaligned ? behind_one(y) : y);
  c.run = [=](Tensors& in) {
    Tensor captions;
    if (with_y) captions = misaligned ? in[2].slice(1, B * L * C + 1).view({B, L, C}) : in[2];
    Tensor out = Tensor::empty({rows, C}, dtype);
    ops::gather_captions(captions, in[1], in[0], out);
    return Tensors{out};
  };
  cases.push_back(std::move(c));
  if (!with_y) return;

  KernelCase d = make("gather_captions_backward", shape, dtype,
                      own * static_cast<double>(C) * (width(dtype) + 8), f32_tolerance);
  d.inputs = {integers(index), random_tensor({rows, C}, dtype, 3), misaligned ? behind_one(y) : y};
  d.run = [=](Tensors& in) {
    Tensor dy = misaligned ? in[2].slice(1, B * L * C + 1).view({B, L, C}) : in[2];
    ops::gather_captions_backward(in[1], in[0], dy);
    return Tensors{dy};
  };
  cases.push_back(std::move(d));
}

}  // namespace

std::vector<KernelCase> embed_cases(CaseSize size) {
  Cases cases;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (size == CaseSize::small) {
      add_patches(cases, {2, 4, 3, 6, 10}, {1, 2, 2}, dtype);
      add_patches(cases, {1, 3, 5, 7, 75}, {2, 2, 2}, dtype);  // edges on every axis, two strips
      add_patches(cases, {1, 1, 1, 1, 1}, {1, 2, 2}, dtype);
      add_patches(cases, {1, 5, 2, 3, 4}, {1, 1, 3}, dtype);  // rows of 15 elements
      add_add_position(cases, {2, 3, 6, 24}, dtype);
      add_add_position(cases, {1, 5, 3, 7}, dtype);
      add_add_position(cases, {1, 1, 1, 1152}, dtype);
      add_captions(cases, 3, 5, 40, dtype, true, false);
      add_captions(cases, 2, 3, 13, dtype, true, false);
      add_captions(cases, 2, 3, 16, dtype, true, true);
      add_captions(cases, 1, 4, 24, dtype, false, false);
    } else {
      add_patches(cases, {2, 4, 15, 60, 106}, {1, 2, 2}, dtype);
      add_patches(cases, {8, 4, 4, 32, 32}, {1, 2, 2}, dtype);
      add_add_position(cases, {2, 15, 1590, 1152}, dtype);
      add_add_position(cases, {8, 4, 256, 1152}, dtype);
      add_captions(cases, 2, 300, 4096, dtype, true, false);
    }
  }
  if (size == CaseSize::small) {
    add_positions(cases, 2, 3, 8, 2.0 / 3.0);
    add_positions(cases, 5, 7, 1152, 1.3);
    add_positions(cases, 1, 1, 4, 1.0);
    add_tables(cases, 3, 128, 5, 72);
    add_tables(cases, 1, 1, 1, 2);
    add_modulation_rows(cases, 3, 5, true);
    add_modulation_rows(cases, 1, 1, false);
    add_modulation_rows(cases, 200, 2, true);  // more rows than a block has threads
  } else {
    add_positions(cases, 30, 53, 1152, 1.25);
    add_tables(cases, 8, 128, 15, 72);
    add_modulation_rows(cases, 8, 15, true);
  }
  return cases;
}

}  // namespace weft
