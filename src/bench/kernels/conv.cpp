// Cases of ops/conv.h (kernels/conv/conv.cu and frames_layout.cu beside src/ops/cpu/conv*.cpp and layout.cpp).
#include "ops/conv.h"
#include "ops/layout.h"

#include <fmt/format.h>

#include <cmath>

#include "bench/kernels/cases.h"

namespace weft {
namespace {

struct Size {
  Shape x;  // [N,T,H,W,Cin]
  std::int64_t out;
  ops::Conv conv;
  const char* name;

  Shape y() const { return conv.output(x, out); }
  Shape w() const {
    if (conv.kt == 1) return {out, x[4], conv.kh, conv.kw};
    return {out, x[4], conv.kt, conv.kh, conv.kw};
  }
  double terms() const { return static_cast<double>(x[4] * conv.kt * conv.kh * conv.kw); }
  double flops() const { return 2.0 * static_cast<double>(y().numel()) * terms(); }
};

KernelCase make(const char* op, const Size& s, DType dtype, const std::string& variant,
                double values) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("{} N{} T{} {}x{} C{}-{}{}", s.name, s.x[0], s.x[1], s.x[2], s.x[3], s.x[4],
                        s.out, variant);
  c.dtype = dtype;
  c.bytes = values * static_cast<double>(size_of(dtype));
  c.flops = s.flops();
  c.bound = Bound::tensor_cores;
  // f32: sums in another order. bf16: operands are the same, the result is rounded once more where the library does not fuse
  // what is added, and the weights of an upsampled convolution's phases are sums, rounded.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 2e-5;
  return c;
}

void add_forward(std::vector<KernelCase>& cases, const Size& s, DType dtype, bool bias,
                 bool residual, bool in_place) {
  const double x = static_cast<double>(s.x.numel()), y = static_cast<double>(s.y().numel());
  auto c = make("conv_forward", s, dtype,
                std::string(bias ? " bias" : "") + (residual ? " residual" : "") +
                    (in_place ? " in place" : ""),
                x + static_cast<double>(s.w().numel()) + y * (residual ? 2 : 1));
  c.inputs = {random_tensor(s.x, dtype, 1),
              random_tensor(s.w(), dtype, 2, 1.0f / std::sqrt(static_cast<float>(s.terms()))),
              bias ? random_tensor({s.out}, DType::f32, 3) : Tensor(),
              residual ? random_tensor(s.y(), dtype, 4) : Tensor()};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y_to = in_place ? in[3] : Tensor::empty(s.y(), dtype);
    ops::conv_forward(in[0], in[1], in[2], in[3], s.conv, y_to);
    return std::vector<Tensor>{y_to};
  };
  cases.push_back(std::move(c));
}

void add_backward(std::vector<KernelCase>& cases, const Size& s, DType dtype, bool accumulate) {
  const double x = static_cast<double>(s.x.numel()), y = static_cast<double>(s.y().numel()),
               w = static_cast<double>(s.w().numel());
  const char* variant = accumulate ? " accumulate" : "";
  auto input = make("conv_backward_input", s, dtype, variant, x * (accumulate ? 2 : 1) + w + y);
  const float spread =
      1.0f / std::sqrt(static_cast<float>(s.out * s.conv.kt * s.conv.kh * s.conv.kw));
  input.inputs = {random_tensor(s.y(), dtype, 1), random_tensor(s.w(), dtype, 2, spread),
                  accumulate ? random_tensor(s.x, dtype, 3) : Tensor()};
  input.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[2] : Tensor::empty(s.x, dtype);
    ops::conv_backward_input(in[0], in[1], s.conv, dx, accumulate);
    return std::vector<Tensor>{dx};
  };
  cases.push_back(std::move(input));

  auto weight = make("conv_backward_weight", s, dtype, variant, x + y);
  weight.bytes += w * (accumulate ? 8 : 4);
  if (dtype == DType::f32) weight.tolerance = 1e-4;  // sums over all positions
  weight.inputs = {random_tensor(s.x, dtype, 1), random_tensor(s.y(), dtype, 2),
                   accumulate ? random_tensor(s.w(), DType::f32, 3) : Tensor(),
                   accumulate ? random_tensor({s.out}, DType::f32, 4) : Tensor()};
  weight.run = [=](std::vector<Tensor>& in) {
    Tensor dw = accumulate ? in[2] : Tensor::empty(s.w(), DType::f32);
    Tensor db = accumulate ? in[3] : Tensor::empty({s.out}, DType::f32);
    ops::conv_backward_weight(in[0], in[1], s.conv, dw, db, accumulate);
    return std::vector<Tensor>{dw, db};
  };
  cases.push_back(std::move(weight));
}

void add_layouts(std::vector<KernelCase>& cases, const Shape& x, DType dtype) {
  const std::int64_t B = x[0], C = x[1], T = x[2], H = x[3], W = x[4];
  const Shape last{B, T, H, W, C};
  const auto layout = [&](const char* op, const Shape& from, const Shape& to, auto call) {
    KernelCase c;
    c.op = op;
    c.shape = fmt::format("B{} C{} T{} {}x{}", B, C, T, H, W);
    c.dtype = dtype;
    c.bytes = static_cast<double>((from.numel() + to.numel()) *
                                  static_cast<std::int64_t>(size_of(dtype)));
    c.tolerance = 0;
    c.inputs = {random_tensor(from, dtype, 1)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = Tensor::empty(to, dtype);
      call(in[0], y);
      return std::vector<Tensor>{y};
    };
    cases.push_back(std::move(c));
  };
  layout("to_channels_last", x, last,
         [](const Tensor& a, Tensor& b) { ops::to_channels_last(a, b); });
  layout("to_channels_first", last, x,
         [](const Tensor& a, Tensor& b) { ops::to_channels_first(a, b); });
  const Shape deep{B, T, H, W, 2 * C}, shallow{B, 2 * T, H, W, C};
  layout("depth_to_time_forward", deep, shallow,
         [](const Tensor& a, Tensor& b) { ops::depth_to_time_forward(a, b); });
  layout("depth_to_time_backward", shallow, deep,
         [](const Tensor& a, Tensor& b) { ops::depth_to_time_backward(a, b); });
}

}  // namespace

std::vector<KernelCase> conv_cases(CaseSize size) {
  using ops::Conv;
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    // The decoder's heaviest levels at 480p, a frame of each, and the temporal decoder's on a chunk of latents.
    const Size sizes[] = {{{1, 1, 480, 856, 128}, 128, Conv::same(3), "same"},
                          {{1, 1, 240, 428, 256}, 256, Conv::same(3), "same"},
                          {{1, 4, 60, 107, 512}, 512, Conv::same(3), "same"},
                          {{1, 1, 240, 428, 256}, 256, Conv::up(), "up"},
                          {{1, 1, 480, 856, 128}, 128, Conv::down(), "down"},
                          {{1, 17, 60, 107, 128}, 128, Conv::causal(3), "causal"},
                          {{1, 5, 60, 107, 512}, 512, Conv::causal(3), "causal"}};
    for (const Size& s : sizes) {
      add_forward(cases, s, DType::bf16, true, s.conv.stride == 1 && !s.conv.upsample, false);
      add_backward(cases, s, DType::bf16, false);
    }
    add_forward(cases, sizes[2], DType::f32, true, true, false);
    add_layouts(cases, {1, 3, 8, 480, 856}, DType::bf16);
    return cases;
  }
  // A kernel of one element; sizes kept, halved and doubled; the causal kernels with both strides; 5 channels, for which
  // the stand-in for cuDNN fuses nothing; an odd number, for which it falls back; a 4x4 kernel; frames of one row.
  const Size sizes[] = {{{2, 3, 3, 2, 8}, 4, Conv::same(1), "same 1"},
                        {{1, 2, 5, 6, 8}, 12, Conv::same(3), "same"},
                        {{1, 1, 4, 3, 3}, 5, Conv::same(3), "same"},
                        {{1, 2, 6, 4, 4}, 8, Conv::down(), "down"},
                        {{2, 1, 3, 4, 8}, 8, Conv::up(), "up"},
                        {{1, 3, 9, 5, 3}, 16, Conv::up(), "up"},
                        {{2, 4, 3, 5, 4}, 6, Conv::causal(3), "causal"},
                        {{1, 5, 4, 1, 6}, 4, Conv::causal(3, 2), "causal half"},
                        {{1, 3, 2, 2, 4}, 8, Conv::causal(1), "causal 1"},
                        {{1, 1, 7, 6, 3}, 4, Conv{1, 4, 4, 1, 2, 0, 1, 1, 1, 1, false}, "4x4"}};
  for (const Size& s : sizes)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_forward(cases, s, dtype, true, false, false);
      add_forward(cases, s, dtype, true, true, dtype == DType::f32);
      if (dtype == DType::bf16) add_forward(cases, s, dtype, false, true, false);
      for (const bool accumulate : {false, true}) add_backward(cases, s, dtype, accumulate);
    }
  for (const DType dtype : {DType::f32, DType::bf16}) add_layouts(cases, {2, 3, 2, 3, 5}, dtype);
  return cases;
}

}  // namespace weft
