// The face as the coefficients' network wants it: scaled and moved so that five landmarks lie where
// those of a mean face do.
#pragma once

#include <array>

#include "media/image_file.h"
#include "models/face/landmarks.h"

namespace weft {

// The eyes, the nose and the corners of the mouth of a mean face: x, y (up) and z.
using MeanFace = std::array<std::array<double, 3>, 5>;
extern const MeanFace mean_face;

struct AlignedFace {
  ImageFile image;                   // [224,224,3]; black beyond the picture
  std::array<double, 5> trans = {};  // the picture's width and height, scale, tx, ty (y up)
  std::array<std::array<double, 2>, 68> landmarks = {};  // in the image, y up
};
constexpr std::int64_t aligned_side = 224;

// By least squares; bicubic as Pillow's. `name` is for messages. Exit::data for landmarks that give
// no scale, or make the picture larger than 65535 pixels a side.
AlignedFace align_face(const ImageFile& picture, const Landmarks& landmarks,
                       const std::string& name, const MeanFace& face = mean_face);

}  // namespace weft
