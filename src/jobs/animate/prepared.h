// What the frames of a clip are rendered from, made once a clip and kept as a safetensors file in
// its work folder: any rank can make any piece then.
#pragma once

#include <array>
#include <filesystem>
#include <vector>

#include "jobs/animate/list.h"
#include "media/image_file.h"
#include "models/face/crop.h"
#include "models/sadtalker/recon.h"
#include "models/sadtalker/speech/speech_motion.h"

namespace weft {

struct PreparedClip {
  ImageFile crop;             // [size,size,3]
  FaceRow source = {};        // the picture's coefficients
  std::vector<float> motion;  // [frames,70]
  // Where frames belong in the picture, in the full modes, and whose aspect they have in the
  // others.
  PixelBox place;
  std::int64_t frame_height = 0, frame_width = 0;

  std::int64_t frames() const { return std::ssize(motion) / motion_coefficients; }
};

// Height and width of a finished frame, before an enhancer's scale: the picture's in the full
// modes, else sadtalker.size wide with the crop's aspect.
std::array<std::int64_t, 2> frame_size(const PreparedClip& clip, const SadtalkerDeck& deck);

void write_prepared(const PreparedClip& clip, const std::filesystem::path& file);
// Exit::data where the file is not whole.
PreparedClip read_prepared(const std::filesystem::path& file);

}  // namespace weft
