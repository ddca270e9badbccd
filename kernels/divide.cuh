// Division of indices by a number that is known when a kernel is started. The GPU has no
// instruction for it: a division by a run-time number takes some 20 instructions in 32 bits, this
// one three.
#pragma once

#include <bit>
#include <cstdint>

#include "launch.cuh"

namespace weft::kernels {

// Exact for dividends below 2^31 and divisors from 1 to 2^31 - 1.
class Divisor {
 public:
  explicit Divisor(std::int64_t d) : divisor_(static_cast<unsigned>(d)) {
    WEFT_ASSERT(d > 0 && d < std::int64_t{1} << 31);
    // With 2^shift >= d: n / d = n (2^32 + multiplier) / 2^(32 + shift), rounded down.
    shift_ = std::bit_width(divisor_ - 1);
    multiplier_ = static_cast<unsigned>(
        ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift_) - divisor_)) / divisor_ + 1);
  }
  __host__ __device__ __forceinline__ unsigned divide(unsigned n) const {
    return (static_cast<unsigned>((std::uint64_t{n} * multiplier_) >> 32) + n) >> shift_;
  }
  __host__ __device__ __forceinline__ unsigned divisor() const { return divisor_; }
  // n becomes the remainder, the quotient is returned.
  __host__ __device__ __forceinline__ unsigned split(unsigned& n) const {
    const unsigned q = divide(n);
    n -= q * divisor_;
    return q;
  }

 private:
  unsigned divisor_, multiplier_;
  int shift_;
};

// n, where Divisor is exact for all numbers below it.
inline std::int64_t dividend(std::int64_t n) {
  WEFT_ASSERT(n < std::int64_t{1} << 31);
  return n;
}

// Where access i of [frames,H,W,C] is, C in accesses; there are less than 2^31 of them.
struct Places {
  Divisor C, W, H;
  struct Place {
    unsigned c, column, row, frame;
  };
  __device__ __forceinline__ Place of(std::int64_t i) const {
    Place p;
    p.c = static_cast<unsigned>(i);
    p.column = C.split(p.c);
    p.row = W.split(p.column);
    p.frame = H.split(p.row);
    return p;
  }
};

}  // namespace weft::kernels
