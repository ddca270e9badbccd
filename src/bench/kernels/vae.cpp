// Cases of ops/group_norm.h and ops/posterior.h (kernels/group_norm.cu, wide_attention.cu and posterior.cu beside their
// twins in src/ops/cpu).
#include <fmt/format.h>

#include "bench/kernels/cases.h"
#include "ops/attention.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

struct Size {
  std::int64_t N, P, C;
  int groups;
  double elements() const { return static_cast<double>(N * P * C); }
};

KernelCase make(const char* op, const std::string& shape, DType dtype, double values) {
  KernelCase c;
  c.op = op;
  c.shape = shape;
  c.dtype = dtype;
  c.bytes = values * static_cast<double>(size_of(dtype));
  // f32: sums in another order. bf16: one unit of the largest value's last place where two sides round either way.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 2e-5;
  return c;
}

// `mean`: far from zero, so that sums that cancel would show.
void add_group_norm(std::vector<KernelCase>& cases, const Size& s, DType dtype, bool silu,
                    bool accumulate, float mean) {
  const Shape shape{s.N, s.P, s.C}, stats_shape{s.N, s.groups, 2};
  const std::string text = fmt::format("N{} P{} C{} G{}{}{}", s.N, s.P, s.C, s.groups,
                                       silu ? " SiLU" : "", mean > 2 ? " offset" : "");
  const Tensor x = random_tensor(shape, dtype, 1, 2.0f, mean),
               gamma = random_tensor({s.C}, DType::f32, 2, 0.5f, 1.0f),
               beta = random_tensor({s.C}, DType::f32, 3, 0.5f);
  auto forward = make("group_norm_forward", text, dtype, 3 * s.elements());
  // A mean of m deviations costs log2 m of the input's bits on either side.
  if (mean > 2) forward.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 1e-4;
  forward.inputs = {x, gamma, beta};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(shape, dtype), stats = Tensor::empty(stats_shape, DType::f32);
    ops::group_norm_forward(in[0], in[1], in[2], s.groups, 1e-6f, silu, y, stats);
    return std::vector<Tensor>{y, stats};
  };
  cases.push_back(std::move(forward));
  if (mean > 2) return;
  auto backward = make("group_norm_backward", text + (accumulate ? " accumulate" : ""), dtype,
                       (accumulate ? 6 : 5) * s.elements());
  Tensor stats = random_tensor(stats_shape, DType::f32, 4, 0.05f, 0.5f);
  backward.inputs = {x,
                     gamma,
                     beta,
                     stats,
                     random_tensor(shape, dtype, 5),
                     random_tensor({s.C}, DType::f32, 6),
                     random_tensor({s.C}, DType::f32, 7),
                     accumulate ? random_tensor(shape, dtype, 8) : Tensor()};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[7] : in[4];  // dy itself
    ops::group_norm_backward(in[0], in[1], in[2], in[3], s.groups, silu, in[4], dx, accumulate,
                             in[5], in[6]);
    return std::vector<Tensor>{dx, in[5], in[6]};
  };
  cases.push_back(std::move(backward));
}

void add_batch_norm_tangent(std::vector<KernelCase>& cases, std::int64_t P, std::int64_t C,
                            DType dtype) {
  const Shape shape{1, P, C};
  auto c = make("batch_norm_tangent_backward", fmt::format("P{} C{}", P, C), dtype,
                8 * static_cast<double>(P * C));
  if (dtype == DType::f32) c.tolerance = 1e-4;  // its terms are larger than their sum
  c.inputs = {random_tensor(shape, dtype, 1, 2.0f, 1.0f),
              random_tensor({C}, DType::f32, 2, 0.5f, 1.0f),
              random_tensor({C}, DType::f32, 3, 0.5f),
              random_tensor(shape, dtype, 4),
              random_tensor(shape, dtype, 5),
              random_tensor(shape, dtype, 6),
              random_tensor({C}, DType::f32, 7)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(shape, dtype), stats = Tensor::empty({1, C, 2}, DType::f32);
    ops::group_norm_forward(in[0], in[1], in[2], static_cast<int>(C), 1e-5f, false, y, stats);
    ops::batch_norm_tangent_backward(in[0], in[1], stats, in[3], in[4], in[5], true, in[6]);
    return std::vector<Tensor>{in[5], in[6]};
  };
  cases.push_back(std::move(c));
}

void add_wide_attention(std::vector<KernelCase>& cases, std::int64_t N, std::int64_t P,
                        std::int64_t C, DType dtype) {
  const std::string text = fmt::format("N{} P{} C{}", N, P, C);
  const Shape rows{N, P, C};
  const double work = static_cast<double>(N * P) * static_cast<double>(P * C);
  const Tensor qkv = random_tensor({N, P, 3, C}, dtype, 1);
  auto forward = make("wide_attention_forward", text, dtype, static_cast<double>(4 * N * P * C));
  forward.flops = 4 * work;
  forward.bound = Bound::tensor_cores;
  forward.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 2e-5;
  forward.inputs = {qkv};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(rows, dtype), lse = Tensor::empty({N, P}, DType::f32);
    ops::wide_attention_forward(in[0], out, lse);
    return std::vector<Tensor>{out, lse};
  };
  auto backward = make("wide_attention_backward", text, dtype, static_cast<double>(8 * N * P * C));
  backward.flops = 10 * work;
  backward.bound = Bound::tensor_cores;
  // bf16: probabilities and their gradients are rounded before the products.
  backward.tolerance = dtype == DType::bf16 ? 1.0 / 32 : 5e-5;
  backward.inputs = {qkv, random_tensor(rows, dtype, 2)};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(rows, dtype), lse = Tensor::empty({N, P}, DType::f32),
           dqkv = Tensor::empty({N, P, 3, C}, dtype);
    ops::wide_attention_forward(in[0], out, lse);
    ops::wide_attention_backward(in[0], out, lse, in[1], dqkv);
    return std::vector<Tensor>{dqkv};
  };
  cases.push_back(std::move(forward));
  cases.push_back(std::move(backward));
}

void add_posterior(std::vector<KernelCase>& cases, ops::Channels channels, DType dtype, bool scaled,
                   bool accumulate) {
  const bool last = channels == ops::Channels::last;
  const Shape z = last ? Shape{2, 3, 5, 4} : Shape{2, 4, 3, 5};
  const Shape moments = last ? Shape{2, 3, 5, 8} : Shape{2, 8, 3, 5};
  const Tensor affine = scaled ? random_tensor({2, 4}, DType::f32, 2) : Tensor();
  const auto add = [&](const char* op, std::vector<Tensor> inputs, auto run) {
    auto c = make(op,
                  fmt::format("{}{}{}", last ? "last" : "first", scaled ? " scaled" : "",
                              accumulate ? " accumulate" : ""),
                  dtype, 0);
    c.inputs = std::move(inputs);
    c.run = [=](std::vector<Tensor>& in) { return std::vector<Tensor>{run(in)}; };
    cases.push_back(std::move(c));
  };
  // Some log variances lie beyond the limits.
  const Tensor m = random_tensor(moments, dtype, 1, 12.0f, -4.0f),
               eps = scaled ? random_tensor(z, DType::f32, 3) : Tensor();
  add("posterior_draw_forward", {m, eps, affine}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(z, DType::f32);
    ops::posterior_draw_forward(in[0], in[1], in[2], channels, y);
    return y;
  });
  add("posterior_draw_backward",
      {m, eps, affine, random_tensor(z, DType::f32, 4), random_tensor(moments, dtype, 5)},
      [=](std::vector<Tensor>& in) {
        ops::posterior_draw_backward(in[0], in[1], in[2], channels, in[3], in[4], accumulate);
        return in[4];
      });
  add("clamp_log_variance_forward", {m}, [=](std::vector<Tensor>& in) {
    ops::clamp_log_variance_forward(in[0], channels, in[0]);
    return in[0];
  });
  add("clamp_log_variance_backward",
      {m, random_tensor(moments, dtype, 4), random_tensor(moments, dtype, 5)},
      [=](std::vector<Tensor>& in) {
        ops::clamp_log_variance_backward(in[0], channels, in[1], in[2], accumulate);
        return in[2];
      });
  if (!scaled) return;
  add("channel_affine_forward", {random_tensor(z, dtype, 6), affine}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(z, DType::f32);
    ops::channel_affine_forward(in[0], in[1], channels, y);
    return y;
  });
  add("channel_affine_backward",
      {random_tensor(z, DType::f32, 7), affine, random_tensor(z, dtype, 8)},
      [=](std::vector<Tensor>& in) {
        ops::channel_affine_backward(in[0], in[1], channels, in[2], accumulate);
        return in[2];
      });
}

}  // namespace

std::vector<KernelCase> vae_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    for (const Size& s : {Size{1, 480 * 856, 128, 32}, Size{1, 240 * 428, 256, 32},
                          Size{4, 60 * 107, 512, 32}, Size{1, 17 * 60 * 107, 128, 32}})
      add_group_norm(cases, s, DType::bf16, true, false, 0.5f);
    add_group_norm(cases, {1, 120 * 214, 512, 32}, DType::f32, true, true, 0.5f);
    for (const DType dtype : {DType::f32, DType::bf16})
      add_wide_attention(cases, 1, 60 * 107, 512, dtype);
    return cases;
  }
  // One position; groups of one channel and of all; channels that no vector divides; more positions than a chunk; means far
  // from zero.
  for (const Size& s : {Size{1, 1, 8, 2}, Size{2, 5, 12, 4}, Size{1, 9, 6, 6}, Size{3, 7, 16, 1},
                        Size{2, 131, 8, 4}, Size{1, 70, 24, 3}})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool silu : {false, true})
        add_group_norm(cases, s, dtype, silu, silu == (dtype == DType::f32), 0.5f);
  add_group_norm(cases, {2, 131, 8, 4}, DType::f32, true, false, 100.0f);
  // One position; several tiles of queries; rows that the library's alignment does not fit.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_wide_attention(cases, 1, 1, 8, dtype);
    add_wide_attention(cases, 2, 33, 16, dtype);
    add_wide_attention(cases, 1, 40, 6, dtype);
    add_batch_norm_tangent(cases, 131, 12, dtype);
    add_batch_norm_tangent(cases, 7, 6, dtype);
  }
  for (const auto channels : {ops::Channels::first, ops::Channels::last})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool scaled : {false, true})
        add_posterior(cases, channels, dtype, scaled, scaled == (dtype == DType::f32));
  return cases;
}

}  // namespace weft
