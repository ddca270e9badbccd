// fp64 references, written as the formulas stand in docs/models, and the means to compare
// operations with them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "core/philox.h"
#include "tensor/tensor.h"

namespace weft::test {

using Vec = std::vector<double>;

// An arena for the test's tensors.
class OpTest : public testing::Test {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

inline Vec random_values(std::int64_t n, std::uint64_t stream, double scale = 1.0) {
  const Philox random(7, Purpose::init, 0, stream);
  Vec v(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = scale * static_cast<double>(random.normal(static_cast<std::uint32_t>(i)));
  return v;
}

inline Tensor to_tensor(const Vec& v, const Shape& shape, DType dtype = DType::f32) {
  Tensor t = Tensor::empty(shape, dtype);
  for (std::size_t i = 0; i < v.size(); ++i) {
    if (dtype == DType::f32) t.data<float>()[i] = static_cast<float>(v[i]);
    if (dtype == DType::bf16) t.data<bf16>()[i] = bf16(static_cast<float>(v[i]));
    if (dtype == DType::i32) t.data<std::int32_t>()[i] = static_cast<std::int32_t>(v[i]);
    if (dtype == DType::u8) t.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(v[i]);
  }
  return t;
}

inline Vec to_values(const Tensor& t) {
  Vec v(static_cast<std::size_t>(t.numel()));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = t.dtype() == DType::bf16 ? static_cast<double>(static_cast<float>(t.data<bf16>()[i]))
                                    : static_cast<double>(t.data<float>()[i]);
  return v;
}

// The values as the operation saw them: rounded to its type.
inline Vec rounded(const Vec& v, DType dtype) {
  return to_values(to_tensor(v, {std::int64_t(v.size())}, dtype));
}

// A tensor whose every element is NaN: an output that is not written shows.
inline Tensor poisoned(const Shape& shape, DType dtype = DType::f32) {
  return to_tensor(Vec(static_cast<std::size_t>(shape.numel()), std::nan("")), shape, dtype);
}

// ||a - b|| / ||b||.
inline double relative_error(const Vec& a, const Vec& b) {
  double difference = 0, norm = 0;
  EXPECT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
}

// Rounding of n-term sums in f32, and of results stored in bf16 (2^-9 each, with room for a few).
inline double tolerance(DType dtype, double terms = 64) {
  return dtype == DType::bf16 ? 4 * 0x1p-9 : 4 * 0x1p-24 * std::sqrt(terms);
}

inline double dot(const Vec& a, const Vec& b) {
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

// Holds `gradient` to central differences of the fp64 function `f` at `at`, in up to 60 places
// spread over it.
inline void expect_gradient(const std::function<double(const Vec&)>& f, const Vec& at,
                            const Vec& gradient, double bound) {
  ASSERT_EQ(at.size(), gradient.size());
  const std::size_t places = std::min<std::size_t>(60, at.size());
  double difference = 0, norm = 0;
  for (std::size_t k = 0; k < places; ++k) {
    const std::size_t i =
        k * at.size() / places + (k * 7919) % std::max<std::size_t>(1, at.size() / places);
    Vec x = at;
    const double h = 1e-5;
    x[i] = at[i] + h;
    const double up = f(x);
    x[i] = at[i] - h;
    const double slope = (up - f(x)) / (2 * h);
    difference += (gradient[i] - slope) * (gradient[i] - slope);
    norm += slope * slope;
  }
  EXPECT_GT(norm, 0) << "a gradient that is zero everywhere proves nothing";
  EXPECT_LT(std::sqrt(difference / norm), bound);
}

}  // namespace weft::test
