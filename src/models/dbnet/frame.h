// What the text detector sees of a picture when it is scored (docs/models/dbnet.md, Frames).
#pragma once

#include <cstdint>
#include <vector>

#include "media/resize.h"

namespace weft {

// Pixels [side, side, 3]: the picture with its shorter side at `side`, bilinear as Pillow, and the
// middle of its longer one. What lies beside the middle is not computed.
std::vector<std::uint8_t> detector_frame(const RgbView& picture, std::int64_t side = 1024);

}  // namespace weft
