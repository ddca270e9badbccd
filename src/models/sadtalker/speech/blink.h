// When a face blinks that no video shows how.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// How far the eyes are closed in each of `frames` frames, 0 to 1: blinks of five frames, the pause
// before each drawn by the seed from [10, min(frames / 2, 70)) frames. A clip of 21 frames or less
// has none: there is nothing to draw from.
std::vector<float> random_blinks(std::int64_t frames, std::uint64_t seed);

}  // namespace weft
