// Cases of ops/norm.h (kernels/norm/ beside src/ops/cpu/norm.cpp and group_norm.cpp).
#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "ops/norm.h"
#include "ops/pointwise.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

constexpr int vectors = 6, shift = 3, scale = 4,
              gate = 2;  // of a block's modulation (docs/models/stdit3.md, Modulation)

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

// `activations` of dtype and, of a residual stream in another type, `streams` are read and written.
KernelCase make(const char* op, const Size& s, DType dtype, const std::string& variant,
                int activations, DType stream, int streams) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("B{} T{} S{} C{}{}{}", s.B, s.T, s.S, s.C, variant,
                        s.first_row > 0 ? " passing" : "");
  if (stream != dtype) c.shape += " f32 stream";
  c.dtype = dtype;
  c.bytes =
      s.elements() * static_cast<double>(activations * size_of(dtype) + streams * size_of(stream));
  // bf16: two sides that round to either side of a tie differ by one unit of the largest value's
  // last place. f32: sums over channels and tokens in different orders.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 1e-5;
  return c;
}

// Calls f(token, its frame's row of the modulation, mean, 1 / deviation) for the tokens of x.
template <class F>
void each_token(const Size& s, const Values& x, const Values& rows, F&& f) {
  for (std::int64_t t = 0; t < s.B * s.T * s.S; ++t) {
    double sum = 0, squares = 0;
    for (std::int64_t c = 0; c < s.C; ++c) sum += x[t * s.C + c];
    const double mean = sum / static_cast<double>(s.C);
    for (std::int64_t c = 0; c < s.C; ++c)
      squares += (x[t * s.C + c] - mean) * (x[t * s.C + c] - mean);
    f(t, static_cast<std::int64_t>(rows[t / s.S]), mean,
      1 / std::sqrt(squares / static_cast<double>(s.C) + 1e-6));
  }
}

// `dtype` of y, `stream` of x.
void add_layer_norm(Cases& cases, const Size& s, DType dtype, DType stream) {
  const Tensor x = random_tensor(s.tokens(), stream, 1, 2.0f, 0.5f);
  const Tensor m = random_tensor(s.modulation(), DType::f32, 2, 0.5f);
  const Tensor dy = random_tensor(s.tokens(), dtype, 3);
  const Shape stats_shape{s.B * s.T * s.S, 2};
  auto forward = make("layer_norm_modulate_forward", s, dtype, "", 1, stream, 1);
  forward.bytes += 8 * s.rows();
  forward.flops = 8 * s.elements();
  forward.inputs = {x, m, frame_rows(s)};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(s.tokens(), dtype), stats = Tensor::empty(stats_shape, DType::f32);
    if (s.first_row > 0) ops::fill_zero(stats);  // not written for frames that pass
    ops::layer_norm_modulate_forward(in[0], in[1], in[2], shift, scale, s.first_row, y, stats);
    return std::vector<Tensor>{y, stats};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0], stats(2 * s.B * s.T * s.S);
    each_token(s, in[0], in[2], [&](std::int64_t t, std::int64_t row, double mean, double rstd) {
      if (row < s.first_row) return;
      stats[2 * t] = mean, stats[2 * t + 1] = rstd;
      const double* use = in[1].data() + row * vectors * s.C;
      for (std::int64_t c = 0; c < s.C; ++c)
        y[t * s.C + c] =
            (y[t * s.C + c] - mean) * rstd * (1 + use[scale * s.C + c]) + use[shift * s.C + c];
    });
    return std::vector<Values>{y, stats};
  };
  cases.push_back(std::move(forward));
  for (const bool accumulate : {false, true}) {
    auto c = make("layer_norm_modulate_backward", s, dtype, accumulate ? " accumulate" : "", 1,
                  stream, accumulate ? 3 : 2);
    if (stream == DType::f32) c.tolerance = 1e-5;
    c.bytes += 8 * s.rows();
    c.flops = 14 * s.elements();
    // Any mean and deviation will do for the backward's formula.
    c.inputs = {x,
                m,
                frame_rows(s),
                random_tensor(stats_shape, DType::f32, 4, 0.1f, 0.6f),
                dy,
                random_tensor(s.modulation(), DType::f32, 5)};
    if (accumulate) c.inputs.push_back(random_tensor(s.tokens(), stream, 6));
    c.run = [=](std::vector<Tensor>& in) {
      Tensor dx = accumulate ? in[6] : Tensor::empty(s.tokens(), stream);
      ops::layer_norm_modulate_backward(in[0], in[1], in[2], shift, scale, s.first_row, in[3],
                                        in[4], dx, accumulate, in[5]);
      return std::vector<Tensor>{dx, in[5]};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values dx = accumulate ? in[6] : Values(in[0].size()), dm = in[5];
      for (std::int64_t t = 0; t < s.B * s.T * s.S; ++t) {
        const auto row = static_cast<std::int64_t>(in[2][t / s.S]);
        const double *at_x = in[0].data() + t * s.C, *g = in[4].data() + t * s.C;
        const double mean = in[3][2 * t], rstd = in[3][2 * t + 1];
        const std::int64_t at = row * vectors * s.C;
        double sum = 0, product = 0;
        for (std::int64_t k = 0; k < s.C && row >= s.first_row; ++k) {
          const double h = (at_x[k] - mean) * rstd, gs = g[k] * (1 + in[1][at + scale * s.C + k]);
          sum += gs / static_cast<double>(s.C), product += gs * h / static_cast<double>(s.C);
          dm[at + shift * s.C + k] += g[k], dm[at + scale * s.C + k] += g[k] * h;
        }
        for (std::int64_t k = 0; k < s.C; ++k)
          dx[t * s.C + k] += row < s.first_row ? g[k]
                                               : rstd * (g[k] * (1 + in[1][at + scale * s.C + k]) -
                                                         sum - (at_x[k] - mean) * rstd * product);
      }
      return std::vector<Values>{dx, dm};
    };
    cases.push_back(std::move(c));
  }
}

// With drop path's factors in place, as the blocks call it; without them into tensors of their own.
void add_gate(Cases& cases, const Size& s, DType dtype, DType stream, bool dropped) {
  const Tensor x = random_tensor(s.tokens(), stream, 1), p = random_tensor(s.tokens(), dtype, 2);
  const Tensor m = random_tensor(s.modulation(), DType::f32, 3);
  Tensor keep;
  if (dropped) {
    keep = Tensor::host({s.B}, DType::f32);
    for (std::int64_t b = 0; b < s.B; ++b) keep.data<float>()[b] = b % 2 == 0 ? 1.25f : 0.0f;
  }
  const char* variant = dropped ? " drop path" : "";
  auto forward = make("gate_residual_forward", s, dtype, variant, 1, stream, 2);
  if (stream == DType::f32) forward.tolerance = 1e-5;
  forward.inputs = {x, p, m, frame_rows(s), keep};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = dropped ? in[0] : Tensor::empty(s.tokens(), stream);
    ops::gate_residual_forward(in[0], in[1], in[2], in[3], gate, in[4], y);
    return std::vector<Tensor>{y};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t i = 0; i < std::ssize(y); ++i) {
      const std::int64_t frame = i / (s.S * s.C),
                         at = static_cast<std::int64_t>(in[3][frame]) * vectors;
      y[i] += in[2][(at + gate) * s.C + i % s.C] * (dropped ? in[4][frame / s.T] : 1) * in[1][i];
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(forward));
  auto backward = make("gate_residual_backward", s, dtype, variant, 2, stream, 1);
  backward.inputs = {x,
                     p,
                     m,
                     frame_rows(s),
                     keep,
                     random_tensor(s.modulation(), DType::f32, 4),
                     random_tensor({s.C}, DType::f32, 5)};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor dp = dropped ? in[1] : Tensor::empty(s.tokens(), dtype);
    Tensor dbias = in[6];
    if (!dropped) dbias = Tensor::empty({s.C}, DType::f32);
    ops::gate_residual_backward(in[0], in[1], in[2], in[3], gate, in[4], dp, in[5], dbias, dropped);
    return std::vector<Tensor>{dp, in[5], dbias};
  };
  backward.reference = [=](const std::vector<Values>& in) {
    Values dp = in[0], dm = in[5], dbias = dropped ? in[6] : Values(in[6].size(), 0.0);
    for (std::int64_t i = 0; i < std::ssize(dp); ++i) {
      const std::int64_t frame = i / (s.S * s.C);
      const std::int64_t at =
          (static_cast<std::int64_t>(in[3][frame]) * vectors + gate) * s.C + i % s.C;
      dp[i] *= dropped ? in[4][frame / s.T] : 1;
      dm[at] += dp[i] * in[1][i];
      dp[i] *= in[2][at];
      dbias[i % s.C] += dp[i];
    }
    return std::vector<Values>{dp, dm, dbias};
  };
  cases.push_back(std::move(backward));
}

void add_affine_norm(Cases& cases, std::int64_t M, std::int64_t C, DType dtype, DType stream) {
  const std::string text = fmt::format("M{} C{}{}", M, C, stream != dtype ? " f32 stream" : "");
  const auto bytes = [&](int streams) {
    return static_cast<double>(M * C * (size_of(dtype) + streams * size_of(stream)) + 8 * M);
  };
  const Tensor x = random_tensor({M, C}, stream, 1, 2.0f, 0.5f),
               w = random_tensor({C}, DType::f32, 2, 0.5f, 1.0f),
               b = random_tensor({C}, DType::f32, 3, 0.5f);
  auto forward = make_case("layer_norm_affine_forward", text, dtype, bytes(1),
                           dtype == DType::bf16 ? 1.0 / 128 : 1e-5);
  forward.inputs = {x, w, b};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({M, C}, dtype), stats = Tensor::empty({M, 2}, DType::f32);
    ops::layer_norm_affine_forward(in[0], in[1], in[2], y, stats);
    return std::vector<Tensor>{y, stats};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0], stats(2 * M);
    each_token({1, 1, M, C}, in[0], {0},
               [&](std::int64_t t, std::int64_t, double mean, double rstd) {
                 stats[2 * t] = mean, stats[2 * t + 1] = rstd;
                 for (std::int64_t c = 0; c < C; ++c)
                   y[t * C + c] = (y[t * C + c] - mean) * rstd * in[1][c] + in[2][c];
               });
    return std::vector<Values>{y, stats};
  };
  cases.push_back(std::move(forward));
  for (const bool accumulate : {false, true}) {
    auto c = make_case("layer_norm_affine_backward", text + (accumulate ? " accumulate" : ""),
                       dtype, bytes(accumulate ? 3 : 2), stream == DType::bf16 ? 1.0 / 128 : 1e-5);
    c.inputs = {x,
                w,
                random_tensor({M, 2}, DType::f32, 4, 0.1f, 0.6f),
                random_tensor({M, C}, dtype, 5),
                random_tensor({M, C}, stream, 6),
                random_tensor({C}, DType::f32, 7),
                random_tensor({C}, DType::f32, 8)};
    c.run = [=](std::vector<Tensor>& in) {
      // Without `accumulate` as for a frozen norm: its own gradients are not wanted.
      Tensor none, dx = accumulate ? in[4] : Tensor::empty({M, C}, stream);
      ops::layer_norm_affine_backward(in[0], in[1], in[2], in[3], dx, accumulate,
                                      accumulate ? in[5] : none, accumulate ? in[6] : none);
      return std::vector<Tensor>{dx, in[5], in[6]};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values dx = accumulate ? in[4] : Values(in[0].size()), dw = in[5], db = in[6];
      for (std::int64_t t = 0; t < M; ++t) {
        const double mean = in[2][2 * t], rstd = in[2][2 * t + 1];
        double sum = 0, product = 0;
        const auto h = [&](std::int64_t k) { return (in[0][t * C + k] - mean) * rstd; };
        for (std::int64_t k = 0; k < C; ++k) {
          const double g = in[3][t * C + k];
          sum += g * in[1][k] / static_cast<double>(C);
          product += g * in[1][k] * h(k) / static_cast<double>(C);
          if (accumulate) dw[k] += g * h(k), db[k] += g;
        }
        for (std::int64_t k = 0; k < C; ++k)
          dx[t * C + k] += rstd * (in[3][t * C + k] * in[1][k] - sum - h(k) * product);
      }
      return std::vector<Values>{dx, dw, db};
    };
    cases.push_back(std::move(c));
  }
}

// B samples of N tokens; `turned`: with a table.
struct HeadRows {
  std::int64_t B, N;
  int heads;
  std::int64_t D;
};

// The pairs of channels c, c + 1 of x, a token's row, turned by the angles of its heads, or back.
void turn_heads(const HeadRows& s, const double* angles, bool back, double* x) {
  for (std::int64_t c = 0; c < s.heads * s.D; c += 2) {
    const double *at = angles + c % s.D, cos = at[0], sin = back ? -at[1] : at[1], a = x[c];
    x[c] = a * cos - x[c + 1] * sin;
    x[c + 1] = a * sin + x[c + 1] * cos;
  }
}

void add_rms_rope(Cases& cases, const HeadRows& s, DType dtype, bool turned) {
  const std::int64_t C = s.heads * s.D, M = s.B * s.N;
  const std::string text =
      fmt::format("B{} N{} H{} D{}{}", s.B, s.N, s.heads, s.D, turned ? "" : " plain");
  const auto bytes = [&](int rows) {
    return static_cast<double>(rows * M * C) * static_cast<double>(size_of(dtype)) +
           (turned ? 4.0 * static_cast<double>(s.N * s.D) : 0);
  };
  const double tolerance = dtype == DType::bf16 ? 1.0 / 128 : 1e-5;
  const Shape shape{s.B, s.N, C};
  Tensor rope;
  if (turned) {
    const Tensor angle = random_tensor({s.N, s.D / 2}, DType::f32, 9, 3.0f);
    rope = Tensor::host({s.N, s.D / 2, 2}, DType::f32);
    for (std::int64_t i = 0; i < angle.numel(); ++i) {
      rope.data<float>()[2 * i] = std::cos(angle.data<float>()[i]);
      rope.data<float>()[2 * i + 1] = std::sin(angle.data<float>()[i]);
    }
  }
  const Tensor x = random_tensor(shape, dtype, 1, 3.0f, 1.0f),
               w = random_tensor({C}, DType::f32, 2, 0.5f, 1.0f);
  constexpr float eps = 1e-3f;  // large, so that it shows
  const auto scale_of = [=](const double* row) {
    double squares = 0;
    for (std::int64_t c = 0; c < C; ++c) squares += row[c] * row[c];
    return 1 / std::sqrt(squares / static_cast<double>(C) + eps);
  };
  auto forward = make_case("rms_rope_forward", text, dtype, bytes(2), tolerance);
  forward.inputs = {x, w, rope};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(shape, dtype);
    ops::rms_rope_forward(in[0], in[1], in[2], s.heads, eps, y);
    return std::vector<Tensor>{y};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t t = 0; t < M; ++t) {
      const double r = scale_of(in[0].data() + t * C);
      for (std::int64_t c = 0; c < C; ++c) y[t * C + c] *= r * in[1][c];
      if (turned) turn_heads(s, in[2].data() + t % s.N * s.D, false, y.data() + t * C);
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(forward));
  // In place and with dw as the model calls it; else as for a frozen norm.
  for (const bool in_place : {true, false}) {
    auto c = make_case("rms_rope_backward", text + (in_place ? "" : " frozen"), dtype, bytes(3),
                       tolerance);
    c.inputs = {x, w, rope, random_tensor(shape, dtype, 3), random_tensor({C}, DType::f32, 4)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor none, dx = in_place ? in[3] : Tensor::empty(shape, dtype);
      ops::rms_rope_backward(in[0], in[1], in[2], s.heads, eps, in[3], dx, in_place ? in[4] : none);
      return std::vector<Tensor>{dx, in[4]};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values dx = in[3], dw = in[4];
      for (std::int64_t t = 0; t < M; ++t) {
        double* g = dx.data() + t * C;
        const double *row = in[0].data() + t * C, r = scale_of(row);
        if (turned) turn_heads(s, in[2].data() + t % s.N * s.D, true, g);
        double along = 0;
        for (std::int64_t k = 0; k < C; ++k)
          along += g[k] * in[1][k] * row[k] * r / static_cast<double>(C);
        for (std::int64_t k = 0; k < C; ++k) {
          if (in_place) dw[k] += g[k] * row[k] * r;
          g[k] = r * (g[k] * in[1][k] - row[k] * r * along);
        }
      }
      return std::vector<Values>{dx, dw};
    };
    cases.push_back(std::move(c));
  }
}

// t [G,K*C], or [G,C] where it is broadcast over the vectors; the table's gradient is wanted or
// not.
void add_modulation(Cases& cases, std::int64_t G, std::int64_t K, std::int64_t C, bool broadcast,
                    bool table_wanted) {
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
  // The element of t that element i of the modulation takes.
  const auto of_t = [=](std::int64_t i) {
    return i / (K * C) * columns + (broadcast ? i % C : i % (K * C));
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values m(G * K * C);
    for (std::int64_t i = 0; i < std::ssize(m); ++i) m[i] = in[0][i % (K * C)] + in[1][of_t(i)];
    return std::vector<Values>{m};
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
  backward.reference = [=](const std::vector<Values>& in) {
    Values dt = in[1], table = in[2];
    for (std::int64_t i = 0; i < std::ssize(in[0]); ++i) {
      dt[of_t(i)] += in[0][i];
      if (table_wanted) table[i % (K * C)] += in[0][i];
    }
    return std::vector<Values>{dt, table};
  };
  cases.push_back(std::move(forward));
  cases.push_back(std::move(backward));
}

void add_modulation_rows(Cases& cases, std::int64_t B, std::int64_t T, bool masked) {
  KernelCase c = make_case("modulation_rows", fmt::format("B{} T{}{}", B, T, masked ? " mask" : ""),
                           DType::f32, static_cast<double>(24 * B + 9 * B * T), 0);
  c.inputs = {random_tensor({B}, DType::f32, 1, 250.0f, 500.0f),
              random_tensor({B}, DType::f32, 2, 4.0f, 24.0f)};
  if (masked) {
    Tensor mask = Tensor::host({B, T}, DType::u8);
    for (std::int64_t i = 0; i < B * T; ++i)
      mask.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i % 3 != 0);
    c.inputs.push_back(mask);
  }
  c.run = [=](std::vector<Tensor>& in) {
    const std::int64_t G = masked ? 2 * B : B;
    Tensor times = Tensor::empty({G}, DType::f32), rates = Tensor::empty({G}, DType::f32);
    Tensor rows = Tensor::empty({B * T}, DType::i32), samples = Tensor::empty({B * T}, DType::i32);
    ops::modulation_rows(in[0], in[1], masked ? in[2] : Tensor(), times, rates, rows, samples);
    return std::vector<Tensor>{times, rates, rows, samples};
  };
  cases.push_back(std::move(c));
}

void add_rms_norm(Cases& cases, std::int64_t M, std::int64_t C, DType dtype) {
  auto c = make_case("rms_norm_forward", fmt::format("M{} C{}", M, C), dtype,
                     2.0 * static_cast<double>(M * C) * static_cast<double>(size_of(dtype)),
                     dtype == DType::bf16 ? 1.0 / 128 : 1e-5);
  c.inputs = {random_tensor({M, C}, dtype, 1, 3.0f, 1.0f),
              random_tensor({C}, DType::f32, 2, 0.5f, 1.0f)};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty({M, C}, dtype);
    ops::rms_norm_forward(in[0], in[1], 1e-6f, y);
    return std::vector<Tensor>{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t r = 0; r < M; ++r) {
      double squares = 0;
      for (std::int64_t i = 0; i < C; ++i) squares += y[r * C + i] * y[r * C + i];
      for (std::int64_t i = 0; i < C; ++i)
        y[r * C + i] *= in[1][i] / std::sqrt(squares / static_cast<double>(C) + 1e-6);
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

struct Groups {
  std::int64_t N, P, C;
  int groups;
  double elements() const { return static_cast<double>(N * P * C); }
};

// `values`: read and written in all.
KernelCase make_group_case(const char* op, const std::string& shape, DType dtype, double values) {
  // f32: sums in another order. bf16: one unit of the largest value's last place where two sides
  // round either way.
  return make_case(op, shape, dtype, values * static_cast<double>(size_of(dtype)),
                   dtype == DType::bf16 ? 1.0 / 128 : 2e-5);
}

// `mean`: far from zero, so that sums that cancel would show.
void add_group_norm(Cases& cases, const Groups& s, DType dtype, bool silu, bool accumulate,
                    float mean) {
  const Shape shape{s.N, s.P, s.C}, stats_shape{s.N, s.groups, 2};
  const std::string text = fmt::format("N{} P{} C{} G{}{}{}", s.N, s.P, s.C, s.groups,
                                       silu ? " SiLU" : "", mean > 2 ? " offset" : "");
  const Tensor x = random_tensor(shape, dtype, 1, 2.0f, mean),
               gamma = random_tensor({s.C}, DType::f32, 2, 0.5f, 1.0f),
               beta = random_tensor({s.C}, DType::f32, 3, 0.5f);
  auto forward = make_group_case("group_norm_forward", text, dtype, 3 * s.elements());
  // A mean of m deviations costs log2 m of the input's bits on either side.
  if (mean > 2) forward.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 1e-4;
  forward.inputs = {x, gamma, beta};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(shape, dtype), stats = Tensor::empty(stats_shape, DType::f32);
    ops::group_norm_forward(in[0], in[1], in[2], s.groups, 1e-6f, silu, y, stats);
    return std::vector<Tensor>{y, stats};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0], stats;
    const std::int64_t width = s.C / s.groups;
    for (std::int64_t n = 0; n < s.N; ++n)
      for (std::int64_t g = 0; g < s.groups; ++g) {
        const auto at = [&](std::int64_t i) {
          return (n * s.P + i / width) * s.C + g * width + i % width;
        };
        const auto count = static_cast<double>(s.P * width);
        double sum = 0, squares = 0;
        for (std::int64_t i = 0; i < s.P * width; ++i) sum += in[0][at(i)];
        for (std::int64_t i = 0; i < s.P * width; ++i)
          squares += (in[0][at(i)] - sum / count) * (in[0][at(i)] - sum / count);
        const double rstd = 1 / std::sqrt(squares / count + 1e-6);
        stats.insert(stats.end(), {sum / count, rstd});
        for (std::int64_t i = 0; i < s.P * width; ++i) {
          const std::int64_t c = at(i) % s.C;
          const double z = (in[0][at(i)] - sum / count) * rstd * in[1][c] + in[2][c];
          y[at(i)] = silu ? fp64::silu(z) : z;
        }
      }
    return std::vector<Values>{y, stats};
  };
  cases.push_back(std::move(forward));
  if (mean > 2) return;
  auto backward = make_group_case("group_norm_backward", text + (accumulate ? " accumulate" : ""),
                                  dtype, (accumulate ? 6 : 5) * s.elements());
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
  backward.reference = [=](const std::vector<Values>& in) {
    Values dx = accumulate ? in[7] : Values(in[4].size()), dgamma = in[5], dbeta = in[6];
    const std::int64_t width = s.C / s.groups;
    for (std::int64_t group = 0; group < s.N * s.groups; ++group) {
      const double mean_x = in[3][2 * group], rstd = in[3][2 * group + 1];
      const auto count = static_cast<double>(s.P * width);
      Values h, g;  // x normalised and its gradient
      std::vector<std::int64_t> at;
      double sum = 0, product = 0;
      for (std::int64_t i = 0; i < s.P * width; ++i) {
        const std::int64_t c = group % s.groups * width + i % width;
        at.push_back((group / s.groups * s.P + i / width) * s.C + c);
        h.push_back((in[0][at[i]] - mean_x) * rstd);
        double d = in[4][at[i]];
        if (silu) d *= fp64::silu_slope(h[i] * in[1][c] + in[2][c]);
        dgamma[c] += d * h[i], dbeta[c] += d;
        g.push_back(d * in[1][c]);
        sum += g[i] / count, product += g[i] * h[i] / count;
      }
      for (std::int64_t i = 0; i < s.P * width; ++i)
        dx[at[i]] += rstd * (g[i] - sum - h[i] * product);
    }
    return std::vector<Values>{dx, dgamma, dbeta};
  };
  cases.push_back(std::move(backward));
}

void add_batch_norm_tangent(Cases& cases, std::int64_t P, std::int64_t C, DType dtype) {
  const Shape shape{1, P, C};
  auto c = make_group_case("batch_norm_tangent_backward", fmt::format("P{} C{}", P, C), dtype,
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

// One position in four is so short that it counts as a linear map.
Tensor with_short_rows(const Tensor& x) {
  const std::int64_t C = x.dim(-1);
  for (std::int64_t r = 1; r < x.numel() / C; r += 4)
    for (std::int64_t i = r * C; i < (r + 1) * C; ++i)
      if (x.dtype() == DType::f32)
        x.data<float>()[i] *= 1e-15f;
      else
        x.data<bf16>()[i] = bf16(static_cast<float>(x.data<bf16>()[i]) * 1e-15f);
  return x;
}

void add_channel_norm(Cases& cases, std::int64_t P, std::int64_t C, DType dtype, bool silu,
                      bool accumulate, bool short_rows = false) {
  const Shape shape{1, P, C};
  const std::string text = fmt::format("P{} C{}{}", P, C, silu ? " SiLU" : "");
  const double elements = static_cast<double>(P * C);
  const Tensor drawn = random_tensor(shape, dtype, 1, 2.0f, 0.5f),
               x = short_rows ? with_short_rows(drawn) : drawn,
               gamma = random_tensor({C}, DType::f32, 2, 0.5f, 1.0f);
  // Of a row: its length over sqrt(C), as it counts.
  const auto scale = [=](const Values& v, std::int64_t r) {
    double squares = 0;
    for (std::int64_t i = r * C; i < (r + 1) * C; ++i) squares += v[i] * v[i];
    return std::sqrt(static_cast<double>(C)) / std::max(std::sqrt(squares), 1e-12);
  };
  auto forward = make_group_case("channel_norm_forward", text, dtype, 2 * elements);
  forward.inputs = {x, gamma};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(shape, dtype);
    ops::channel_norm_forward(in[0], in[1], silu, y);
    return std::vector<Tensor>{y};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values y = in[0];
    for (std::int64_t r = 0; r < P; ++r) {
      const double s = scale(in[0], r);
      for (std::int64_t c = 0; c < C; ++c) {
        const double u = y[r * C + c] * s * in[1][c];
        y[r * C + c] = silu ? fp64::silu(u) : u;
      }
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(forward));

  auto backward = make_group_case("channel_norm_backward", text + (accumulate ? " accumulate" : ""),
                                  dtype, (accumulate ? 4 : 3) * elements);
  backward.inputs = {x, gamma, random_tensor(shape, dtype, 3), random_tensor({C}, DType::f32, 4),
                     accumulate ? random_tensor(shape, dtype, 5) : Tensor()};
  // Gradients of short positions are 1e12 times as large as the others: they have outputs of their
  // own.
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[4] : in[2];  // dy itself
    ops::channel_norm_backward(in[0], in[1], silu, in[2], dx, accumulate, in[3]);
    std::vector<Tensor> out{in[3]};
    if (!short_rows) out.push_back(dx);
    for (std::int64_t r = 0; short_rows && r < P; ++r)
      out.push_back(dx.view({P, C}).slice(r, r + 1));
    return out;
  };
  backward.reference = [=](const std::vector<Values>& in) {
    std::vector<Values> out{in[3]};
    for (std::int64_t r = 0; r < P; ++r) {
      const double s = scale(in[0], r);
      Values b(C);
      double product = 0, squares = 0;
      for (std::int64_t c = 0; c < C; ++c) {
        const double v = in[0][r * C + c], h = v * s;
        const double d = in[2][r * C + c] * (silu ? fp64::silu_slope(h * in[1][c]) : 1);
        out[0][c] += d * h;
        b[c] = d * in[1][c];
        product += b[c] * v;
        squares += v * v;
      }
      if (std::sqrt(squares) <= 1e-12) product = 0;
      for (std::int64_t c = 0; c < C; ++c) {
        const double along = product == 0 ? 0 : in[0][r * C + c] * product / squares;
        b[c] = s * (b[c] - along) + (accumulate ? in[4][r * C + c] : 0);
      }
      if (short_rows || r == 0)
        out.push_back(b);
      else
        out.back().insert(out.back().end(), b.begin(), b.end());
    }
    return out;
  };
  cases.push_back(std::move(backward));
}

}  // namespace

void norm_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    for (const Size& s : {Size{2, 15, 1590, 1152}, Size{8, 4, 256, 1152}})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        add_layer_norm(cases, s, dtype, dtype);
        add_gate(cases, s, dtype, dtype, true);
      }
    // Wan 1.3B at 81 frames of 480x832, and 14B.
    for (const Size& s : {Size{1, 1, 32760, 1536}, Size{1, 1, 8190, 5120}}) {
      add_layer_norm(cases, s, DType::bf16, DType::f32);
      add_gate(cases, s, DType::bf16, DType::f32, false);
      add_affine_norm(cases, s.S, s.C, DType::bf16, DType::f32);
      const HeadRows heads{1, s.S, static_cast<int>(s.C / 128), 128};
      add_rms_rope(cases, heads, DType::bf16, true);
      add_rms_rope(cases, heads, DType::bf16, false);
      add_rms_rope(cases, heads, DType::f32, true);
    }
    add_modulation(cases, 4, 6, 1152, false, true);
    add_modulation(cases, 4, 2, 1152, true, true);
    add_modulation_rows(cases, 8, 15, true);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      // T5-XXL: 32 captions of 300 rows; the norm's width and the gate's.
      add_rms_norm(cases, 9600, 4096, dtype);
      add_rms_norm(cases, 9600, 10240, dtype);
    }
    for (const Groups& s : {Groups{1, 480 * 856, 128, 32}, Groups{1, 240 * 428, 256, 32},
                            Groups{4, 60 * 107, 512, 32}, Groups{1, 17 * 60 * 107, 128, 32}})
      add_group_norm(cases, s, DType::bf16, true, false, 0.5f);
    add_group_norm(cases, {1, 120 * 214, 512, 32}, DType::f32, true, true, 0.5f);
    // Wan's VAE at 480 x 832: a frame of its largest maps, and four of its narrowest.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_channel_norm(cases, 480 * 832, 96, dtype, true, false);
      add_channel_norm(cases, 4 * 60 * 104, 384, dtype, true, true);
    }
    return;
  }
  // One token; one frame; every number of steps that a warp takes over a row, full and not;
  // channels that no vector divides, which the norms do not take; rows too long for a warp; frames
  // that pass; more runs of a modulation row than warps that add them.
  const auto add_norm = [&](const Size& s, DType dtype, DType stream) {
    if (s.C % 4 == 0) add_layer_norm(cases, s, dtype, stream);
  };
  for (const Size& s : {Size{1, 1, 1, 8}, Size{1, 1, 3, 37}, Size{2, 3, 5, 72}, Size{1, 2, 7, 384},
                        Size{1, 2, 3, 580}, Size{1, 3, 5, 1152}, Size{1, 2, 2, 1156},
                        Size{2, 4, 3, 20, 2}, Size{1, 3, 5, 32, 1}, Size{1, 5, 131, 24}})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_norm(s, dtype, dtype);
      if (s.first_row == 0)
        for (const bool dropped : {false, true}) add_gate(cases, s, dtype, dtype, dropped);
    }
  // A residual stream in f32; Wan's widths.
  for (const Size& s : {Size{1, 1, 3, 37}, Size{2, 3, 5, 72}, Size{2, 4, 3, 20, 2},
                        Size{1, 2, 19, 1536}, Size{2, 1, 3, 3072}, Size{1, 1, 5, 5120}}) {
    add_norm(s, DType::bf16, DType::f32);
    if (s.first_row == 0)
      for (const bool dropped : {false, true}) add_gate(cases, s, DType::bf16, DType::f32, dropped);
  }
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Size& s : {Size{1, 1, 9, 1536}, Size{1, 1, 2, 5120}, Size{1, 1, 2, 10240}}) {
      add_norm(s, dtype, dtype);
      add_gate(cases, s, dtype, dtype, true);
    }
  for (const auto& [M, C] : std::vector<std::pair<int, int>>{
           {1, 8}, {5, 36}, {131, 24}, {9, 1536}, {3, 5120}, {2, 5124}}) {
    add_affine_norm(cases, M, C, DType::f32, DType::f32);
    add_affine_norm(cases, M, C, DType::bf16, DType::bf16);
    add_affine_norm(cases, M, C, DType::bf16, DType::f32);
  }
  // One token; heads of few vectors; Wan's; the longest rows.
  for (const HeadRows& s :
       {HeadRows{1, 1, 1, 4}, HeadRows{2, 5, 3, 12}, HeadRows{2, 67, 2, 20},
        HeadRows{1, 9, 12, 128}, HeadRows{1, 3, 40, 128}, HeadRows{1, 2, 80, 128}})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool turned : {true, false}) add_rms_rope(cases, s, dtype, turned);
  for (const DType dtype : {DType::f32, DType::bf16})
    add_rms_rope(cases, {1, 3, 1, 36}, dtype, false);
  for (const bool broadcast : {false, true}) {
    add_modulation(cases, 3, 6, 37, broadcast, true);
    add_modulation(cases, 1, 1, 8, broadcast, false);
  }
  add_modulation_rows(cases, 3, 5, true);
  add_modulation_rows(cases, 1, 1, false);
  add_modulation_rows(cases, 200, 2, true);  // more rows than a block has threads
  // One position; groups of one channel and of all; channels that no vector divides; more positions
  // than a chunk; means far from zero.
  for (const Groups& s : {Groups{1, 1, 8, 2}, Groups{2, 5, 12, 4}, Groups{1, 9, 6, 6},
                          Groups{3, 7, 16, 1}, Groups{2, 131, 8, 4}, Groups{1, 70, 24, 3}})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool silu : {false, true})
        add_group_norm(cases, s, dtype, silu, silu == (dtype == DType::f32), 0.5f);
  add_group_norm(cases, {2, 131, 8, 4}, DType::f32, true, false, 100.0f);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_rms_norm(cases, 3, 8, dtype);
    add_rms_norm(cases, 5, 36, dtype);
    add_rms_norm(cases, 2, 2056, dtype);
    add_batch_norm_tangent(cases, 131, 12, dtype);
    add_batch_norm_tangent(cases, 7, 6, dtype);
    // A warp's rows, full and not; every number of steps; channels that no vector divides; more
    // positions than a chunk.
    constexpr std::pair<int, int> sizes[] = {{1, 8},   {9, 37},   {70, 96},  {5, 384},
                                             {3, 640}, {2, 1152}, {3, 1156}, {300, 12}};
    for (const auto& [P, C] : sizes)
      for (const bool silu : {false, true})
        add_channel_norm(cases, P, C, dtype, silu, silu == (dtype == DType::f32), true);
  }
}

}  // namespace weft
