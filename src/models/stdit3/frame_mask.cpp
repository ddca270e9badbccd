// Frame masks of training (docs/models/stdit3.md, Frame masks).
#include <algorithm>
#include <utility>

#include "core/philox.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"

namespace weft {
namespace {

// Numbers the draws in the order of use, so that a mask is a function of its stream.
struct Draws {
  Philox random;
  std::uint32_t next = 0;
  float unit() { return random.uniform(next++); }
  // Uniform in [low, high], both inclusive.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    if (high <= low) return low;
    return low + random.below(next++, static_cast<std::uint32_t>(high - low + 1));
  }
};

}  // namespace

bool masks_wanted(const MaskDeck& d) {
  return d.random + d.intepolate + d.quarter_random + d.quarter_head + d.quarter_tail +
             d.quarter_head_tail + d.image_random + d.image_head + d.image_tail +
             d.image_head_tail >
         0;
}

std::vector<std::uint8_t> draw_frame_mask(const MaskDeck& d, std::int64_t n, std::uint64_t seed,
                                          std::uint64_t step, std::uint64_t sample) {
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(n), 1);
  if (n <= 1) return mask;
  Draws draws{Philox(seed, Purpose::frame_mask, step, sample)};
  enum Kind { random, every_second, at_random, head, tail, head_tail, identity };
  struct Row {
    double share;
    Kind kind;
    bool quarter;  // up to a quarter of the frames, else one
  };
  const Row rows[] = {
      {d.random, random, false},           {d.intepolate, every_second, false},
      {d.quarter_random, at_random, true}, {d.quarter_head, head, true},
      {d.quarter_tail, tail, true},        {d.quarter_head_tail, head_tail, true},
      {d.image_random, at_random, false},  {d.image_head, head, false},
      {d.image_tail, tail, false},         {d.image_head_tail, head_tail, false},
  };
  Kind kind = identity;
  bool quarter = false;
  // One draw against the running sum of the shares; beyond all of them there is no mask.
  double u = draws.unit(), sum = 0;
  for (const Row& r : rows) {
    sum += r.share;
    if (u < sum) {
      kind = r.kind;
      quarter = r.quarter;
      break;
    }
  }
  const std::int64_t k = quarter ? draws.integer(1, n / 4) : 1;
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    std::fill(mask.begin() + begin, mask.begin() + end, std::uint8_t{0});
  };
  switch (kind) {
    case identity:
      break;
    case random: {
      const float ratio = 0.1f + 0.8f * draws.unit();
      for (auto& m : mask) m = draws.unit() > ratio;
      break;
    }
    case every_second:
      for (std::int64_t f = draws.integer(0, 1); f < n; f += 2)
        mask[static_cast<std::size_t>(f)] = 0;
      break;
    case at_random: {
      const std::int64_t begin = draws.integer(0, n - k);
      clear(begin, begin + k);
      break;
    }
    case head:
      clear(0, k);
      break;
    case tail:
      clear(n - k, n);
      break;
    case head_tail:
      clear(0, k);
      clear(n - k, n);
      break;
  }
  // Short clips can lose every frame: the loss needs one to denoise.
  if (std::none_of(mask.begin(), mask.end(), [](std::uint8_t m) { return m != 0; }))
    mask.back() = 1;
  return mask;
}

}  // namespace weft
