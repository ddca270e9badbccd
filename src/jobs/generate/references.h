// Pictures and videos that a clip begins with or is edited from: fetched, and encoded to latents
// (docs/generate.md, Masks).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "jobs/generate/prompts.h"
#include "media/media_source.h"
#include "models/interfaces.h"

namespace weft {

// The latent frames that a clip takes from a reference of `frames`, [first, first + latents), and
// the rest of their chunks: f32 [C, latents, h, w] in host memory.
struct LatentReference {
  std::vector<float> values;
  std::int64_t frames = 0, first = 0, latents = 0;
  // The first frame taken from a file, as the codec got it: [height, width, 3], for the report.
  std::vector<std::uint8_t> picture;
};

// Which of a reference's latent frames are taken, when it has so many.
using TakenFrames = std::function<LatentRange(std::int64_t latents)>;

// References at an address (media/media_source.h) become files in OUTPUT/references, which rank 0
// fetches unless they are there. Exit::data, beginning with the prompt's place; Exit::stopped where
// access.stop said so. Collective.
void fetch_references(std::vector<Prompt>& prompts, const GenerateDeck& deck,
                      const MediaAccess& access, const std::filesystem::path& output,
                      MPI_Comm world);

// Exit::data, beginning with `where`, for a file that is not there or cannot be read, and for a
// source graph that `named_by` may not ask for. Nothing is decoded.
void check_references(const std::vector<std::string>& files, MediaTrust named_by,
                      const std::string& where);

// Reads a picture (bicubic) or a video (bilinear), both as media/resize.h, sized to cover height x
// width, and encodes the chunks that are taken: a draw from the posterior, the same as of the
// whole. A video is read twice, first to count its frames, and as many of them as the codec takes
// at once are in memory. In the current arena. Exit::data with FFmpeg's reason, or from `taken`.
LatentReference encode_reference(const MediaSource& file, const MediaAccess& access,
                                 std::int64_t height, std::int64_t width, VideoCodec& codec,
                                 const VideoCodec::Noise& noise, const TakenFrames& taken);

// The picture that a clip begins with, or a video's first frame, at the size that it asks for: what
// the model reads beside the clip, or its own latent, the codec's mean. Exit::data where the file
// is of another size than `fit` was made for.
LatentReference encode_picture(const MediaSource& file, const MediaAccess& access,
                               const PictureStart& start, PixelSize clip, std::int64_t area,
                               VideoCodec& codec);

// The same of frames f32 [part.frames,H,W,3] in [-1,1], not clamped, in host memory.
LatentReference encode_frames(const std::vector<float>& frames, const VideoCodec::Part& part,
                              std::int64_t height, std::int64_t width, VideoCodec& codec,
                              const VideoCodec::Noise& noise);

// The most that encode_reference has of frames in host memory, bytes, where the codec takes
// `at_once`.
std::size_t reference_bytes(std::int64_t at_once, std::int64_t height, std::int64_t width);

}  // namespace weft
