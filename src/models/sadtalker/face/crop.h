// From a picture to the face that is animated, and to what its coefficients are read from: the
// arithmetic of SadTalker's croper.py on 68 landmarks (docs/models/sadtalker.md, Pictures), and the
// alignment to a mean face.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "media/image_file.h"
#include "models/sadtalker/face/landmarks.h"

namespace weft {

// How a face lies in a picture of that size, as the original has it.
struct FaceQuad {
  std::int64_t width = 0, height = 0;  // that the picture is made smaller to first, if it is large
  PixelBox outer;                      // of the picture at that size: the face with a border
  // lx, ly, rx, ry within `outer`: the face. ry is bounded by the width, as in the original.
  std::array<double, 4> inner = {};
};
// A square around the face of four times `side` pixels or more makes the picture smaller.
// Exit::data if landmarks are not finite, or do not span a face; `name` is for messages.
FaceQuad face_quad(const Landmarks& landmarks, std::int64_t height, std::int64_t width,
                   const std::string& name, std::int64_t side = 512);

// What is done with a picture before its face is looked at: the face, the face with a border, all
// of it; the full modes are for pasting the result back into the picture.
enum class Preprocess { crop, extcrop, resize, full, extfull };
// By the deck's name of it, sadtalker.preprocess.
Preprocess preprocess_of(const std::string& name);
inline bool extended(Preprocess mode) {
  return mode == Preprocess::extcrop || mode == Preprocess::extfull;
}

// A cut that is made of a picture, or of all frames of a video.
struct FaceCut {
  std::int64_t width = 0, height = 0;  // that the picture is resized to first
  PixelBox box;                        // of it, what is cut out
  // The size of frames made from it: the inner box's, whatever was cut (the original's crop_info).
  std::int64_t frame_width = 0, frame_height = 0;
  // The box in the picture at its own size, where frames belong. The original forgets that the
  // picture was made smaller, and puts them elsewhere then.
  PixelBox place;
};
// All of the picture for `resize`, which needs no quad. Where the inner box reaches beyond the
// outer one it is cut off there, as by the original's slices. Exit::data if nothing remains.
FaceCut make_cut(const FaceQuad& quad, Preprocess mode, std::int64_t height, std::int64_t width,
                 const std::string& name);
FaceCut whole_picture(std::int64_t height, std::int64_t width);

// The pixels of a box that lies within the picture.
ImageFile cut_box(const ImageFile& picture, const PixelBox& box);
// The cut, resized to size x size whatever its aspect. `picture` may have another size than the one
// that the cut was made for, as frames of a video may.
ImageFile cut_face(const ImageFile& picture, const FaceCut& cut, std::int64_t size);
// Where points of the picture are then.
Landmarks cut_landmarks(const Landmarks& points, std::int64_t height, std::int64_t width,
                        const FaceCut& cut, std::int64_t size);

// As cv2.resize, bilinear.
ImageFile resize_bilinear(const ImageFile& picture, std::int64_t height, std::int64_t width);

// Aligns a face for the coefficient network: scales and shifts it so that five landmarks lie where
// those of a mean face do: the eyes, the nose and the corners of the mouth, x, y (up) and z.
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

// The face of a picture that is animated.
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
