#include "models/face/sine_transform.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace weft {
namespace {

constexpr std::int64_t columns = 16, group = SineTransform::rows_at_once;

// sums [group,columns] = rows x [group] of `stride` values times a panel's `count` rows.
__attribute__((target("avx2,fma"))) void multiply(const float* x, std::int64_t stride,
                                                  const float* panel, std::int64_t count,
                                                  float* sums) {
  __m256 low[group], high[group];
  for (std::int64_t r = 0; r < group; ++r) low[r] = high[r] = _mm256_setzero_ps();
  for (std::int64_t k = 0; k < count; ++k, panel += columns) {
    const __m256 a = _mm256_loadu_ps(panel), b = _mm256_loadu_ps(panel + 8);
#pragma GCC unroll 6
    for (std::int64_t r = 0; r < group; ++r) {
      const __m256 value = _mm256_broadcast_ss(x + r * stride + k);
      low[r] = _mm256_fmadd_ps(value, a, low[r]);
      high[r] = _mm256_fmadd_ps(value, b, high[r]);
    }
  }
#pragma GCC unroll 6
  for (std::int64_t r = 0; r < group; ++r) {
    _mm256_storeu_ps(sums + r * columns, low[r]);
    _mm256_storeu_ps(sums + r * columns + 8, high[r]);
  }
}

}  // namespace

SineTransform::SineTransform(std::int64_t n)
    : n_(n), odd_((n + 1) / 2), sines_(static_cast<std::size_t>(2 * (n + 1))) {
  for (std::int64_t i = 0; i < std::ssize(sines_); ++i)
    sines_[static_cast<std::size_t>(i)] =
        std::sin(M_PI * static_cast<double>(i) / static_cast<double>(n + 1));
  const std::int64_t count = (odd_ + columns - 1) / columns;
  panels_.resize(static_cast<std::size_t>(count * n * columns));
  float* to = panels_.data();
  for (std::int64_t p = 0; p < count; ++p)
    for (std::int64_t place = 0; place < n; ++place)
      for (std::int64_t i = p * columns; i < (p + 1) * columns; ++i)
        *to++ = i < odd_ ? static_cast<float>(sine(number(place) * (i + 1))) : 0.0f;
}

void SineTransform::run(const float* x, std::int64_t rows, float* to) const {
  WEFT_ASSERT(rows % group == 0);
  float odd[group * columns], even[group * columns];
  const float* panel = panels_.data();
  for (std::int64_t first = 0; first < odd_; first += columns, panel += n_ * columns) {
    const std::int64_t last = std::min(first + columns, odd_);
    for (std::int64_t row = 0; row < rows; row += group) {
      const float* const own = x + row * n_;
      multiply(own, n_, panel, odd_, odd);
      multiply(own + odd_, n_, panel + odd_ * columns, n_ - odd_, even);
      for (std::int64_t r = 0; r < group; ++r) {
        float* const result = to + (row + r) * n_;
        const float *const a = odd + r * columns - first, *const b = even + r * columns - first;
        // The middle one of an odd number is written twice; its even coefficients have sines of 0.
        for (std::int64_t i = first; i < last; ++i) {
          result[n_ - 1 - i] = a[i] - b[i];
          result[i] = a[i] + b[i];
        }
      }
    }
  }
}

}  // namespace weft
