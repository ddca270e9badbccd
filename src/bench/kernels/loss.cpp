// Cases of ops/loss.h (kernels/loss.cu beside src/ops/cpu/loss.cpp).

#include <fmt/format.h>

#include <cmath>

#include "bench/kernels/cases.h"
#include "core/philox.h"
#include "ops/diffusion.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "ops/reduce.h"

namespace weft {
namespace {

using Cases = std::vector<KernelCase>;
using Tensors = std::vector<Tensor>;

// A few operations in f32, which one side may contract.
constexpr double tolerance = 1e-6;

KernelCase make(const char* op, std::string shape, double bytes, DType dtype = DType::f32) {
  KernelCase c;
  c.op = op;
  c.shape = std::move(shape);
  c.dtype = dtype;
  c.bytes = bytes;
  c.tolerance = tolerance;
  return c;
}

enum class Mask { none, some, empty_sample };

// u8 [B,T]: frames by turns, or none at all in sample 0.
Tensor frame_mask(Mask kind, std::int64_t B, std::int64_t T) {
  Tensor mask = Tensor::host({B, T}, DType::u8);
  for (std::int64_t i = 0; i < B * T; ++i)
    mask.data<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(i % 3 != 1 && (kind == Mask::some || i >= T));
  return mask;
}

// Share of the frames that count.
double share(const Tensor& mask) {
  if (!mask.defined()) return 1;
  double n = 0;
  for (const std::uint8_t m : mask.span<std::uint8_t>()) n += m;
  return n / static_cast<double>(mask.numel());
}

// x [B,C,T,H,W]; the model's output has Co channels.
void add_flow(Cases& cases, const Shape& x, std::int64_t Co, Mask kind) {
  const bool masked = kind != Mask::none;
  const Tensor mask = masked ? frame_mask(kind, x[0], x[2]) : Tensor();
  const Shape out{x[0], Co, x[2], x[3], x[4]};
  const auto n = static_cast<double>(x.numel()), n_out = static_cast<double>(out.numel());
  const std::string shape =
      fmt::format("x {} Co{}{}", x.str(), Co,
                  kind == Mask::none ? "" : (kind == Mask::some ? " mask" : " one without frames"));
  const auto with_mask = [&](Tensors inputs) {
    if (masked) inputs.push_back(mask);
    return inputs;
  };
  const auto given = [masked](const Tensors& in) { return masked ? in.back() : Tensor(); };

  KernelCase f = make("flow_interpolate", shape, (8 + 4 * share(mask)) * n);
  Tensor tau = random_tensor({x[0]}, DType::f32, 1, 250.0f, 500.0f);
  f.inputs = with_mask({random_tensor(x, DType::f32, 2), random_tensor(x, DType::f32, 3), tau});
  f.run = [=](Tensors& in) {
    Tensor xs = Tensor::empty(x, DType::f32);
    ops::flow_interpolate(in[0], in[1], in[2], given(in), xs);
    ops::flow_interpolate(in[0], in[1], in[2], given(in), in[0]);  // in place
    return Tensors{xs, in[0]};
  };
  f.bytes *= 2;
  cases.push_back(std::move(f));

  KernelCase l = make("velocity_loss_forward", shape, 12 * n * share(mask));
  l.inputs = with_mask({random_tensor(out, DType::f32, 4), random_tensor(x, DType::f32, 5),
                        random_tensor(x, DType::f32, 6)});
  l.run = [=](Tensors& in) {
    Tensor loss = Tensor::empty({x[0]}, DType::f32);
    ops::velocity_loss_forward(in[0], in[1], in[2], given(in), loss);
    return Tensors{loss};
  };
  cases.push_back(l);

  KernelCase b = make("velocity_loss_backward", shape, 12 * n * share(mask) + 4 * n_out);
  b.inputs = l.inputs;
  b.run = [=](Tensors& in) {
    Tensor dout = Tensor::empty(out, DType::f32);
    ops::velocity_loss_backward(in[0], in[1], in[2], given(in), 0.25f, dout);
    return Tensors{dout};
  };
  cases.push_back(std::move(b));

  KernelCase e = make("guided_euler_step", shape, 16 * n * share(mask));
  e.inputs = with_mask({random_tensor({2 * x[0], Co, x[2], x[3], x[4]}, DType::f32, 7),
                        random_tensor({x[0]}, DType::f32, 8, 0.02f, 0.03f),
                        random_tensor(x, DType::f32, 9)});
  e.run = [=](Tensors& in) {
    ops::guided_euler_step(in[0], 7.0f, in[1], given(in), in[2]);
    return Tensors{in[2]};
  };
  cases.push_back(std::move(e));
}

void add_add_sum(Cases& cases, std::int64_t n) {
  KernelCase c = make("add_sum", fmt::format("N{}", n), 4.0 * static_cast<double>(n) + 16);
  c.inputs = {random_tensor({n}, DType::f32, 1, 1.0f, 1.0f), Tensor::host({1}, DType::f64)};
  c.inputs[1].data<double>()[0] = 0.125;
  c.tolerance = 1e-14;  // both add in order, in f64
  c.run = [](Tensors& in) {
    ops::add_sum(in[0], in[1]);
    return Tensors{in[1]};
  };
  cases.push_back(std::move(c));
}

// `offset` floats into its tensor, as sample b of a batch may be.
void add_fill_normal(Cases& cases, std::int64_t n, std::int64_t offset) {
  KernelCase c = make("fill_normal", fmt::format("N{}{}", n, offset == 0 ? "" : " misaligned"),
                      4.0 * static_cast<double>(n));
  c.tolerance = 2e-6;  // log, sqrt, sin and cos of either side
  c.run = [=](Tensors&) {
    Tensor eps = Tensor::empty({n + offset}, DType::f32), here = eps.slice(offset, n + offset);
    // A seed, a step and a sample that need all their bits.
    ops::fill_normal(0x9e3779b97f4a7c15u, static_cast<int>(Purpose::noise), 123456789012u,
                     (std::uint64_t{1} << 40) + 7, here);
    return Tensors{here};
  };
  cases.push_back(std::move(c));
}

void add_frames(Cases& cases, std::int64_t T, std::int64_t H, std::int64_t W, std::int64_t C,
                std::int64_t offset) {
  KernelCase c = make("frames_to_latent",
                      fmt::format("T{} {}x{} C{}{}", T, H, W, C, offset == 0 ? "" : " misaligned"),
                      5.0 * static_cast<double>(T * H * W * C), DType::u8);
  const std::int64_t n = T * H * W * C;
  Tensor frames = Tensor::host({n + offset}, DType::u8);
  const Philox random(1, Purpose::synthetic, 0, 0);
  for (std::int64_t i = 0; i < n + offset; ++i)
    frames.data<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(random.u32(static_cast<std::uint32_t>(i)));
  c.inputs = {frames};
  c.run = [=](Tensors& in) {
    Tensor x0 = Tensor::empty({C, T, H, W}, DType::f32);
    ops::frames_to_latent(in[0].slice(offset, n + offset).view({T, H, W, C}), x0);
    return Tensors{x0};
  };
  cases.push_back(std::move(c));
}

// Values on both sides of [-1,1], at its ends and not finite, `offset` floats into their tensor.
void add_pixels(Cases& cases, std::int64_t T, std::int64_t H, std::int64_t W, std::int64_t offset) {
  KernelCase c = make("frames_to_pixels",
                      fmt::format("T{} {}x{}{}", T, H, W, offset == 0 ? "" : " misaligned"),
                      5.0 * static_cast<double>(T * H * W * 3));
  c.tolerance = 0;
  const std::int64_t n = T * H * W * 3;
  Tensor frames = random_tensor({n + offset}, DType::f32, 11);
  float* x = frames.data<float>() + offset;
  x[0] = -1.0f, x[n / 2] = 1.0f, x[n - 1] = INFINITY;
  if (n > 100) x[50] = -INFINITY, x[99] = NAN;
  c.inputs = {frames};
  c.run = [=](Tensors& in) {
    Tensor pixels = Tensor::empty({T, H, W, 3}, DType::u8), bad = Tensor::empty({T}, DType::i32);
    ops::fill_zero(bad);
    ops::frames_to_pixels(in[0].slice(offset, n + offset).view({T, H, W, 3}), pixels, bad);
    return Tensors{pixels, bad};
  };
  cases.push_back(std::move(c));
}

}  // namespace

std::vector<KernelCase> loss_cases(CaseSize size) {
  Cases cases;
  if (size == CaseSize::small) {
    for (const Mask kind : {Mask::none, Mask::some, Mask::empty_sample}) {
      add_flow(cases, {2, 4, 3, 4, 6}, 8, kind);
      add_flow(cases, {3, 3, 5, 3, 5}, 3, kind);  // frames of 15: one element an access
    }
    add_flow(cases, {1, 1, 1, 1, 1}, 2, Mask::none);
    add_flow(cases, {1, 2, 1, 80, 120}, 4, Mask::none);  // several blocks a frame
    add_flow(cases, {1, 1, 40, 2, 2}, 1, Mask::some);    // more frames than a warp has lanes
    for (const std::int64_t n : {1, 5, 700}) add_add_sum(cases, n);
    add_fill_normal(cases, 1, 0);
    add_fill_normal(cases, 4099, 0);
    add_fill_normal(cases, 1024, 1);
    add_frames(cases, 1, 1, 1, 3, 0);
    add_frames(cases, 3, 20, 36, 3, 0);  // whole packs, a part of a block at the end
    add_frames(cases, 2, 19, 29, 3, 0);  // planes that are not aligned
    add_frames(cases, 2, 8, 8, 3, 5);
    add_frames(cases, 2, 8, 9, 4, 0);
    add_pixels(cases, 1, 1, 1, 0);
    add_pixels(cases, 3, 20, 36, 0);
    add_pixels(cases, 2, 19, 29, 0);  // frames of 1653: one value an access
    add_pixels(cases, 2, 40, 52, 1);  // more than a block a frame
  } else {
    add_flow(cases, {2, 4, 15, 60, 106}, 8, Mask::some);
    add_flow(cases, {8, 4, 4, 32, 32}, 8, Mask::none);
    add_add_sum(cases, 8);
    add_fill_normal(cases, std::int64_t{4} * 15 * 60 * 106, 0);
    add_frames(cases, 51, 480, 848, 3, 0);
    add_pixels(cases, 4, 720, 1280, 0);
  }
  return cases;
}

}  // namespace weft
