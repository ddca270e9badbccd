// WAV files as bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace weft {

// Samples [n, channels] of 8 bits (0 to 255), of 16, or of floats.
template <class T>
std::string wav(const std::vector<T>& samples, int channels, int rate) {
  std::string out;
  const auto put = [&](auto value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
  };
  const auto size = static_cast<std::uint32_t>(samples.size() * sizeof(T));
  out += "RIFF";
  put(std::uint32_t{36} + size);
  out += "WAVEfmt ";
  put(std::uint32_t{16});
  put(static_cast<std::uint16_t>(std::is_floating_point_v<T> ? 3 : 1));
  put(static_cast<std::uint16_t>(channels));
  put(static_cast<std::uint32_t>(rate));
  put(static_cast<std::uint32_t>(rate * channels) * static_cast<std::uint32_t>(sizeof(T)));
  put(static_cast<std::uint16_t>(channels * static_cast<int>(sizeof(T))));
  put(static_cast<std::uint16_t>(8 * sizeof(T)));
  out += "data";
  put(size);
  out.append(reinterpret_cast<const char*>(samples.data()), size);
  return out;
}

}  // namespace weft
