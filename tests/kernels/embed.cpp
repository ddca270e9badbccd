// Cases of ops/layout.h (kernels/embed.cu beside src/ops/cpu/embed.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/layout.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using Tensors = std::vector<Tensor>;

constexpr double f32_tolerance =
    1e-6;  // copies and single additions: the same bits, but for contraction
constexpr double bf16_tolerance = 1.0 / 256;  // one rounding that may fall the other way
constexpr double table_tolerance = 4e-6;      // sines of angles that differ in the last place

double tolerance(DType t) { return t == DType::f32 ? f32_tolerance : bf16_tolerance; }

double width(DType t) { return static_cast<double>(size_of(t)); }

// A copy of `t` in host memory at an address that is 4 bytes past a multiple of 16, as slices of a
// batch may be: it is bytes of the device that matter, so the case slices it off again there.
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

void add_positions(Cases& cases, int H, int W, std::int64_t C, double scale) {
  KernelCase c = make_case("position_embedding", fmt::format("S {}x{} C{}", H, W, C), DType::f32,
                           4.0 * H * W * static_cast<double>(C), table_tolerance);
  c.run = [=](Tensors&) {
    Tensor p = Tensor::empty({std::int64_t{H} * W, C}, DType::f32);
    ops::position_embedding(H, W, scale, p);
    return Tensors{p};
  };
  cases.push_back(std::move(c));
}

void add_add_position(Cases& cases, const Shape& x, DType dtype) {
  KernelCase c = make_case(
      "add_position", "x " + x.str(), dtype,
      2 * width(dtype) * static_cast<double>(x.numel()) + 4.0 * static_cast<double>(x[2] * x[3]),
      tolerance(dtype));
  c.inputs = {random_tensor({x[2], x[3]}, DType::f32, 1), random_tensor(x, dtype, 2)};
  c.run = [](Tensors& in) {
    ops::add_position(in[0], in[1]);
    return Tensors{in[1]};
  };
  c.reference = [](const std::vector<Values>& in) {
    Values y = in[1];
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += in[0][i % in[0].size()];
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

void add_tables(Cases& cases, std::int64_t G, std::int64_t half, std::int64_t positions,
                std::int64_t D) {
  KernelCase t = make_case("timestep_embedding", fmt::format("N{} 2x{}", G, half), DType::f32,
                           8.0 * static_cast<double>(G * half), table_tolerance);
  t.inputs = {random_tensor({G}, DType::f32, 1, 250.0f, 500.0f)};
  t.run = [=](Tensors& in) {
    Tensor e = Tensor::empty({G, 2 * half}, DType::f32);
    ops::timestep_embedding(in[0], e);
    return Tensors{e};
  };
  cases.push_back(std::move(t));

  KernelCase r = make_case("rope_table", fmt::format("T{} D{}", positions, D), DType::f32,
                           4.0 * static_cast<double>(positions * D), table_tolerance);
  r.inputs = {random_tensor({D / 2}, DType::f32, 2, 0.3f, 0.5f)};
  r.run = [=](Tensors& in) {
    Tensor rope = Tensor::empty({positions, D / 2, 2}, DType::f32);
    ops::rope_table(in[0], rope);
    return Tensors{rope};
  };
  cases.push_back(std::move(r));
}

// `count` tokens from `first` on.
void add_rope_3d(Cases& cases, int rows, int columns, std::int64_t first, std::int64_t count,
                 std::int64_t D) {
  KernelCase c =
      make_case("rope_table_3d", fmt::format("{}x{} {}+{} D{}", rows, columns, first, count, D),
                DType::f32, 4.0 * static_cast<double>(count * D), 1e-7);
  c.run = [=](Tensors&) {
    Tensor rope = Tensor::empty({count, D / 2, 2}, DType::f32);
    ops::rope_table_3d(rows, columns, first, rope);
    return Tensors{rope};
  };
  c.reference = [=](const std::vector<Values>&) {
    Values rope;
    const std::int64_t third = D / 6;
    for (std::int64_t n = first; n < first + count; ++n) {
      const auto axis = [&](std::int64_t position, std::int64_t pairs) {
        for (std::int64_t i = 0; i < pairs; ++i) {
          const double angle =
              static_cast<double>(position) /
              std::pow(10000.0, static_cast<double>(i) / static_cast<double>(pairs));
          rope.insert(rope.end(), {std::cos(angle), std::sin(angle)});
        }
      };
      axis(n / (rows * columns), D / 2 - 2 * third);
      axis(n / columns % rows, third);
      axis(n % columns, third);
    }
    return std::vector<Values>{rope};
  };
  cases.push_back(std::move(c));
}

// The rows that a batch of captions takes: every other sample has its own, the rest the null
// caption; two rows pad.
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
  KernelCase c = make_case(
      "gather_captions", shape, dtype,
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

  KernelCase d = make_case("gather_captions_backward", shape, dtype,
                           own * static_cast<double>(C) * (width(dtype) + 8), f32_tolerance);
  d.inputs = {integers(index), random_tensor({rows, C}, dtype, 3), misaligned ? behind_one(y) : y};
  d.run = [=](Tensors& in) {
    Tensor dy = misaligned ? in[2].slice(1, B * L * C + 1).view({B, L, C}) : in[2];
    ops::gather_captions_backward(in[1], in[0], dy);
    return Tensors{dy};
  };
  cases.push_back(std::move(d));
}

void add_embedding(Cases& cases, std::int64_t M, std::int64_t C, DType dtype) {
  const std::int64_t vocabulary = 97;
  Tensor ids = Tensor::host({M}, DType::i32);
  for (std::int64_t i = 0; i < M; ++i)
    ids.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 31 % vocabulary);
  KernelCase c = make_case("embedding_forward", fmt::format("M{} C{}", M, C), dtype,
                           2 * width(dtype) * static_cast<double>(M * C), 0);
  c.inputs = {ids, random_tensor({vocabulary, C}, dtype, 4)};
  c.run = [=](Tensors& in) {
    Tensor y = Tensor::empty({M, C}, dtype);
    ops::embedding_forward(in[0], in[1], y);
    return Tensors{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values y;
    for (const double id : in[0])
      y.insert(y.end(), in[1].begin() + static_cast<std::int64_t>(id) * C,
               in[1].begin() + (static_cast<std::int64_t>(id) + 1) * C);
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void embed_cases(CaseSize size, Cases& cases) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (size == CaseSize::small) {
      add_add_position(cases, {2, 3, 6, 24}, dtype);
      add_add_position(cases, {1, 5, 3, 7}, dtype);
      add_add_position(cases, {1, 1, 1, 1152}, dtype);
      add_captions(cases, 3, 5, 40, dtype, true, false);
      add_captions(cases, 2, 3, 13, dtype, true, false);
      add_captions(cases, 2, 3, 16, dtype, true, true);
      add_captions(cases, 1, 4, 24, dtype, false, false);
      add_embedding(cases, 3, 8, dtype);
      add_embedding(cases, 5, 37, dtype);
      add_embedding(cases, 2, 2056, dtype);
    } else {
      add_add_position(cases, {2, 15, 1590, 1152}, dtype);
      add_add_position(cases, {8, 4, 256, 1152}, dtype);
      add_captions(cases, 2, 300, 4096, dtype, true, false);
      add_embedding(cases, 9600, 4096, dtype);  // of T5-XXL
      add_embedding(cases, 9600, 10240, dtype);
    }
  }
  if (size == CaseSize::small) {
    add_positions(cases, 2, 3, 8, 2.0 / 3.0);
    add_positions(cases, 5, 7, 1152, 1.3);
    add_positions(cases, 1, 1, 4, 1.0);
    add_tables(cases, 3, 128, 5, 72);
    add_tables(cases, 1, 1, 1, 2);
    add_rope_3d(cases, 3, 5, 0, 30, 128);
    add_rope_3d(cases, 3, 5, 17, 21, 32);  // a rank's share, of three frames
    add_rope_3d(cases, 1, 1, 900, 2, 2);   // one pair: by the frame alone
  } else {
    add_positions(cases, 30, 53, 1152, 1.25);
    add_tables(cases, 8, 128, 15, 72);
    add_rope_3d(cases, 30, 52, 0, 21 * 30 * 52, 128);
  }
}

}  // namespace weft
