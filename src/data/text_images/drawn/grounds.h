// Backgrounds of drawn text, and camera effects.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/philox.h"
#include "data/images/labelled_images.h"

namespace weft {

// The stream of random numbers of a drawn picture.
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

struct Picture {
  ImageSize size;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
};

// A picture without text: soft or rough surfaces, stripes, shapes, and things that resemble text
// but are none: bricks, windows, fences, leaves, circles, scribbles.
void paint_ground(Draws& draws, Picture& out);

// A part of `footage`, scaled, as the ground; `out` has its size already.
void take_ground(Draws& draws, const Picture& footage, Picture& out);

// Blur, shake, low resolution, contrast, shade and noise, each now and then.
void photograph(Draws& draws, Picture& picture);

}  // namespace weft
