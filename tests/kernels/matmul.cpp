// Cases of ops/matmul.h (kernels/matmul/ beside src/ops/cpu/matmul/matmul.cpp).
#include <fmt/format.h>

#include <cmath>

#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Size {
  std::int64_t m, n, k;
};

// What one product must move: its operands and result once, in bytes of their types.
double product_bytes(const Size& s, DType in, DType out) {
  const double a = static_cast<double>(s.m * s.k + s.n * s.k) * static_cast<double>(size_of(in));
  return a + static_cast<double>(s.m * s.n) * static_cast<double>(size_of(out));
}

// Largest difference allowed, as a share of the largest value. f32: sums of `terms` products in
// another order. bf16: the result is rounded to 2^-9 on both sides, on one of them also the bias
// and what goes into GELU.
double tolerance(DType out, std::int64_t terms) {
  return out == DType::bf16 ? 1.0 / 64 : terms < 4096 ? 8e-6 : 3.2e-5;
}

KernelCase make(const char* op, const Size& s, const std::string& variant, DType dtype, DType out) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("M{} N{} K{}{}", s.m, s.n, s.k, variant);
  c.dtype = dtype;
  c.flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  c.bytes = product_bytes(s, dtype, out);
  c.bound = Bound::tensor_cores;
  c.tolerance = tolerance(out, s.k);
  return c;
}

// The last elements of `t`, at an address that is not a multiple of 16 bytes.
Tensor shifted(const Tensor& t, const Shape& shape) {
  const auto at = static_cast<std::size_t>(t.numel() - shape.numel()) * size_of(t.dtype());
  return Tensor::borrow(static_cast<std::byte*>(t.raw()) + at, shape, t.dtype(), t.device());
}

void add_forward(Cases& cases, const Size& s, DType dtype, bool bias, bool residual,
                 DType bias_type = DType::f32) {
  auto c = make("linear_forward", s,
                std::string(!bias                      ? ""
                            : bias_type == DType::bf16 ? " bf16 bias"
                                                       : " bias") +
                    (residual ? " residual" : ""),
                dtype, dtype);
  if (residual) c.bytes += static_cast<double>(s.m * s.n) * static_cast<double>(size_of(dtype));
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.k));
  c.inputs = {random_tensor({s.m, s.k}, dtype, 1), random_tensor({s.n, s.k}, dtype, 2, spread)};
  if (bias) c.inputs.push_back(random_tensor({s.n}, bias_type, 3));
  if (residual) c.inputs.push_back(random_tensor({s.m, s.n}, dtype, 4));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({s.m, s.n}, dtype);
    ops::linear_forward(in[0], in[1], bias ? in[2] : Tensor(), residual ? in.back() : Tensor(), y);
    return std::vector<Tensor>{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values y = fp64::product(s.m, s.n, s.k, in[0], s.k, 1, in[1], 1, s.k);
    for (std::size_t i = 0; bias && i < y.size(); ++i) y[i] += in[2][i % s.n];
    return std::vector<Values>{fp64::added(y, residual ? in.back() : Values())};
  };
  cases.push_back(std::move(c));
}

// dx = dy w: [M,K] from [M,N] and [N,K].
void add_backward_input(Cases& cases, const Size& s, DType dtype, bool accumulate) {
  auto c = make("linear_backward_input", s, accumulate ? " accumulate" : "", dtype, dtype);
  c.tolerance = tolerance(dtype, s.n);
  if (accumulate) c.bytes += static_cast<double>(s.m * s.k) * static_cast<double>(size_of(dtype));
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.n));
  c.inputs = {random_tensor({s.m, s.n}, dtype, 1), random_tensor({s.n, s.k}, dtype, 2, spread)};
  if (accumulate) c.inputs.push_back(random_tensor({s.m, s.k}, dtype, 3));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[2] : Tensor::empty({s.m, s.k}, dtype);
    ops::linear_backward_input(in[0], in[1], dx, accumulate);
    return std::vector<Tensor>{dx};
  };
  c.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::added(
        fp64::product(s.m, s.k, s.n, in[0], s.n, 1, in[1], s.k, 1), accumulate ? in[2] : Values())};
  };
  cases.push_back(std::move(c));
}

// dw = dy^T x: [N,K] f32 from [M,N] and [M,K].
void add_backward_weight(Cases& cases, const Size& s, DType dtype, bool bias, bool accumulate) {
  auto c =
      make("linear_backward_weight", s,
           std::string(bias ? " bias" : "") + (accumulate ? " accumulate" : ""), dtype, DType::f32);
  c.tolerance = tolerance(DType::f32, s.m);
  c.bytes = static_cast<double>(s.m * (s.n + s.k)) * static_cast<double>(size_of(dtype)) +
            static_cast<double>(s.n * s.k) * (accumulate ? 8.0 : 4.0);
  c.inputs = {random_tensor({s.m, s.n}, dtype, 1), random_tensor({s.m, s.k}, dtype, 2)};
  if (accumulate) {
    c.inputs.push_back(random_tensor({s.n, s.k}, DType::f32, 3));
    if (bias) c.inputs.push_back(random_tensor({s.n}, DType::f32, 4));
  }
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dw = accumulate ? in[2] : Tensor::empty({s.n, s.k}, DType::f32);
    Tensor db;
    if (bias) db = accumulate ? in[3] : Tensor::empty({s.n}, DType::f32);
    ops::linear_backward_weight(in[0], in[1], dw, db, accumulate);
    std::vector<Tensor> out{dw};
    if (bias) out.push_back(db);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    std::vector<Values> out{fp64::added(fp64::product(s.n, s.k, s.m, in[0], 1, s.n, in[1], s.k, 1),
                                        accumulate ? in[2] : Values())};
    if (bias)
      out.push_back(fp64::added(fp64::column_sums(in[0], s.n), accumulate ? in[3] : Values()));
    return out;
  };
  cases.push_back(std::move(c));
}

void add_gelu_forward(Cases& cases, const Size& s, DType dtype, bool in_place, DType bias_type) {
  auto c = make(
      "linear_gelu_forward", s,
      std::string(bias_type == DType::bf16 ? " bf16 bias" : "") + (in_place ? " in place" : ""),
      dtype, dtype);
  if (!in_place) c.bytes += static_cast<double>(s.m * s.n) * static_cast<double>(size_of(dtype));
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.k));
  c.inputs = {random_tensor({s.m, s.k}, dtype, 1), random_tensor({s.n, s.k}, dtype, 2, spread),
              random_tensor({s.n}, bias_type, 3)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor z = Tensor::empty({s.m, s.n}, dtype);
    Tensor h = in_place ? z : Tensor::empty({s.m, s.n}, dtype);
    ops::linear_gelu_forward(in[0], in[1], in[2], z, h);
    return in_place ? std::vector<Tensor>{h} : std::vector<Tensor>{z, h};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values z = fp64::product(s.m, s.n, s.k, in[0], s.k, 1, in[1], 1, s.k);
    for (std::size_t i = 0; i < z.size(); ++i) z[i] += in[2][i % s.n];
    const Values h = fp64::map(z, fp64::gelu);
    return in_place ? std::vector<Values>{h} : std::vector<Values>{z, h};
  };
  cases.push_back(std::move(c));
}

// gelu'(z) (dy w) in fp64, from dy [M,N], w [N,K] and z [M,K].
Values gelu_gradient(const Size& s, const Values& dy, const Values& w, const Values& z) {
  const Values dh = fp64::product(s.m, s.k, s.n, dy, s.n, 1, w, s.k, 1);
  return fp64::map(z, dh, [](double z_, double d) { return d * fp64::gelu_slope(z_); });
}

// What linear_gelu_backward_input() gives besides dz.
struct GeluBackward {
  bool h = true, in_place = false;        // h again, over z
  bool sums = false, accumulate = false;  // dz's column sums, added to what there is
};

// dz [M,K] from dy [M,N], w [N,K] and z [M,K].
void add_gelu_backward(Cases& cases, const Size& s, DType dtype, GeluBackward what = {}) {
  auto c = make("linear_gelu_backward_input", s,
                std::string(what.in_place ? " in place"
                            : what.h      ? ""
                                          : " dz alone") +
                    (what.sums ? " bias" : "") + (what.accumulate ? " accumulate" : ""),
                dtype, dtype);
  // cuBLASLt's own derivative of GELU is 9.3e-6 off in f32 (H100, 13.1).
  c.tolerance = std::max(tolerance(dtype, s.n), 1.6e-5);
  // dy and w are read, z read, dz and h written.
  c.bytes = static_cast<double>(s.m * s.n + s.n * s.k + (what.h ? 3 : 2) * s.m * s.k) *
            static_cast<double>(size_of(dtype));
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.n));
  c.inputs = {random_tensor({s.m, s.n}, dtype, 1), random_tensor({s.n, s.k}, dtype, 2, spread),
              random_tensor({s.m, s.k}, dtype, 3, 2.0f)};
  if (what.accumulate) c.inputs.push_back(random_tensor({s.k}, DType::f32, 4));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dz = Tensor::empty({s.m, s.k}, dtype), h, sums;
    if (what.h) h = what.in_place ? in[2] : Tensor::empty({s.m, s.k}, dtype);
    if (what.sums) sums = what.accumulate ? in[3] : Tensor::empty({s.k}, DType::f32);
    ops::linear_gelu_backward_input(in[0], in[1], in[2], dz, h, sums, what.accumulate);
    std::vector<Tensor> out{dz};
    if (what.h) out.push_back(h);
    if (what.sums) out.push_back(sums);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    const Values dz = gelu_gradient(s, in[0], in[1], in[2]);
    std::vector<Values> out{dz};
    if (what.h) out.push_back(fp64::map(in[2], fp64::gelu));
    if (what.sums)
      out.push_back(fp64::added(fp64::column_sums(dz, s.k), what.accumulate ? in[3] : Values()));
    return out;
  };
  cases.push_back(std::move(c));
}

// The gradients of a layer's weights and of its input together: dw [N,K], db [N] from dy [M,N] and
// x [M,K]; dx [M,K] from dy and w [N,K].
void add_both(Cases& cases, const Size& s, DType dtype, bool bias, bool accumulate) {
  auto c = make("linear_backward", s,
                std::string(bias ? " bias" : "") + (accumulate ? " accumulate" : ""), dtype, dtype);
  c.flops *= 2;
  c.tolerance = std::max(tolerance(dtype, s.n), tolerance(DType::f32, s.m));
  c.bytes = static_cast<double>(s.m * s.n + (accumulate ? 3 : 2) * s.m * s.k + s.n * s.k) *
                static_cast<double>(size_of(dtype)) +
            static_cast<double>(s.n * s.k) * (accumulate ? 8.0 : 4.0);
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.n));
  c.inputs = {random_tensor({s.m, s.n}, dtype, 1),         random_tensor({s.m, s.k}, dtype, 2),
              random_tensor({s.n, s.k}, dtype, 3, spread), random_tensor({s.n, s.k}, DType::f32, 4),
              random_tensor({s.n}, DType::f32, 5),         random_tensor({s.m, s.k}, dtype, 6)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dw = in[3], db = bias ? in[4] : Tensor(), dx = in[5];
    ops::linear_backward(in[0], in[1], in[2], dw, db, accumulate, dx, accumulate);
    std::vector<Tensor> out{dw, dx};
    if (bias) out.push_back(db);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    const auto before = [&](std::size_t i) { return accumulate ? in[i] : Values(); };
    std::vector<Values> out{
        fp64::added(fp64::product(s.n, s.k, s.m, in[0], 1, s.n, in[1], s.k, 1), before(3)),
        fp64::added(fp64::product(s.m, s.k, s.n, in[0], s.n, 1, in[2], s.k, 1), before(5))};
    if (bias) out.push_back(fp64::added(fp64::column_sums(in[0], s.n), before(4)));
    return out;
  };
  cases.push_back(std::move(c));
}

// The same through the activation of an MLP: dw [N,K], db [N] from dy [M,N] and h [M,K]; dz [M,K]
// and its sums from dy, w [N,K] and z [M,K].
void add_both_of_mlp(Cases& cases, const Size& s, DType dtype, bool sums, bool accumulate,
                     bool biased = true) {
  auto c = make("linear_gelu_backward", s,
                std::string(sums ? " sums" : "") + (biased ? "" : " no bias") +
                    (accumulate ? " accumulate" : ""),
                dtype, dtype);
  c.flops *= 2;
  c.tolerance = std::max({tolerance(dtype, s.n), tolerance(DType::f32, s.m), 1.6e-5});
  c.bytes = static_cast<double>(s.m * s.n + 3 * s.m * s.k + s.n * s.k) *
                static_cast<double>(size_of(dtype)) +
            static_cast<double>(s.n * s.k) * (accumulate ? 8.0 : 4.0);
  const float spread = 1.0f / std::sqrt(static_cast<float>(s.n));
  c.inputs = {
      random_tensor({s.m, s.n}, dtype, 1),         random_tensor({s.m, s.k}, dtype, 2),
      random_tensor({s.n, s.k}, dtype, 3, spread), random_tensor({s.m, s.k}, dtype, 4, 2.0f),
      random_tensor({s.n, s.k}, DType::f32, 5),    random_tensor({s.n}, DType::f32, 6),
      random_tensor({s.k}, DType::f32, 7)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dw = in[4], dz = Tensor::empty({s.m, s.k}, dtype);
    Tensor db = biased ? in[5] : Tensor(), of_dz = sums ? in[6] : Tensor();
    ops::linear_gelu_backward(in[0], in[1], in[2], in[3], dw, db, accumulate, dz, of_dz,
                              accumulate);
    std::vector<Tensor> out{dw, in[5], dz};  // in[5] stays where it is not wanted
    if (sums) out.push_back(of_dz);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) {
    const auto before = [&](std::size_t i) { return accumulate ? in[i] : Values(); };
    const Values dz = gelu_gradient(s, in[0], in[2], in[3]);
    std::vector<Values> out{
        fp64::added(fp64::product(s.n, s.k, s.m, in[0], 1, s.n, in[1], s.k, 1), before(4)),
        biased ? fp64::added(fp64::column_sums(in[0], s.n), before(5)) : in[5], dz};
    if (sums) out.push_back(fp64::added(fp64::column_sums(dz, s.k), before(6)));
    return out;
  };
  cases.push_back(std::move(c));
}

void add_bias_gradient(Cases& cases, std::int64_t m, std::int64_t n, DType dtype, bool accumulate) {
  auto c = make("bias_gradient", {m, n, 1}, accumulate ? " accumulate" : "", dtype, DType::f32);
  c.shape = fmt::format("M{} N{}{}", m, n, accumulate ? " accumulate" : "");
  c.bound = Bound::bandwidth;
  c.flops = static_cast<double>(m * n);
  c.bytes = static_cast<double>(m * n) * static_cast<double>(size_of(dtype));
  c.tolerance = tolerance(DType::f32, m);
  c.inputs = {random_tensor({m, n}, dtype, 1)};
  if (accumulate) c.inputs.push_back(random_tensor({n}, DType::f32, 2));
  c.run = [=](std::vector<Tensor>& in) {
    Tensor db = accumulate ? in[1] : Tensor::empty({n}, DType::f32);
    ops::bias_gradient(in[0], db, accumulate);
    return std::vector<Tensor>{db};
  };
  c.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{
        fp64::added(fp64::column_sums(in[0], n), accumulate ? in[1] : Values())};
  };
  cases.push_back(std::move(c));
}

// Operands at odd addresses, as parameters have in flat storage behind one of odd length.
void add_misaligned(Cases& cases, const Size& s, DType dtype) {
  auto c = make("linear_forward", s, " misaligned", dtype, dtype);
  c.inputs = {random_tensor({s.m * s.k + 1}, dtype, 1), random_tensor({s.n * s.k + 3}, dtype, 2)};
  c.run = [=](std::vector<Tensor>& in) {
    const Tensor whole = Tensor::empty({s.m * s.n + 1}, dtype);
    // The one element that the product leaves alone is written too: all of an output is compared.
    Tensor first = Tensor::borrow(whole.raw(), {1}, dtype, whole.device());
    ops::fill_zero(first);
    Tensor y = shifted(whole, {s.m, s.n});
    ops::linear_forward(shifted(in[0], {s.m, s.k}), shifted(in[1], {s.n, s.k}), Tensor(), Tensor(),
                        y);
    return std::vector<Tensor>{whole};
  };
  cases.push_back(std::move(c));
}

void small_cases(Cases& cases) {
  const Size sizes[] = {{1, 1, 1}, {7, 5, 3}, {1, 72, 16}, {33, 24, 40}, {70, 130, 50}};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Size& s : sizes) {
      add_forward(cases, s, dtype, s.m % 2 == 0, s.n % 2 == 1);
      add_forward(cases, s, dtype, true, true);
      add_backward_input(cases, s, dtype, s.m % 2 == 0);
      add_backward_weight(cases, s, dtype, s.m % 2 == 1, s.k % 2 == 1);
      add_backward_weight(cases, s, dtype, true, true);
      add_gelu_forward(cases, s, dtype, s.m == 7 || s.k == 16, dtype);
      if (dtype == DType::bf16) add_forward(cases, s, dtype, true, s.n % 2 == 1, dtype);
      add_gelu_backward(cases, s, dtype, {.in_place = s.m == 7});
      add_gelu_backward(
          cases, s, dtype,
          {.h = s.n % 2 == 1, .sums = s.m != 70, .accumulate = s.m == 33 || s.m == 7});
      add_both(cases, s, dtype, s.m % 2 == 1, s.k % 2 == 1);
      add_both_of_mlp(cases, s, dtype, s.m % 2 == 1, s.k % 2 == 1);
    }
    add_gelu_forward(cases, sizes[3], dtype, true, DType::f32);
    add_gelu_backward(cases, sizes[3], dtype, {.in_place = true});
    add_both(cases, sizes[3], dtype, true, true);
    add_both_of_mlp(cases, sizes[3], dtype, true, true);
    add_both_of_mlp(cases, sizes[3], dtype, true, true, false);
    add_misaligned(cases, {19, 24, 32}, dtype);
    add_bias_gradient(cases, 1, 1, dtype, false);
    add_bias_gradient(cases, 200, 77, dtype, true);
    add_bias_gradient(cases, 131, 264, dtype, false);
  }
  // One row; then several blocks of the depth, panels and pieces of pairs.h, none of them whole.
  add_both(cases, {1, 1030, 70}, DType::bf16, true, true);
  add_backward_input(cases, {67, 1030, 450}, DType::bf16, true);
  add_backward_input(cases, {70, 1030, 90}, DType::bf16, false);
  add_backward_weight(cases, {301, 205, 130}, DType::bf16, true, true);
  add_backward_weight(cases, {600, 77, 70}, DType::bf16, false, false);
}

// The linear layers of an STDiT3-XL/2 block: C 1152, MLP 4608.
void real_cases(Cases& cases) {
  for (const std::int64_t m : {std::int64_t{15 * 1590}, std::int64_t{4 * 256}}) {
    const DType dtype = DType::bf16;
    add_forward(cases, {m, 3456, 1152}, dtype, true, false, dtype);
    add_forward(cases, {m, 1152, 1152}, dtype, true, true, dtype);
    add_backward_input(cases, {m, 3456, 1152}, dtype, false);
    add_backward_weight(cases, {m, 3456, 1152}, dtype, true, true);
    add_gelu_forward(cases, {m, 4608, 1152}, dtype, false, dtype);
    add_gelu_backward(cases, {m, 1152, 4608}, dtype);
    add_gelu_backward(cases, {m, 1152, 4608}, dtype,
                      {.h = false, .sums = true, .accumulate = true});
    add_both(cases, {m, 3456, 1152}, dtype, true, true);
    add_both(cases, {m, 1152, 1152}, dtype, true, true);
    add_both(cases, {m, 4608, 1152}, dtype, false, true);
    add_both_of_mlp(cases, {m, 1152, 4608}, dtype, true, true);
    add_bias_gradient(cases, m, 1152, dtype, true);
  }
  add_forward(cases, {4 * 256, 1152, 1152}, DType::f32, true, true);
  add_backward_weight(cases, {4 * 256, 1152, 1152}, DType::f32, true, true);
  // The transposed convolutions of DBNet's head over an image of 1024x1024.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_backward_input(cases, {256 * 256, 64, 256}, dtype, false);
    add_backward_input(cases, {512 * 512, 64, 4}, dtype, false);
  }
}

}  // namespace

void matmul_cases(CaseSize size, Cases& cases) {
  size == CaseSize::small ? small_cases(cases) : real_cases(cases);
}

}  // namespace weft
