// Parameters with values worth differentiating at, and gradients held to differences of the forward itself.
#pragma once

#include <algorithm>
#include <cstring>

#include "../ops/reference.h"
#include "nn/nn.h"

namespace weft::test {

// Fills every parameter of the table with values of ordinary size: the released initialisation has zeros that
// would hide most gradients. Norm weights scatter around 1; rotary frequencies stay as they are defined.
inline void randomise(ParameterTable& table, std::uint64_t seed) {
  table.initialise(seed);
  std::uint64_t stream = 100 * seed;
  for (const auto& p : table.all()) {
    if (p->init.kind == Init::Kind::rotary) continue;
    const double fan_in = static_cast<double>(p->shape.numel() / p->shape[0]);
    const double deviation = p->shape.rank() > 1 ? std::max(0.2, 1 / std::sqrt(fan_in)) : 0.2;
    const double centre = p->name.ends_with("norm.weight") ? 1.0 : 0.0;
    const Vec v = random_values(p->shape.numel(), ++stream, deviation);
    for (std::size_t i = 0; i < v.size(); ++i)
      p->value.data<float>()[i] = static_cast<float>(centre + v[i]);
  }
  table.refresh_working();
}

inline std::vector<float> floats(const Tensor& t) {
  const auto s = t.span<float>();
  return {s.begin(), s.end()};
}

// Slope at 0 along a line, by the central difference of fourth order: in f32 its step may be wide enough for
// the rounding to vanish while the curvature still does.
inline double slope(const std::function<double(double)>& f, double h) {
  return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
}

// Moves `values` along random directions d and holds the slope of `loss` to gradient . d, as a fraction of the
// gradient's length (the expected size of the product).
inline void expect_slope(const std::string& name, const Tensor& values, const Vec& gradient,
                         const std::function<double()>& loss, double bound, double h = 0.01) {
  const double length = std::sqrt(dot(gradient, gradient));
  ASSERT_GT(length, 0) << name << ": a gradient that is zero everywhere proves nothing";
  const std::vector<float> start = floats(values);
  static std::uint64_t stream = 1 << 20;
  const Vec d = random_values(values.numel(), ++stream);
  const double measured = slope(
      [&](double step) {
        for (std::size_t i = 0; i < start.size(); ++i)
          values.data<float>()[i] = static_cast<float>(start[i] + step * d[i]);
        return loss();
      },
      h);
  std::copy(start.begin(), start.end(), values.data<float>());
  EXPECT_NEAR(measured / length, dot(gradient, d) / length, bound) << name;
}

// Every trainable parameter of the table on its own.
inline void expect_parameter_slopes(ParameterTable& table, const std::function<double()>& loss,
                                    double bound, double h = 0.01) {
  for (const auto& p : table.all())
    if (p->trainable) expect_slope(p->name, p->value, to_values(p->grad), loss, bound, h);
}

// g . y, the loss whose gradient with respect to y is g.
inline double against(const Tensor& y, const Vec& g) { return dot(to_values(y), g); }

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

}  // namespace weft::test
