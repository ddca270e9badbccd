// A tar file, byte by byte: what a library that writes them would refuse, too.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <string>

namespace weft {

// A member with its header, padded to whole blocks. `type`: '0' a file, '1' a hard link, '2' a
// symbolic one, '3' a device. `size`: what the header says instead of data's size.
inline std::string tar_member(const std::string& name, const std::string& data, char type = '0',
                              const std::string& link = "", std::int64_t size = -1) {
  std::string h(512, '\0');
  const auto put = [&](std::size_t at, const std::string& text) {
    std::memcpy(h.data() + at, text.data(), text.size());
  };
  put(0, name);
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, fmt::format("{:011o}", size < 0 ? static_cast<std::int64_t>(data.size()) : size));
  put(136, "00000000000");
  put(148, "        ");
  h[156] = type;
  put(157, link);
  put(257, std::string("ustar\00000", 8));
  unsigned sum = 0;
  for (const char c : h) sum += static_cast<unsigned char>(c);
  put(148, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  std::string body = data;
  body.resize((data.size() + 511) / 512 * 512, '\0');
  return h + body;
}
inline const std::string tar_end(1024, '\0');

}  // namespace weft
