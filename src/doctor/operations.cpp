// Whether the operations that networks are made of compute rightly on this rank's device: a few of
// each kind, on small inputs. tests/kernels/ has every operation, at every size.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "doctor/measure.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/reduce.h"
#include "tensor/arena.h"
#include "tensor/device.h"

namespace weft {
namespace {

// Standard normals, the same to the bit on every device.
std::vector<float> normals(const Shape& shape, std::uint64_t seed) {
  const Philox random(seed, Purpose::noise, 0, 0);
  std::vector<float> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(random.normal(static_cast<std::uint32_t>(i)));
  return values;
}
// The same in the current arena, on its device.
Tensor draw(const Shape& shape, DType dtype, std::uint64_t seed) {
  const std::vector<float> values = normals(shape, seed);
  if (dtype == DType::f32) return Tensor::from_host(std::span<const float>(values), shape);
  const std::vector<bf16> rounded(values.begin(), values.end());
  return Tensor::from_host(std::span<const bf16>(rounded), shape);
}

constexpr std::int64_t rows = 77, columns = 104, depth = 200;  // of the product

Tensor product(DType dtype) {
  const Tensor x = draw({rows, depth}, dtype, 1), w = draw({columns, depth}, dtype, 2);
  Tensor y = Tensor::empty({rows, columns}, dtype);
  ops::linear_forward(x, w, Tensor(), Tensor(), y);
  return y;
}

Tensor attention(DType dtype) {
  const std::int64_t T = 2, S = 77, H = 2, D = 72;
  const Tensor qkv = draw({1, T, S, 3, H, D}, dtype, 1);
  Tensor y = Tensor::empty({1, T, S, H * D}, dtype), lse = Tensor::empty({T, H, S}, DType::f32);
  ops::self_attention_forward(qkv, Tensor(), Tensor(), Tensor(), ops::Axis::space, y, lse);
  return y;
}

Tensor layer_norm(DType dtype) {
  const std::int64_t frames = 2, S = 33, C = 144;
  const Tensor x = draw({frames, S, C}, dtype, 1), m = draw({1, 2, C}, DType::f32, 2);
  const std::vector<std::int32_t> zeros(frames, 0);
  const Tensor use = Tensor::from_host(std::span<const std::int32_t>(zeros), {frames});
  Tensor y = Tensor::empty(x.shape(), dtype), stats = Tensor::empty({frames * S, 2}, DType::f32);
  ops::layer_norm_modulate_forward(x, m, use, 0, 1, 0, y, stats);
  return y;
}

Tensor convolution(DType dtype) {
  const ops::Conv conv = ops::Conv::same(3);
  const Tensor x = draw({1, 1, 18, 22, 32}, dtype, 1), w = draw({48, 32, 3, 3}, dtype, 2);
  Tensor y = Tensor::empty(conv.output(x.shape(), 48), dtype);
  ops::conv_forward(x, w, Tensor(), Tensor(), conv, y);
  return y;
}

Tensor reduction(DType dtype) {
  Tensor sum = Tensor::empty({1}, DType::f64);
  ops::sum_of_squares(draw({10007}, dtype, 1), sum, false);
  return sum;
}

Tensor optimizer_step(DType dtype) {
  const ops::AdamW a{1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.1f, 0.001f, 0.19f, 0.002f, 1.0f, 0};
  const Shape n{5003};
  const double four = 4;
  const Tensor squares = Tensor::from_host(std::span<const double>(&four, 1), {1});
  // A second moment is positive: squares of what was drawn.
  std::vector<float> moment = normals(n, 4);
  for (float& v : moment) v = v * v;
  Tensor p = draw(n, dtype, 1), m = draw(n, dtype, 3), none,
         v = Tensor::from_host(std::span<const float>(moment), n);
  ops::adamw_step(a, squares, draw(n, dtype, 2), p, m, v, none, none);
  return p;
}

// `tolerance`: the largest difference that another order of sums and another rounding explain, as a
// share of the largest value.
struct Operation {
  const char* name;
  Tensor (*run)(DType);
  DType dtype;
  double tolerance;
};
constexpr Operation operations[] = {
    {"matrix product f32", product, DType::f32, 8e-6},
    {"matrix product bf16", product, DType::bf16, 1.0 / 64},
    {"attention f32", attention, DType::f32, 5e-6},
    {"attention bf16", attention, DType::bf16, 4.0 / 256},
    {"layer norm", layer_norm, DType::bf16, 1.0 / 128},
    {"3x3 convolution", convolution, DType::f32, 2e-5},
    {"sum of squares", reduction, DType::f32, 1e-12},
    {"optimizer step", optimizer_step, DType::f32, 1e-5},
};

std::vector<double> values_of(const Tensor& on_device) {
  const Tensor t = on_device.to_host();
  std::vector<double> values;
  for (std::int64_t i = 0; i < t.numel(); ++i)
    values.push_back(t.dtype() == DType::f64   ? t.data<double>()[i]
                     : t.dtype() == DType::f32 ? static_cast<double>(t.data<float>()[i])
                                               : static_cast<double>(float(t.data<bf16>()[i])));
  return values;
}

// The product by its definition.
std::vector<double> plain_product(DType dtype) {
  const auto x = values_of(draw({rows, depth}, dtype, 1)),
             w = values_of(draw({columns, depth}, dtype, 2));
  std::vector<double> y;
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c) {
      y.push_back(0);
      for (std::size_t k = 0; k < depth; ++k) y.back() += x[r * depth + k] * w[c * depth + k];
    }
  return y;
}

}  // namespace

void check_operations(RankFacts& facts) {
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const auto host_arena = Arena::reserve(std::size_t{1} << 30, DeviceKind::cpu);
  for (const Operation& o : operations) {
    if (!on_cuda() && o.run != product) continue;
    std::vector<double> wanted, got;
    {
      const ArenaScope on_host(*host_arena);
      wanted = on_cuda() ? values_of(o.run(o.dtype)) : plain_product(o.dtype);
    }
    const ArenaScope scope(*arena);
    try {
      got = values_of(o.run(o.dtype));
    } catch (const Error& e) {
      // A GPU without cuDNN makes no convolutions. That is no fault of jobs that need none.
      if (o.run != convolution || e.code() != Exit::usage) throw;
      continue;
    }
    double largest = 0;
    for (const double v : wanted) largest = std::max(largest, std::abs(v));
    // Negated, so that NaN counts as wrong.
    facts.operations[o.name] = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
      if (!(std::abs(got[i] - wanted[i]) <= o.tolerance * largest)) ++facts.operations[o.name];
  }
}

}  // namespace weft
