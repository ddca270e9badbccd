// What clips are made of, from files that nobody vouches for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "media/image_file.h"
#include "media/video_reader.h"

namespace weft {

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
// alone or as the member coeff_3dmm. Of 73 the first 70 are taken, of 257 expression, angle and
// translation. Exit::data for another kind of file (MATLAB's say so), other sizes, values that are
// not finite.
std::vector<float> read_motion(const std::string& path, const MediaDeck& limits);

// 68 points, x and y in pixels of the picture: JSON (.json) of 68 pairs, alone or as the member
// landmarks, or text with a point a line. Exit::data for anything else.
std::vector<float> read_landmarks(const std::string& path);

}  // namespace weft
