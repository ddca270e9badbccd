// A number that says whether two tensors hold the same bits.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// sum f64 [2] = low and high half (whole numbers) of the sum, modulo 2^64, of mix(i, word i) over the 32-bit words of x: the
// same on every device, in any order of addition. A single changed bit always shows; so do swapped words. It guards against
// hardware, not against people. x takes a multiple of 4 bytes.
WEFT_OP(checksum, void(const Tensor& x, Tensor& sum));

// splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) of word and place.
// Of two words at one place, different words always give different results: every step is a bijection.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline constexpr std::uint64_t
    checksum_mix(std::uint64_t place, std::uint32_t word) {
  std::uint64_t z = (place << 32 ^ word) + place * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace weft::ops
