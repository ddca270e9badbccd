#include "models/sadtalker/speech/blink.h"

#include <algorithm>
#include <array>

#include "core/philox.h"

namespace weft {

std::vector<float> random_blinks(std::int64_t frames, std::uint64_t seed) {
  constexpr std::array closed = {0.5f, 0.9f, 1.0f, 0.9f, 0.5f};
  constexpr std::int64_t length = std::ssize(closed), shortest = 10, longest = 70;
  std::vector<float> eyes(static_cast<std::size_t>(frames), 0.0f);
  const std::int64_t pauses = std::min(frames / 2, longest) - shortest;
  if (pauses <= 0) return eyes;
  const Philox random(seed, Purpose::blink, 0, 0);
  std::int64_t at = 0;
  for (std::uint32_t blink = 0;; ++blink) {
    at += shortest + random.below(blink, static_cast<std::uint32_t>(pauses));
    if (at + length > frames - 1) return eyes;
    std::ranges::copy(closed, eyes.begin() + at);
    at += length;
  }
}

}  // namespace weft
