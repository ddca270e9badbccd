// Cases of ops/pointwise.h (kernels/pointwise.cu beside src/ops/cpu/pointwise.cpp).
#include <fmt/format.h>

#include "ops/pointwise.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Size {
  std::int64_t count;
  bool shifted = false;    // every tensor starts one element further: no wide access fits
  float deviation = 1.0f;  // large: where exponentials leave f32's range
};

// `moved` counts bytes an element.
KernelCase make(const char* op, const Size& s, DType dtype, const char* variant, double moved) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("N{}{}{}{}", s.count, s.shifted ? " shifted" : "",
                        s.deviation > 1 ? " extreme" : "", variant);
  c.dtype = dtype;
  c.bytes = moved * static_cast<double>(s.count);
  // bf16: one unit of the last place of the largest value.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 2e-6;
  return c;
}

// A tensor of one element more than the case, if it is a shifted one.
Tensor source(const Size& s, DType dtype, std::uint64_t seed) {
  return random_tensor({s.count + (s.shifted ? 1 : 0)}, dtype, seed, s.deviation);
}
Tensor result(const Size& s, DType dtype) {
  return Tensor::empty({s.count + (s.shifted ? 1 : 0)}, dtype);
}
// The part that the operation works on.
Tensor part(const Size& s, const Tensor& t) { return s.shifted ? t.slice(1, s.count + 1) : t; }

Values part(const Size& s, const Values& v) {
  return s.shifted ? Values(v.begin() + 1, v.end()) : v;
}

void add_gelu(Cases& cases, const Size& s, DType dtype) {
  const auto width = static_cast<double>(size_of(dtype));
  const Tensor z = source(s, dtype, 1), dy = source(s, dtype, 2);
  auto forward = make("gelu_forward", s, dtype, "", 2 * width);
  forward.inputs = {z};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, dtype));
    ops::gelu_forward(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::map(part(s, in[0]), fp64::gelu)};
  };
  cases.push_back(std::move(forward));
  // As the MLP calls it (gradient over gradient, activation over its argument), and without the
  // activation.
  for (const bool again : {true, false}) {
    auto c = make("gelu_backward", s, dtype, again ? " in place" : "", (again ? 4 : 3) * width);
    c.inputs = {z, dy};
    c.run = [=](std::vector<Tensor>& in) {
      const Tensor at = part(s, in[0]), gradient = part(s, in[1]);
      Tensor dz = again ? gradient : part(s, result(s, dtype)), y = again ? at : Tensor();
      ops::gelu_backward(at, gradient, dz, y);
      return again ? std::vector<Tensor>{dz, y} : std::vector<Tensor>{dz};
    };
    c.reference = [=](const std::vector<Values>& in) {
      const Values at = part(s, in[0]);
      const Values dz =
          fp64::map(at, part(s, in[1]), [](double x, double d) { return d * fp64::gelu_slope(x); });
      return again ? std::vector<Values>{dz, fp64::map(at, fp64::gelu)} : std::vector<Values>{dz};
    };
    cases.push_back(std::move(c));
  }
}

void add_silu(Cases& cases, const Size& s) {
  const Tensor z = source(s, DType::f32, 1), dy = source(s, DType::f32, 2);
  auto forward = make("silu_forward", s, DType::f32, "", 8);
  forward.inputs = {z};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, DType::f32));
    ops::silu_forward(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::map(part(s, in[0]), fp64::silu)};
  };
  cases.push_back(std::move(forward));
  for (const bool accumulate : {false, true}) {
    auto c =
        make("silu_backward", s, DType::f32, accumulate ? " accumulate" : "", accumulate ? 16 : 12);
    c.inputs = {z, dy, source(s, DType::f32, 3)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor dz = part(s, accumulate ? in[2] : result(s, DType::f32));
      ops::silu_backward(part(s, in[0]), part(s, in[1]), dz, accumulate);
      return std::vector<Tensor>{dz};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values dz = fp64::map(part(s, in[0]), part(s, in[1]),
                            [](double x, double d) { return d * fp64::silu_slope(x); });
      return std::vector<Values>{fp64::added(dz, accumulate ? part(s, in[2]) : Values())};
    };
    cases.push_back(std::move(c));
  }
}

void add_sigmoid(Cases& cases, const Size& s, DType dtype) {
  const auto width = static_cast<double>(size_of(dtype));
  for (const bool in_place : {false, true}) {
    auto c = make("sigmoid_forward", s, dtype, in_place ? " in place" : "", 2 * width);
    c.inputs = {source(s, dtype, 1)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = part(s, in_place ? in[0] : result(s, dtype));
      ops::sigmoid_forward(part(s, in[0]), y);
      return std::vector<Tensor>{y};
    };
    c.reference = [=](const std::vector<Values>& in) {
      return std::vector<Values>{fp64::map(part(s, in[0]), fp64::sigmoid)};
    };
    cases.push_back(std::move(c));
    auto back = make("sigmoid_backward", s, dtype, in_place ? " in place" : "", 3 * width);
    back.inputs = {source(s, dtype, 2), source(s, dtype, 3)};
    back.run = [=](std::vector<Tensor>& in) {
      Tensor dx = part(s, in_place ? in[1] : result(s, dtype));
      ops::sigmoid_backward(part(s, in[0]), part(s, in[1]), dx);
      return std::vector<Tensor>{dx};
    };
    back.reference = [=](const std::vector<Values>& in) {
      return std::vector<Values>{fp64::map(part(s, in[0]), part(s, in[1]),
                                           [](double y, double d) { return d * y * (1 - y); })};
    };
    cases.push_back(std::move(back));
  }
}

void add_moves(Cases& cases, const Size& s, DType dtype) {
  const auto width = static_cast<double>(size_of(dtype));
  auto add = make("add_inplace", s, dtype, "", 3 * width);
  add.inputs = {source(s, dtype, 1), source(s, dtype, 2)};
  add.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, in[1]);
    ops::add_inplace(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  add.reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::added(part(s, in[0]), part(s, in[1]))};
  };
  cases.push_back(std::move(add));
  auto zero = make("fill_zero", s, dtype, "", width);
  zero.tolerance = 0;
  zero.inputs = {source(s, dtype, 1)};
  zero.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, in[0]);
    ops::fill_zero(y);
    return std::vector<Tensor>{in[0]};  // with the element before it, which must stay
  };
  zero.reference = [=](const std::vector<Values>& in) {
    Values y(in[0].size());
    if (s.shifted) y[0] = in[0][0];
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(zero));
  for (const DType to : {DType::f32, DType::bf16}) {
    auto c = make("convert", s, dtype, to == DType::f32 ? " to f32" : " to bf16",
                  width + static_cast<double>(size_of(to)));
    c.tolerance = 0;  // both sides round to nearest even
    c.inputs = {source(s, dtype, 1)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = part(s, result(s, to));
      ops::convert(part(s, in[0]), y);
      return std::vector<Tensor>{y};
    };
    cases.push_back(std::move(c));
  }
}

// Stored latents: f16 to f32, subnormal numbers among them.
void add_widening(Cases& cases, const Size& s) {
  auto c = make("convert", s, DType::f16, " to f32", 6);
  c.tolerance = 0;
  const Tensor values = source(s, DType::f32, 1);
  Tensor half = Tensor::host(values.shape(), DType::f16);
  for (std::int64_t i = 0; i < values.numel(); ++i)
    half.data<f16>()[i] = f16(values.data<float>()[i] * (i % 8 == 0 ? 0x1p-20f : 1.0f));
  c.inputs = {half};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = part(s, result(s, DType::f32));
    ops::convert(part(s, in[0]), y);
    return std::vector<Tensor>{y};
  };
  cases.push_back(std::move(c));
}

void add_gated_gelu(Cases& cases, std::int64_t M, std::int64_t C, DType dtype) {
  auto c = make_case("gated_gelu_forward", fmt::format("M{} C{}", M, C), dtype,
                     3.0 * static_cast<double>(M * C) * static_cast<double>(size_of(dtype)),
                     dtype == DType::bf16 ? 1.0 / 128 : 1e-5);
  c.inputs = {random_tensor({2, M, C}, dtype, 3, 2.0f)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({M, C}, dtype);
    ops::gated_gelu_forward(in[0], y);
    return std::vector<Tensor>{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    const Values gate(in[0].begin(), in[0].begin() + M * C),
        value(in[0].begin() + M * C, in[0].end());
    return std::vector<Values>{
        fp64::map(gate, value, [](double g, double v) { return fp64::gelu(g) * v; })};
  };
  cases.push_back(std::move(c));
}

// `dtype` of what is added.
void add_add_rows(Cases& cases, std::int64_t G, std::int64_t C, DType dtype) {
  auto c = make_case("add_rows", fmt::format("G{} C{}", G, C), dtype,
                     static_cast<double>(G * C * (8 + size_of(dtype))), 1e-6);
  c.inputs = {random_tensor({G, C}, DType::f32, 3), random_tensor({G, C}, dtype, 4)};
  c.run = [](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(in[0].shape(), DType::f32);
    ops::add_rows(in[0], in[1], y);
    return std::vector<Tensor>{y};
  };
  c.reference = [](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::added(in[0], in[1])};
  };
  cases.push_back(std::move(c));
}

void add_rectifiers(Cases& cases, const Shape& x, DType dtype) {
  const std::int64_t n = x.numel();
  using Run = std::function<std::vector<Tensor>(std::vector<Tensor>&)>;
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs, Run run) {
    auto c = make_case(op, x.str(), dtype,
                       static_cast<double>(values) * static_cast<double>(size_of(dtype)),
                       dtype == DType::bf16 ? 1.0 / 128 : 2e-5);
    c.inputs = std::move(inputs);
    c.run = std::move(run);
    cases.push_back(std::move(c));
  };
  const Tensor a = random_tensor(x, dtype, 1), b = random_tensor(x, dtype, 2);
  add("leaky_relu_forward", 2 * n, {a}, [](std::vector<Tensor>& in) {
    ops::leaky_relu_forward(in[0], 0.2f, in[0]);
    return std::vector<Tensor>{in[0]};
  });
  cases.back().reference = [](const std::vector<Values>& in) {
    return std::vector<Values>{fp64::map(in[0], [](double v) { return v > 0 ? v : 0.2f * v; })};
  };
  add("leaky_relu_backward", 3 * n, {a, b}, [](std::vector<Tensor>& in) {
    ops::leaky_relu_backward(in[0], 0.2f, in[1], in[1]);
    return std::vector<Tensor>{in[1]};
  });
  cases.back().reference = [](const std::vector<Values>& in) {
    return std::vector<Values>{
        fp64::map(in[0], in[1], [](double y, double dy) { return y > 0 ? dy : 0.2f * dy; })};
  };
  for (const bool by_factor : {false, true}) {
    add("scaled_add", (by_factor ? 3 : 2) * n,
        {a, by_factor ? random_tensor({1}, DType::f32, 4) : Tensor(),
         random_tensor(x, DType::f32, 5)},
        [=](std::vector<Tensor>& in) {
          ops::scaled_add(in[0], 1.5f, in[1], in[2], by_factor);
          return std::vector<Tensor>{in[2]};
        });
    cases.back().reference = [=](const std::vector<Values>& in) {
      const double factor = by_factor ? 1.5 * in[1][0] : 1.5;
      return std::vector<Values>{fp64::added(fp64::map(in[0], [=](double v) { return factor * v; }),
                                             by_factor ? in[2] : Values())};
    };
  }
}

void add_channel_affine(Cases& cases, ops::Channels channels, DType dtype, bool accumulate) {
  const bool last = channels == ops::Channels::last;
  const Shape z = last ? Shape{2, 3, 5, 4} : Shape{2, 4, 3, 5};
  const Tensor affine = random_tensor({2, 4}, DType::f32, 2);
  const auto add = [&](const char* op, std::vector<Tensor> inputs, auto run) {
    auto c = make_case(
        op, fmt::format("{} scaled{}", last ? "last" : "first", accumulate ? " accumulate" : ""),
        dtype, 0, dtype == DType::bf16 ? 1.0 / 128 : 2e-5);
    c.inputs = std::move(inputs);
    c.run = [=](std::vector<Tensor>& in) { return std::vector<Tensor>{run(in)}; };
    cases.push_back(std::move(c));
  };
  add("channel_affine_forward", {random_tensor(z, dtype, 6), affine}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(z, DType::f32);
    ops::channel_affine_forward(in[0], in[1], channels, y);
    return y;
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    const std::int64_t inner = last ? 1 : 3 * 5;
    Values y = in[0];
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t c = i / inner % 4;
      y[i] = y[i] * in[1][c] + in[1][4 + c];
    }
    return std::vector<Values>{y};
  };
  add("channel_affine_backward",
      {random_tensor(z, DType::f32, 7), affine, random_tensor(z, dtype, 8)},
      [=](std::vector<Tensor>& in) {
        ops::channel_affine_backward(in[0], in[1], channels, in[2], accumulate);
        return in[2];
      });
  cases.back().reference = [=](const std::vector<Values>& in) {
    const std::int64_t inner = last ? 1 : 3 * 5;
    Values y = in[0];
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t c = i / inner % 4;
      y[i] *= in[1][c];
    }
    return std::vector<Values>{fp64::added(y, accumulate ? in[2] : Values())};
  };
}

void add_scale_channels(Cases& cases, const Shape& x, DType dtype) {
  cases.push_back(bandwidth_case(
      "scale_channels", x.str(), dtype, 2 * x.numel(),
      {random_tensor(x, dtype, 1), random_tensor({x[0], x[x.rank() - 1]}, DType::f32, 2)},
      [=](std::vector<Tensor>& in) {
        Tensor y = Tensor::empty(x, dtype);
        ops::scale_channels(in[0], in[1], y);
        ops::scale_channels(in[0], in[1], in[0]);  // in place
        return std::vector<Tensor>{y, in[0]};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    const std::int64_t C = x[x.rank() - 1], each = x.numel() / x[0];
    for (std::int64_t i = 0; i < x.numel(); ++i) y[i] *= in[1][i / each * C + i % C];
    return std::vector<Values>{y, y};
  };
}

}  // namespace

void pointwise_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // The MLP's hidden layer and the residual stream of one sample at 51 frames 480p.
    const std::int64_t tokens = 15 * 1590;
    add_gelu(cases, {tokens * 4608}, DType::bf16);
    add_gelu(cases, {tokens * 1152}, DType::f32);
    add_silu(cases, {1 << 22});
    add_sigmoid(cases, {1 << 22}, DType::f32);
    for (const DType dtype : {DType::f32, DType::bf16}) add_moves(cases, {tokens * 1152}, dtype);
    add_widening(cases, {tokens * 1152});
    for (const DType dtype : {DType::f32, DType::bf16}) {
      // T5-XXL: 32 captions of 300 rows, the widths of its residual stream and its gate.
      add_gated_gelu(cases, 9600, 4096, dtype);
      add_gated_gelu(cases, 9600, 10240, dtype);
    }
    add_add_rows(cases, 8, 9 * 128, DType::f32);
    add_add_rows(cases, 32760, 1536, DType::bf16);
    // VGG16's first layer on four frames of 256 x 256.
    add_rectifiers(cases, {1, 4, 256, 256, 64}, DType::bf16);
    add_scale_channels(cases, {2, 1, 64, 64, 512}, DType::bf16);
    return;
  }
  // One element; less than an access; a rest behind whole accesses; several blocks; addresses that
  // are not aligned; arguments where exponentials overflow.
  for (const Size& s :
       {Size{1}, Size{7}, Size{1003}, Size{20005}, Size{1003, true}, Size{517, false, 1e4f}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_gelu(cases, s, dtype);
      add_moves(cases, s, dtype);
      add_sigmoid(cases, s, dtype);
    }
    add_silu(cases, s);
    if (s.deviation == 1) add_widening(cases, s);
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_gated_gelu(cases, 3, 8, dtype);
    add_gated_gelu(cases, 5, 37, dtype);
    add_gated_gelu(cases, 2, 2056, dtype);
    add_rectifiers(cases, {1, 2, 5, 4, 3}, dtype);
    add_scale_channels(cases, {3, 2, 2, 3, 5}, dtype);
    add_scale_channels(cases, {2, 1, 3, 3, 24}, dtype);
    add_scale_channels(cases, {1, 5}, dtype);  // losses of samples by masks
    for (const auto channels : {ops::Channels::first, ops::Channels::last})
      add_channel_affine(cases, channels, dtype, dtype == DType::f32);
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_add_rows(cases, 3, 9 * 128, dtype);
    add_add_rows(cases, 1, 9, dtype);
  }
}

}  // namespace weft
