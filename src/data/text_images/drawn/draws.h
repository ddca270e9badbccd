// Random numbers of a drawn picture, one after the other.
#pragma once

#include <cstdint>
#include <span>

#include "core/philox.h"

namespace weft {

class Draws {
 public:
  explicit Draws(Philox random) : random_(random) {}
  double unit() { return random_.uniform(next_++); }
  double between(double low, double high) { return low + (high - low) * unit(); }
  bool chance(double p) { return unit() < p; }
  int below(int n) { return static_cast<int>(random_.below(next_++, static_cast<unsigned>(n))); }
  std::int64_t from(std::int64_t low, std::int64_t high) {
    return low + random_.below(next_++, static_cast<std::uint32_t>(high - low + 1));
  }
  std::uint64_t u64() {
    const std::uint64_t high = random_.u32(next_++);
    return high << 32 | random_.u32(next_++);
  }
  // Bytes from a stream of their own, sixteen a block.
  void bytes(std::span<std::uint8_t> out) {
    const Philox stream(u64(), Purpose::synthetic, 0, 0);
    for (std::size_t at = 0; at < out.size(); at += 16) {
      const auto block = stream.block(static_cast<std::uint32_t>(at / 16));
      for (std::size_t i = at; i < at + 16 && i < out.size(); ++i)
        out[i] = static_cast<std::uint8_t>(block[(i - at) / 4] >> (8 * (i % 4)));
    }
  }

 private:
  Philox random_;
  std::uint32_t next_ = 0;
};

}  // namespace weft
