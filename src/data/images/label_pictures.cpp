#include "data/images/label_pictures.h"

namespace weft {

std::vector<std::uint8_t> coloured(std::span<const std::uint8_t> labels,
                                   std::span<const Rgb> palette) {
  std::vector<std::uint8_t> rgb(3 * labels.size());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const Rgb c = labels[i] < palette.size() ? palette[labels[i]] : Rgb{};
    rgb[3 * i] = c.r, rgb[3 * i + 1] = c.g, rgb[3 * i + 2] = c.b;
  }
  return rgb;
}

std::vector<std::uint8_t> as_labels(std::span<const std::uint8_t> classes) {
  std::vector<std::uint8_t> labels(classes.begin(), classes.end());
  for (std::uint8_t& v : labels) ++v;
  return labels;
}

std::vector<std::uint8_t> blended(std::span<const std::uint8_t> rgb,
                                  std::span<const std::uint8_t> colours) {
  std::vector<std::uint8_t> both(rgb.size());
  for (std::size_t i = 0; i < rgb.size(); ++i)
    both[i] = static_cast<std::uint8_t>((rgb[i] + colours[i] + 1) / 2);
  return both;
}

std::vector<std::uint8_t> differences(std::span<const std::uint8_t> rgb,
                                      std::span<const std::uint8_t> wanted,
                                      std::span<const std::uint8_t> found) {
  std::vector<std::uint8_t> shown(rgb.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const bool wrong = wanted[i] != 0 && wanted[i] != found[i];
    for (std::size_t c = 3 * i; c < 3 * i + 3; ++c)
      shown[c] = wrong ? 255 : static_cast<std::uint8_t>(rgb[c] / (wanted[i] == 0 ? 8 : 3));
  }
  return shown;
}

std::vector<std::uint8_t> side_by_side(const std::vector<std::span<const std::uint8_t>>& panels,
                                       ImageSize size) {
  const std::int64_t row = 3 * size.width;
  std::vector<std::uint8_t> all;
  all.reserve(panels.size() * static_cast<std::size_t>(size.height * row));
  for (std::int64_t y = 0; y < size.height; ++y)
    for (const std::span<const std::uint8_t> panel : panels)
      all.insert(all.end(), panel.begin() + y * row, panel.begin() + (y + 1) * row);
  return all;
}

}  // namespace weft
