// Pictures resized as Pillow's BICUBIC does, for reference images: the released sampler reads them so.
#pragma once

#include <cstdint>
#include <vector>

#include "media/video_reader.h"

namespace weft {

// Scales a frame so that it just covers height x width and takes the middle: [height, width, 3]. The scaled size and
// the crop are Open-Sora's resize_crop_to_fill; the kernel is Keys' cubic with a = -0.5, widened when shrinking,
// first along rows, then along columns, each rounded to 8 bits with 22-bit weights as Pillow does it: the same bytes.
std::vector<std::uint8_t> cover_bicubic(const VideoFrame& frame, std::int64_t height,
                                        std::int64_t width);

}  // namespace weft
