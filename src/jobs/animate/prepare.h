// The preparation of a clip: its face, and its motion, from files that nobody vouches for.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "jobs/animate/networks.h"
#include "media/image_file.h"
#include "media/media_source.h"
#include "media/video_reader.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/speech_motion.h"

namespace weft {

// ---- Files ----

// A picture, or by its ending (.mp4, .avi, .mov, .mkv) a video's first frame. Exit::data.
ImageFile read_picture(const std::string& path, const MediaDeck& limits);

// Frames of a video, one at a time. Exit::data.
class PictureStream {
 public:
  PictureStream(const std::string& path, const MediaAccess& access);
  // False after the last.
  bool next(ImageFile& picture);

 private:
  VideoReader reader_;
};

// Motion [frames,70] in place of what is predicted from the speech: a safetensors file whose only
// tensor, or the one named coeff_3dmm, has 70, 73 or 257 columns, or JSON (.json) of such rows,
// alone or as the member coeff_3dmm. The first 70 of 73 columns are taken, and expression, angle
// and translation of 257. Exit::data for another kind of file (MATLAB's say so), other sizes,
// values that are not finite.
std::vector<float> read_motion(const std::string& path, const MediaDeck& limits);

// 68 points, x and y in pixels of the picture: JSON (.json) of 68 pairs, alone or as the member
// landmarks, or text with a point a line. Exit::data for anything else.
std::vector<float> read_landmarks(const std::string& path);

// ---- Clips ----

// What the frames of a clip are rendered from.
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

// Seconds of a rank by stage, of the job's own thread: `paste` and `encode` run beside it, and
// count where it waits for them.
struct StageSeconds {
  double prepare = 0, speech = 0, render = 0, paste = 0, enhance = 0, encode = 0, join = 0;
};

// What draws of a clip start from: of its seed and its name, so that clips of a list differ.
std::uint64_t draws_of(const ClipRequest& clip);

// In the current arena. Exit::data for a picture without a face, speech of less than a frame, and
// whatever else is wrong with the files; more than one face is a WARN.
PreparedClip prepare_clip(const ClipRequest& clip, AnimateNetworks& networks,
                          const MediaAccess& access, StageSeconds& seconds);

}  // namespace weft
