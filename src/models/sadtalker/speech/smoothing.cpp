#include "models/sadtalker/speech/smoothing.h"

#include <algorithm>
#include <vector>

#include "core/error.h"

namespace weft {
namespace {

// What each of the 2m + 1 points contributes to the fitted parabola at point `at` (-m to m), by the
// polynomials that are orthogonal over them: 1, j and j^2 - mean(j^2).
std::vector<double> weights_at(std::int64_t m, std::int64_t at) {
  const auto n = static_cast<double>(2 * m + 1);
  double squares = 0, spread = 0;
  for (std::int64_t j = -m; j <= m; ++j) squares += static_cast<double>(j * j);
  const double mean = squares / n;
  const auto curve = [mean](std::int64_t j) { return static_cast<double>(j * j) - mean; };
  for (std::int64_t j = -m; j <= m; ++j) spread += curve(j) * curve(j);
  std::vector<double> weights;
  for (std::int64_t j = -m; j <= m; ++j)
    weights.push_back(1 / n + static_cast<double>(at * j) / squares +
                      curve(at) * curve(j) / spread);
  return weights;
}

}  // namespace

std::int64_t smoothing_window(std::int64_t frames) {
  constexpr std::int64_t longest = 13;
  return frames >= longest ? longest : (frames - 1) / 2 * 2 + 1;
}

void smooth_motion(std::span<float> values, std::int64_t columns) {
  WEFT_ASSERT(columns > 0 && std::ssize(values) % columns == 0);
  const std::int64_t T = std::ssize(values) / columns;
  if (T < 3) return;
  const std::int64_t m = smoothing_window(T) / 2;
  std::vector<std::vector<double>> weights;
  for (std::int64_t at = -m; at <= m; ++at) weights.push_back(weights_at(m, at));
  const std::vector<float> rough(values.begin(), values.end());
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t centre = std::clamp(t, m, T - 1 - m);
    const std::vector<double>& w = weights[static_cast<std::size_t>(t - centre + m)];
    for (std::int64_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::int64_t j = -m; j <= m; ++j)
        sum += w[static_cast<std::size_t>(j + m)] *
               static_cast<double>(rough[static_cast<std::size_t>((centre + j) * columns + c)]);
      values[static_cast<std::size_t>(t * columns + c)] = static_cast<float>(sum);
    }
  }
}

}  // namespace weft
