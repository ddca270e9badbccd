// How close a picture is to another one, and how much frames of a clip differ, in 256 levels.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// 10 log10(255^2 / mean squared error) over all values of two [height, width, 3] frames, in dB;
// infinite for equal ones.
double psnr(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width);

// Structural similarity of two [height, width, 3] frames, the mean of the three channels (Wang et
// al., "Image quality assessment: from error visibility to structural similarity", 2004), as
// scikit-image's structural_similarity computes it by default: windows of 7x7, all of equal weight,
// unbiased variances, K1 = 0.01, K2 = 0.03, data range 255, the mean over the windows that lie
// within the frame. Both sides must be at least 7.
double ssim(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width);

// How much a clip changes from frame to frame, in levels: frames one after the other. Nothing is
// warped along a motion, so that moving pictures have more of both.
class FrameChanges {
 public:
  // The next frame, [height, width, 3]. Exit::data if it has another size than the first.
  void add(std::vector<std::uint8_t> frame);
  std::int64_t frames() const { return frames_; }

  // Mean over values and over frames t of |x_t - x_(t-1)|; of at least two frames.
  bool has_motion() const { return frames_ >= 2; }
  double motion() const;
  // Mean over values and over frames t that have both neighbours of |x_t - (x_(t-1) + x_(t+1)) /
  // 2|, how far a frame is from the middle of its neighbours: 0 for a steady fade, d for pixels
  // that go up and down by d. It takes at least three frames.
  bool has_flicker() const { return frames_ >= 3; }
  double flicker() const;

 private:
  std::vector<std::uint8_t> before_, last_;
  std::int64_t frames_ = 0;
  std::int64_t first_ = 0, second_ = 0;  // sums of |x_t - x_(t-1)| and |2 x_t - x_(t-1) - x_(t+1)|
};

}  // namespace weft
