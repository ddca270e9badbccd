// Statistics of a few values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace weft {

// The middle of the sorted values, the upper one of an even number: a value that was measured. 0
// for none.
inline double upper_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The same, but the mean of the two in the middle of an even number.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace weft
