#include "models/sadtalker/render/windows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "models/sadtalker/render/mapping.h"

namespace weft {
namespace {

constexpr std::int64_t predicted = 70, expression = 64;

void check_finite(std::span<const float> values, std::int64_t columns, const char* whose) {
  const auto bad = std::ranges::find_if_not(values, [](float v) { return std::isfinite(v); });
  if (bad == values.end()) return;
  const auto at = static_cast<std::int64_t>(bad - values.begin());
  WEFT_CHECK(false, Exit::data, "check what made these coefficients",
             "{}: coefficient {} of row {} is {}", whose, at % columns, at / columns, *bad);
}

}  // namespace

std::vector<double> camera_degrees(std::span<const std::int64_t> list, std::int64_t frames) {
  if (list.empty()) return {};
  const auto all = static_cast<std::size_t>(frames);
  double path = 0;
  for (std::size_t i = 1; i < list.size(); ++i)
    path += std::abs(static_cast<double>(list[i] - list[i - 1]));
  if (path == 0 || frames < 2) return std::vector<double>(all, static_cast<double>(list[0]));
  const double speed = path / static_cast<double>(frames - 1);
  std::vector<double> degrees;
  for (std::size_t i = 1; i < list.size(); ++i) {
    const auto from = static_cast<double>(list[i - 1]), to = static_cast<double>(list[i]);
    const double step = to < from ? -speed : speed;
    // As many as numpy's arange(from, to, step) has.
    const auto steps = static_cast<std::int64_t>(std::ceil((to - from) / step));
    for (std::int64_t k = 0; k < steps; ++k)
      degrees.push_back(from + static_cast<double>(k) * step);
  }
  degrees.resize(all, degrees.back());
  return degrees;
}

DrivingRows driving_rows(const SadtalkerDeck& deck, std::span<const float> rows,
                         std::span<const float> source) {
  DrivingRows d;
  d.columns = deck.coefficients();
  d.frames = std::ssize(rows) / predicted;
  WEFT_CHECK(d.frames > 0 && std::ssize(rows) % predicted == 0, Exit::data,
             "each frame has 70 coefficients", "{} coefficients are no rows of 70", rows.size());
  WEFT_CHECK(std::ssize(source) == d.columns && d.columns >= predicted, Exit::data,
             "sadtalker.preprocess decides how many there are: 73 for full and extfull, else 70",
             "the picture has {} coefficients, the mapping network takes {}", source.size(),
             d.columns);
  check_finite(rows, predicted, "predicted motion");
  check_finite(source, d.columns, "the picture's face");
  const auto scale = static_cast<float>(deck.expression_scale);
  for (std::int64_t t = 0; t < d.frames; ++t)
    for (std::int64_t c = 0; c < d.columns; ++c) {
      const bool own = c < expression || (c < predicted && !deck.still);
      const float v = own ? rows[static_cast<std::size_t>(t * predicted + c)]
                          : source[static_cast<std::size_t>(c)];
      d.values.push_back(c < expression ? v * scale : v);
    }
  d.yaw = camera_degrees(deck.input_yaw, d.frames);
  d.pitch = camera_degrees(deck.input_pitch, d.frames);
  d.roll = camera_degrees(deck.input_roll, d.frames);
  return d;
}

std::vector<float> driving_windows(const DrivingRows& rows, std::int64_t first,
                                   std::int64_t count) {
  WEFT_ASSERT(first >= 0 && count >= 0 && first + count <= rows.frames);
  constexpr std::int64_t reach = MappingNet::window / 2;
  std::vector<float> windows;
  windows.reserve(static_cast<std::size_t>(count * MappingNet::window * rows.columns));
  for (std::int64_t t = first; t < first + count; ++t)
    for (std::int64_t i = t - reach; i <= t + reach; ++i) {
      const auto* row =
          rows.values.data() + std::clamp<std::int64_t>(i, 0, rows.frames - 1) * rows.columns;
      windows.insert(windows.end(), row, row + rows.columns);
    }
  return windows;
}

}  // namespace weft
