// How close a picture is to another one: PSNR and SSIM of frames in 256 levels.
#pragma once

#include <cstdint>

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

}  // namespace weft
