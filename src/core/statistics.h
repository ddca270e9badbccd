// Statistics of a few values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace weft {

// The median: a measured value, the upper one of an even number. 0 if there is none.
inline double upper_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The same, but the mean of the two middle values of an even number.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace weft
