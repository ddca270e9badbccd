// The scaling curve as an SVG file of its own: efficiency over ranks, whose axis doubles.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct ScalingCurve {
  std::string name;
  std::vector<double> ranks, efficiency;  // efficiency 1 = as fast a rank as one alone
};

// A complete SVG document. Axes fit the curves; efficiency begins at 0 if any falls below a half, else at 50 %.
std::string scaling_plot(const std::string& title, const std::vector<ScalingCurve>& curves);

}  // namespace weft
