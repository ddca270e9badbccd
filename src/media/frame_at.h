// One frame of a video: the one that OpenCV's VideoCapture gives, which is what Open-Sora's scores
// of text are made from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "media/media_source.h"

namespace weft {

struct PickedFrame {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
  // Why the frame is a stand-in: the first one, or a black one of the container's size, or of
  // 256x256 where that is unknown. Empty: it is the frame that was asked for.
  std::string fault;
};

// Frame `index`, from 0, the last one if there are fewer. Seeks, counts, converts and rotates as
// OpenCV 4.10 does (docs/models/dbnet.md, Frames); the decoder takes one thread. Throws only
// Exit::stopped: whatever is wrong with the video, limits of [media] included, is its fault.
PickedFrame frame_at(const MediaSource& source, std::int64_t index, const MediaAccess& access);

}  // namespace weft
