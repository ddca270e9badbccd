#include "random.h"

#include <cstdlib>
#include <numeric>

#include "emulation.h"

namespace emulation {
namespace {

std::uint64_t start() {
  const char* seed = std::getenv("WEFT_EMULATION_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}

std::uint64_t counter = start() << 32;

}  // namespace

void set_seed(unsigned long long seed) { counter = std::uint64_t{seed} << 32; }

std::uint64_t random_bits() {
  // splitmix64
  std::uint64_t z = counter += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

Permutation::Permutation(std::uint64_t n) : n_(n), left_(n), at_(0), stride_(1) {
  if (n < 2 || random_below(8) == 0) return;
  at_ = random_below(n);
  do stride_ = 1 + random_below(n - 1);
  while (std::gcd(stride_, n) != 1);
}

std::uint64_t Permutation::next() {
  const std::uint64_t value = at_;
  at_ = (at_ + stride_) % n_;
  --left_;
  return value;
}

}  // namespace emulation
