// Rendered frames put back into the picture that the face was cropped from, by Poisson blending
// (Perez et al., "Poisson Image Editing", 2003): inside the box the result has the frame's
// gradients, along its border the picture's colours. The values are those of OpenCV's seamlessClone
// (NORMAL_CLONE, mask of 255 all over), but for float32 noise ahead of a truncation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "media/image_file.h"
#include "models/sadtalker/face/crop.h"

namespace weft {

// The discrete sine transform of the first kind, of many rows at once: y[i] = sum over k of
// x[k] sin(pi (k + 1) (i + 1) / (n + 1)). It is its own inverse, times 2 / (n + 1).
//
// As a product with the matrix of sines, for it runs at the speed of the arithmetic for any n, also
// a prime n + 1, and n is a few hundred. Coefficients of odd and of even k + 1 are summed apart:
// y[i] is their sum and y[n - 1 - i] their difference, which halves the product.
class SineTransform {
 public:
  explicit SineTransform(std::int64_t n);

  std::int64_t size() const { return n_; }
  // Rows are given with their odd-numbered coefficients ahead of the even-numbered ones:
  // coefficient number() (1 to n) stands at each place.
  std::int64_t number(std::int64_t place) const {
    return place < odd_ ? 2 * place + 1 : 2 * (place - odd_) + 2;
  }
  // sin(pi i / (n + 1)), i >= 0.
  double sine(std::int64_t i) const { return sines_[i % (2 * (n_ + 1))]; }
  // to [rows,n] from x [rows,n]. `rows` is a multiple of rows_at_once.
  static constexpr std::int64_t rows_at_once = 6;
  void run(const float* x, std::int64_t rows, float* to) const;

 private:
  std::int64_t n_, odd_;
  std::vector<double> sines_;
  // Columns of the matrix by panels of some, [panels][n][columns]: odd coefficients, then even.
  std::vector<float> panels_;
};

// What all frames of a clip share. After its making any number of threads may paste.
class Pasting {
 public:
  // Below this width or height nothing of a frame would be left: its outermost ring is cut off, and
  // of the rest three pixels on each side take the picture's gradients.
  static constexpr std::int64_t least_side = 9;

  // Exit::data where the box does not lie inside the picture, or is too small.
  Pasting(ImageFile picture, const PixelBox& box);
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
  PixelBox box_;
  std::unique_ptr<const Solver> solver_;
};

}  // namespace weft
