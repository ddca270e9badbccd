// The discrete sine transform of the first kind, of many rows at once: y[i] = sum over k of
// x[k] sin(pi (k + 1) (i + 1) / (n + 1)). It is its own inverse, times 2 / (n + 1).
//
// As a product with the matrix of sines, for it runs at the speed of the arithmetic for any n, also
// a prime n + 1, and n is a few hundred. Coefficients of odd and of even k + 1 are summed apart:
// y[i] is their sum and y[n - 1 - i] their difference, which halves the product.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

class SineTransform {
 public:
  explicit SineTransform(std::int64_t n);

  std::int64_t size() const { return n_; }
  // Rows are given with their odd-numbered coefficients ahead of the even-numbered ones:
  // coefficient number() (1 to n) stands at each place.
  std::int64_t number(std::int64_t place) const {
    return place < odd_ ? 2 * place + 1 : 2 * (place - odd_) + 2;
  }
  // sin(pi i / (n + 1)), i >= 0.
  double sine(std::int64_t i) const { return sines_[static_cast<std::size_t>(i % (2 * (n_ + 1)))]; }
  // to [rows,n] from x [rows,n]. `rows` is a multiple of rows_at_once.
  static constexpr std::int64_t rows_at_once = 6;
  void run(const float* x, std::int64_t rows, float* to) const;

 private:
  std::int64_t n_, odd_;
  std::vector<double> sines_;
  // Columns of the matrix by panels of some, [panels][n][columns]: odd coefficients, then even.
  std::vector<float> panels_;
};

}  // namespace weft
