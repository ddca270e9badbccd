// Parameters with values worth differentiating at, and gradients held to differences of the forward
// itself.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "nn/nn.h"
#include "tests/ops/reference.h"

namespace weft::test {

// Fills every parameter of the table with values of ordinary size: the released initialisation has
// zeros that would hide most gradients. Norm weights scatter around 1; rotary frequencies stay as
// they are defined.
inline void randomise(ParameterTable& table, std::uint64_t seed) {
  table.initialise(seed);
  std::uint64_t stream = 100 * seed;
  for (const auto& p : table.all()) {
    if (p->init.kind == Init::Kind::rotary) continue;
    const double fan_in = static_cast<double>(p->shape.numel() / p->shape[0]);
    const double deviation = p->shape.rank() > 1 ? std::max(0.2, 1 / std::sqrt(fan_in)) : 0.2;
    const double centre = p->name.ends_with("norm.weight") ? 1.0 : 0.0;
    const Vec v = random_values(p->shape.numel(), ++stream, deviation);
    std::vector<float> values(v.size());
    for (std::size_t i = 0; i < v.size(); ++i) values[i] = static_cast<float>(centre + v[i]);
    p->set(0, values);
  }
  table.refresh_working();
}

inline std::vector<float> floats(const Tensor& t) {
  const auto s = t.span<float>();
  return {s.begin(), s.end()};
}

// Slope of f at 0 by Ridders' method: central differences over halved steps, extrapolated to a step
// of 0, the value whose neighbours in the tableau agree best. In f32 no one step serves: wide ones
// see curvature, narrow ones rounding.
inline double slope(const std::function<double(double)>& f, double rounding = 0, double h = 0.04) {
  constexpr int levels = 6;
  double table[levels][levels], best = 0, least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < levels; ++i, h /= 2) {
    table[i][0] = (f(h) - f(-h)) / (2 * h);
    double factor = 1;
    for (int j = 1; j <= i; ++j) {
      factor *= 4;
      table[i][j] = (table[i][j - 1] * factor - table[i - 1][j - 1]) / (factor - 1);
      // Of small steps rounding is the larger error, though two may agree by chance.
      const double spread =
          std::max({std::abs(table[i][j] - table[i][j - 1]),
                    std::abs(table[i][j] - table[i - 1][j - 1]), rounding * 0.01 / h});
      if (spread < least) {
        least = spread;
        best = table[i][j];
      }
    }
  }
  return best;
}

// Moves `values` along random directions d and holds the slope of `loss` to gradient . d, as a
// fraction of the gradient's length (the expected size of the product). `rounding` is what the
// loss's own rounding does to a slope: it counts for gradients that are small beside the loss, and
// never for more than a tenth.
inline void expect_slope(const std::string& name, const Tensor& values, const Vec& gradient,
                         const std::function<double()>& loss, double bound, double rounding = 0) {
  const double length = std::sqrt(dot(gradient, gradient));
  ASSERT_GT(length, 0) << name << ": a gradient that is zero everywhere proves nothing";
  const std::vector<float> start = floats(values);
  // Directions by name: a test alone and a test among others see the same.
  const Vec d = random_values(values.numel(), std::hash<std::string>()(name));
  const double measured = slope(
      [&](double step) {
        for (std::size_t i = 0; i < start.size(); ++i)
          values.data<float>()[i] = static_cast<float>(start[i] + step * d[i]);
        return loss();
      },
      rounding);
  std::copy(start.begin(), start.end(), values.data<float>());
  EXPECT_NEAR(measured / length, dot(gradient, d) / length,
              std::min(bound + rounding / length, 0.1))
      << name;
}

// Every trainable parameter of the table on its own.
inline void expect_parameter_slopes(ParameterTable& table, const std::function<double()>& loss,
                                    double bound) {
  for (const auto& p : table.all())
    if (p->trainable) expect_slope(p->name, p->value, to_values(p->grad), loss, bound);
}

// g . y, the loss whose gradient with respect to y is g.
inline double against(const Tensor& y, const Vec& g) { return dot(to_values(y), g); }

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// Numbers that a test and its PyTorch counterpart make alike: scale * sin((0.37 + k / 16) i^2 + 1.1
// i
// + k), `pattern` of validation/test_numbers.py.
inline Vec pattern(std::int64_t count, double k, double scale = 1.0) {
  Vec v(static_cast<std::size_t>(count));
  for (std::int64_t n = 0; n < count; ++n) {
    const auto i = static_cast<double>(n);
    v[n] = scale * std::sin((0.37 + k / 16) * i * i + 1.1 * i + k);
  }
  return v;
}

}  // namespace weft::test
