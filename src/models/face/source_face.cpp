#include "models/face/source_face.h"

#include "core/error.h"

namespace weft {

SourceFace find_source_face(FaceFinder finder, const ImageFile& picture, Preprocess mode,
                            std::int64_t size, const std::string& name,
                            const std::optional<Landmarks>& given) {
  const std::int64_t H = picture.height, W = picture.width;
  WEFT_ASSERT(H > 0 && W > 0 && (finder || given));
  SourceFace source;
  std::optional<Landmarks> points = given;
  if (mode == Preprocess::resize) {
    source.cut = whole_picture(H, W);
  } else {
    if (!points) {
      // The original shows the detector the channels of this search in the wrong order.
      const FoundFace found =
          find_face(*finder.detector, *finder.landmarks, picture, ChannelOrder::rgb, name);
      source.faces = found.faces;
      points = found.landmarks;
    }
    source.cut = make_cut(face_quad(*points, H, W, name), mode, H, W, name);
  }
  source.crop = cut_face(picture, source.cut, size);
  if (!finder) {
    source.landmarks = cut_landmarks(*points, H, W, source.cut, size);
    return source;
  }
  const FoundFace found =
      find_face(*finder.detector, *finder.landmarks, source.crop, ChannelOrder::bgr,
                mode == Preprocess::resize ? name : name + " (cut to its face)");
  if (mode == Preprocess::resize) source.faces = found.faces;
  source.landmarks = found.landmarks;
  return source;
}

Landmarks landmarks_of(std::span<const float> pairs) {
  Landmarks landmarks;
  WEFT_ASSERT(pairs.size() == 2 * landmarks.size());
  for (std::size_t i = 0; i < landmarks.size(); ++i)
    landmarks[i] = {pairs[2 * i], pairs[2 * i + 1]};
  return landmarks;
}

}  // namespace weft
