// Cases of ops/norm.h (kernels/norm.cu and gate.cu beside src/ops/cpu/norm.cpp).
#include <fmt/format.h>

#include "bench/kernels/cases.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

constexpr int vectors = 6, shift = 3, scale = 4,
              gate = 2;  // of a block's modulation (specs/stdit3.md 5.4)

struct Size {
  std::int64_t B, T, S, C;
  int first_row = 0;

  Shape tokens() const { return {B, T, S, C}; }
  Shape modulation() const { return {2 * B, vectors, C}; }
  double elements() const { return static_cast<double>(B * T * S * C); }
  double rows() const { return static_cast<double>(B * T * S); }
};

// Every third frame is a clean one and uses a row of the second half.
Tensor frame_rows(const Size& s) {
  Tensor rows = Tensor::host({s.B * s.T}, DType::i32);
  for (std::int64_t f = 0; f < s.B * s.T; ++f)
    rows.data<std::int32_t>()[f] = static_cast<std::int32_t>(f / s.T + (f % 3 == 1 ? s.B : 0));
  return rows;
}

KernelCase make(const char* op, const Size& s, DType dtype, const std::string& variant,
                int activations) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("B{} T{} S{} C{}{}{}", s.B, s.T, s.S, s.C, variant,
                        s.first_row > 0 ? " passing" : "");
  c.dtype = dtype;
  c.bytes = activations * s.elements() * static_cast<double>(size_of(dtype));
  // bf16: two sides that round to either side of a tie differ by one unit of the largest value's last place. f32:
  // sums over channels and tokens in different orders.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 1e-5;
  return c;
}

void add_layer_norm(std::vector<KernelCase>& cases, const Size& s, DType dtype) {
  const Tensor x = random_tensor(s.tokens(), dtype, 1, 2.0f, 0.5f);
  const Tensor m = random_tensor(s.modulation(), DType::f32, 2, 0.5f);
  const Tensor dy = random_tensor(s.tokens(), dtype, 3);
  const Shape stats_shape{s.B * s.T * s.S, 2};
  auto forward = make("layer_norm_modulate_forward", s, dtype, "", 2);
  forward.bytes += 8 * s.rows();
  forward.flops = 8 * s.elements();
  forward.inputs = {x, m, frame_rows(s)};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(s.tokens(), dtype), stats = Tensor::empty(stats_shape, DType::f32);
    if (s.first_row > 0) ops::fill_zero(stats);  // not written for frames that pass
    ops::layer_norm_modulate_forward(in[0], in[1], in[2], shift, scale, s.first_row, y, stats);
    return std::vector<Tensor>{y, stats};
  };
  cases.push_back(std::move(forward));
  for (const bool accumulate : {false, true}) {
    auto c = make("layer_norm_modulate_backward", s, dtype, accumulate ? " accumulate" : "",
                  accumulate ? 4 : 3);
    c.bytes += 8 * s.rows();
    c.flops = 14 * s.elements();
    // Any mean and deviation will do for the backward's formula.
    c.inputs = {x,
                m,
                frame_rows(s),
                random_tensor(stats_shape, DType::f32, 4, 0.1f, 0.6f),
                dy,
                random_tensor(s.modulation(), DType::f32, 5)};
    if (accumulate) c.inputs.push_back(random_tensor(s.tokens(), dtype, 6));
    c.run = [=](std::vector<Tensor>& in) {
      Tensor dx = accumulate ? in[6] : Tensor::empty(s.tokens(), dtype);
      ops::layer_norm_modulate_backward(in[0], in[1], in[2], shift, scale, s.first_row, in[3],
                                        in[4], dx, accumulate, in[5]);
      return std::vector<Tensor>{dx, in[5]};
    };
    cases.push_back(std::move(c));
  }
}

// With drop path's factors in place, as the blocks call it; without them into tensors of their own.
void add_gate(std::vector<KernelCase>& cases, const Size& s, DType dtype, bool dropped) {
  const Tensor x = random_tensor(s.tokens(), dtype, 1), p = random_tensor(s.tokens(), dtype, 2);
  const Tensor m = random_tensor(s.modulation(), DType::f32, 3);
  Tensor keep;
  if (dropped) {
    keep = Tensor::host({s.B}, DType::f32);
    for (std::int64_t b = 0; b < s.B; ++b) keep.data<float>()[b] = b % 2 == 0 ? 1.25f : 0.0f;
  }
  const char* variant = dropped ? " drop path" : "";
  auto forward = make("gate_residual_forward", s, dtype, variant, 3);
  forward.inputs = {x, p, m, frame_rows(s), keep};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = dropped ? in[0] : Tensor::empty(s.tokens(), dtype);
    ops::gate_residual_forward(in[0], in[1], in[2], in[3], gate, in[4], y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(forward));
  auto backward = make("gate_residual_backward", s, dtype, variant, 3);
  backward.inputs = {x, p, m, frame_rows(s), keep, random_tensor(s.modulation(), DType::f32, 4)};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor dp = dropped ? in[1] : Tensor::empty(s.tokens(), dtype);
    ops::gate_residual_backward(in[0], in[1], in[2], in[3], gate, in[4], dp, in[5]);
    return std::vector<Tensor>{dp, in[5]};
  };
  cases.push_back(std::move(backward));
}

// t [G,K*C], or [G,C] where it is broadcast over the vectors; the table's gradient is wanted or not.
void add_modulation(std::vector<KernelCase>& cases, std::int64_t G, std::int64_t K, std::int64_t C,
                    bool broadcast, bool table_wanted) {
  const std::int64_t columns = broadcast ? C : K * C;
  const double bytes = 4.0 * static_cast<double>(G * K * C + G * columns + K * C);
  KernelCase forward;
  forward.op = "modulation_forward";
  forward.shape = fmt::format("G{} K{} C{}{}", G, K, C, broadcast ? " broadcast" : "");
  forward.bytes = bytes;
  forward.inputs = {random_tensor({K, C}, DType::f32, 1),
                    random_tensor({G, columns}, DType::f32, 2)};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor m = Tensor::empty({G, K, C}, DType::f32);
    ops::modulation_forward(in[0], in[1], m);
    return std::vector<Tensor>{m};
  };
  KernelCase backward;
  backward.op = "modulation_backward";
  backward.shape = forward.shape + (table_wanted ? "" : " no table");
  backward.bytes = bytes;
  backward.inputs = {random_tensor({G, K, C}, DType::f32, 3),
                     random_tensor({G, columns}, DType::f32, 4),
                     random_tensor({K, C}, DType::f32, 5)};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor table = table_wanted ? in[2] : Tensor();
    ops::modulation_backward(in[0], table, in[1]);
    return std::vector<Tensor>{in[1], in[2]};
  };
  cases.push_back(std::move(forward));
  cases.push_back(std::move(backward));
}

}  // namespace

std::vector<KernelCase> norm_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    for (const Size& s : {Size{2, 15, 1590, 1152}, Size{8, 4, 256, 1152}})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        add_layer_norm(cases, s, dtype);
        add_gate(cases, s, dtype, true);
      }
    add_modulation(cases, 4, 6, 1152, false, true);
    add_modulation(cases, 4, 2, 1152, true, true);
    return cases;
  }
  // One token; one frame; every number of steps that a warp takes over a row, full and not; channels that no vector
  // divides; rows too long for a warp; frames that pass; more runs of a modulation row than warps that add them.
  for (const Size& s : {Size{1, 1, 1, 8}, Size{1, 1, 3, 37}, Size{2, 3, 5, 72}, Size{1, 2, 7, 384},
                        Size{1, 2, 3, 580}, Size{1, 3, 5, 1152}, Size{1, 2, 2, 1156},
                        Size{2, 4, 3, 20, 2}, Size{1, 3, 5, 33, 1}, Size{1, 5, 131, 24}})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_layer_norm(cases, s, dtype);
      if (s.first_row == 0)
        for (const bool dropped : {false, true}) add_gate(cases, s, dtype, dropped);
    }
  for (const bool broadcast : {false, true}) {
    add_modulation(cases, 3, 6, 37, broadcast, true);
    add_modulation(cases, 1, 1, 8, broadcast, false);
  }
  return cases;
}

}  // namespace weft
