// Pictures and videos that a clip begins with or is edited from, as latents (specs/inference.md 3.5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/video_vae.h"

namespace weft {

// A latent f32 [C,T,h,w] in host memory.
struct LatentReference {
  std::vector<float> values;
  std::int64_t frames = 0;
};

// Exit::data, beginning with `where`, for a file that is not there or cannot be read. Nothing is decoded.
void check_references(const std::vector<std::string>& files, const std::string& where);

// Reads a picture (bicubic, as media/bicubic.h) or all frames of a video (bilinear, as media/resize.h), sized to cover
// height x width, and encodes it: a draw from the posterior. In the current arena. Exit::data with FFmpeg's reason.
LatentReference encode_reference(const std::string& file, std::int64_t height, std::int64_t width,
                                 VideoVae& vae, const VideoVae::Noise& noise);

// The same of frames f32 [T,H,W,3] in [-1,1], not clamped, in host memory.
LatentReference encode_frames(const std::vector<float>& frames, std::int64_t count,
                              std::int64_t height, std::int64_t width, VideoVae& vae,
                              const VideoVae::Noise& noise);

}  // namespace weft
