// The one source of random orders, started by WEFT_EMULATION_SEED.
#pragma once

#include <cstdint>
#include <utility>

namespace emulation {

std::uint64_t random_bits();
inline std::uint64_t random_below(std::uint64_t n) { return random_bits() % n; }

template <class T>
void shuffle_order(T* values, int n) {
  for (int i = n - 1; i > 0; --i)
    std::swap(values[i], values[random_below(static_cast<std::uint64_t>(i) + 1)]);
}

// 0 .. n-1 in a random order without storing it: an affine walk, and now and then the plain order.
class Permutation {
 public:
  explicit Permutation(std::uint64_t n);
  bool more() const { return left_ > 0; }
  std::uint64_t next();

 private:
  std::uint64_t n_, left_, at_, stride_;
};

}  // namespace emulation
