// Smoothing of the head's motion.
#pragma once

#include <cstdint>
#include <span>

namespace weft {

// The window that T frames are smoothed with: 13, or the greatest odd number that is not above T.
std::int64_t smoothing_window(std::int64_t frames);

// Savitzky-Golay's filter of order 2 along the rows of values [T,columns], each column by itself:
// a row becomes the value there of the parabola that fits best to the window around it; the first
// and the last half window lie on the parabolas of the outermost windows (scipy's mode "interp").
// Fewer than 3 rows stay as they are: no parabola goes through them.
void smooth_motion(std::span<float> values, std::int64_t columns);

}  // namespace weft
