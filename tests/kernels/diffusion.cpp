// Cases of ops/random.h (kernels/diffusion.cu beside src/ops/cpu/diffusion.cpp).
#include <fmt/format.h>

#include <iterator>

#include "ops/random.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using Tensors = std::vector<Tensor>;

// A few operations in f32, which one side may contract.
constexpr double tolerance = 1e-6;

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

// Whether frame t of sample b counts.
bool shown(const std::vector<Values>& in, bool masked, std::int64_t frame) {
  return !masked || in.back()[frame] != 0;
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

  KernelCase f =
      make_case("flow_interpolate", shape, DType::f32, (8 + 4 * share(mask)) * n, tolerance);
  Tensor tau = random_tensor({x[0]}, DType::f32, 1, 250.0f, 500.0f);
  f.inputs = with_mask({random_tensor(x, DType::f32, 2), random_tensor(x, DType::f32, 3), tau});
  f.run = [=](Tensors& in) {
    Tensor xs = Tensor::empty(x, DType::f32);
    ops::flow_interpolate(in[0], in[1], in[2], given(in), xs);
    ops::flow_interpolate(in[0], in[1], in[2], given(in), in[0]);  // in place
    return Tensors{xs, in[0]};
  };
  f.bytes *= 2;
  f.reference = [=](const std::vector<Values>& in) {
    const std::int64_t C = x[1], T = x[2], size = x[3] * x[4];
    Values xs = in[0];
    for (std::int64_t i = 0; i < std::ssize(xs); ++i) {
      const std::int64_t b = i / (C * T * size), t = i / size % T;
      const double s = shown(in, masked, b * T + t) ? in[2][b] / 1000 : 0;
      xs[i] = (1 - s) * xs[i] + s * in[1][i];
    }
    return std::vector<Values>{xs, xs};
  };
  cases.push_back(std::move(f));

  KernelCase l =
      make_case("velocity_loss_forward", shape, DType::f32, 12 * n * share(mask), tolerance);
  l.inputs = with_mask({random_tensor(out, DType::f32, 4), random_tensor(x, DType::f32, 5),
                        random_tensor(x, DType::f32, 6)});
  l.run = [=](Tensors& in) {
    Tensor loss = Tensor::empty({x[0]}, DType::f32);
    ops::velocity_loss_forward(in[0], in[1], in[2], given(in), loss);
    return Tensors{loss};
  };
  l.reference = [=](const std::vector<Values>& in) {
    const std::int64_t C = x[1], T = x[2], size = x[3] * x[4];
    Values loss(x[0]);
    for (std::int64_t sample = 0; sample < x[0]; ++sample) {
      double sum = 0, count = 0;
      for (std::int64_t i = 0; i < C * T * size; ++i) {
        const std::int64_t at = sample * C * T * size + i;
        if (!shown(in, masked, sample * T + i / size % T)) continue;
        const double d = in[0][sample * Co * T * size + i] - (in[1][at] - in[2][at]);
        sum += d * d, count += 1;
      }
      loss[sample] = count > 0 ? sum / count : 0;
    }
    return std::vector<Values>{loss};
  };
  cases.push_back(l);

  KernelCase b = make_case("velocity_loss_backward", shape, DType::f32,
                           12 * n * share(mask) + 4 * n_out, tolerance);
  b.inputs = l.inputs;
  b.run = [=](Tensors& in) {
    Tensor dout = Tensor::empty(out, DType::f32);
    const float quarter = 0.25f;
    const Tensor weight = Tensor::from_host(std::span<const float>(&quarter, 1), {1});
    ops::velocity_loss_backward(in[0], in[1], in[2], given(in), weight, dout);
    return Tensors{dout};
  };
  b.reference = [=](const std::vector<Values>& in) {
    const std::int64_t C = x[1], T = x[2], size = x[3] * x[4];
    Values dout(in[0].size());
    for (std::int64_t sample = 0; sample < x[0]; ++sample) {
      double count = 0;
      for (std::int64_t t = 0; t < T; ++t)
        count += shown(in, masked, sample * T + t) ? static_cast<double>(C * size) : 0;
      for (std::int64_t i = 0; i < C * T * size; ++i) {
        const std::int64_t at = sample * C * T * size + i, to = sample * Co * T * size + i;
        if (shown(in, masked, sample * T + i / size % T))
          dout[to] = 2 * 0.25 / count * (in[0][to] - (in[1][at] - in[2][at]));
      }
    }
    return std::vector<Values>{dout};
  };
  cases.push_back(std::move(b));

  for (const std::int64_t halves : {2, 1}) {
    KernelCase e = make_case("guided_euler_step", shape + (halves == 1 ? " unguided" : ""),
                             DType::f32, (8 + 4 * halves) * n * share(mask), tolerance);
    e.inputs = with_mask({random_tensor({halves * x[0], Co, x[2], x[3], x[4]}, DType::f32, 7),
                          random_tensor({x[0]}, DType::f32, 8, 0.02f, 0.03f),
                          random_tensor(x, DType::f32, 9)});
    e.run = [=](Tensors& in) {
      ops::guided_euler_step(in[0], 7.0f, in[1], given(in), in[2]);
      return Tensors{in[2]};
    };
    e.reference = [=](const std::vector<Values>& in) {
      const std::int64_t C = x[1], T = x[2], size = x[3] * x[4];
      Values z = in[2];
      const std::int64_t half = (halves - 1) * x[0] * Co * T * size;
      for (std::int64_t i = 0; i < std::ssize(z); ++i) {
        const std::int64_t sample = i / (C * T * size),
                           at = sample * Co * T * size + i % (C * T * size);
        if (shown(in, masked, sample * T + i / size % T))
          z[i] += (in[0][half + at] + 7 * (in[0][at] - in[0][half + at])) * in[1][sample];
      }
      return std::vector<Values>{z};
    };
    cases.push_back(std::move(e));
  }
}

}  // namespace

void diffusion_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    add_flow(cases, {2, 4, 15, 60, 106}, 8, Mask::some);
    add_flow(cases, {8, 4, 4, 32, 32}, 8, Mask::none);
    return;
  }
  for (const Mask kind : {Mask::none, Mask::some, Mask::empty_sample}) {
    add_flow(cases, {2, 4, 3, 4, 6}, 8, kind);
    add_flow(cases, {3, 3, 5, 3, 5}, 3, kind);  // frames of 15: one element an access
  }
  add_flow(cases, {1, 1, 1, 1, 1}, 2, Mask::none);
  add_flow(cases, {1, 2, 1, 80, 120}, 4, Mask::none);  // several blocks a frame
  add_flow(cases, {1, 1, 40, 2, 2}, 1, Mask::some);    // more frames than a warp has lanes
}

}  // namespace weft
