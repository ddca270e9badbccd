// From a picture to the face that is animated, and from a face to its coefficients.
#pragma once

#include <optional>
#include <string>

#include "models/face/align.h"
#include "models/face/crop.h"
#include "models/face/landmarks.h"

namespace weft {

struct SourceFace {
  ImageFile crop;  // [size,size,3]
  FaceCut cut;     // cut.place: its box in the picture; cut.frame_width, _height: crop_info
  Landmarks landmarks = {};  // on the crop
  std::int64_t faces = 0;    // found in the picture (in `resize` mode, in the crop); 0: not looked
};

// Networks that find faces; both or none.
struct FaceFinder {
  FaceDetector* detector = nullptr;
  LandmarkNet* landmarks = nullptr;
  explicit operator bool() const { return detector != nullptr && landmarks != nullptr; }
};

// Finds the greatest face, cuts it out and finds its landmarks anew on the crop. `given`: landmarks
// of the whole picture, in place of the first search; without a finder in place of both, carried
// over to the crop. `name` is for messages. Exit::data if there is no face.
SourceFace find_source_face(FaceFinder finder, const ImageFile& picture, Preprocess mode,
                            std::int64_t size, const std::string& name,
                            const std::optional<Landmarks>& given = {});

// Pairs of x and y as landmarks.
Landmarks landmarks_of(std::span<const float> pairs);

}  // namespace weft
