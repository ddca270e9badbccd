// Rendered frames put back into the picture that the face was cropped from, by Poisson blending
// (Perez et al., "Poisson Image Editing", 2003): inside the box the result has the frame's
// gradients, along its border the picture's colours. The values are those of OpenCV's seamlessClone
// (NORMAL_CLONE, mask of 255 all over), but for float32 noise ahead of a truncation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "media/image_file.h"

namespace weft {

// Pixels [left, right) x [top, bottom) of a picture.
struct PasteBox {
  std::int64_t left, top, right, bottom;
  std::int64_t width() const { return right - left; }
  std::int64_t height() const { return bottom - top; }
};

// What all frames of a clip share. After its making any number of threads may paste.
class Pasting {
 public:
  // Below this width or height nothing of a frame would be left: its outermost ring is cut off, and
  // of the rest three pixels on each side take the picture's gradients.
  static constexpr std::int64_t least_side = 9;

  // Exit::data where the box does not lie inside the picture, or is too small.
  Pasting(ImageFile picture, const PasteBox& box);
  ~Pasting();
  Pasting(Pasting&&) noexcept;
  Pasting& operator=(Pasting&&) noexcept;

  // The frame at the size of the box, as cv2.resize (bilinear) makes it.
  ImageFile resized(const ImageFile& frame) const;
  // The picture with the frame, of any size, in the box.
  ImageFile paste(const ImageFile& frame) const;

 private:
  class Solver;
  ImageFile picture_;
  PasteBox box_;
  std::unique_ptr<const Solver> solver_;
};

}  // namespace weft
