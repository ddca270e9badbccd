#include "media/file_kind.h"

#include <array>
#include <cstdint>
#include <string_view>

namespace weft {
namespace {

using Bytes = std::span<const std::byte>;

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
Bytes rest_of(Bytes bytes, std::uint64_t at) {
  return bytes.subspan(std::min<std::uint64_t>(at, bytes.size()));
}

// A whole number of `count` bytes; 0 where the bytes end before.
std::uint32_t number_at(Bytes bytes, std::uint64_t at, int count, bool little) {
  if (at + static_cast<std::uint64_t>(count) > bytes.size()) return 0;
  std::uint32_t value = 0;
  for (int i = 0; i < count; ++i) {
    const auto place = at + static_cast<std::uint64_t>(little ? count - 1 - i : i);
    value = value << 8 | std::to_integer<std::uint32_t>(bytes[place]);
  }
  return value;
}

// A whole number in the first directory of a TIFF file, the form of which a block of EXIF has too;
// 0 where there is none.
std::uint32_t tiff_value(Bytes tiff, std::uint32_t tag) {
  constexpr std::string_view prefix("Exif\0\0", 6);
  if (text_of(tiff).starts_with(prefix)) tiff = tiff.subspan(prefix.size());
  const bool little = text_of(tiff).starts_with("II");
  if (!little && !text_of(tiff).starts_with("MM")) return 0;
  const std::uint64_t directory = number_at(tiff, 4, 4, little);
  const std::uint32_t entries = number_at(tiff, directory, 2, little);
  for (std::uint32_t i = 0; i < entries; ++i) {
    const std::uint64_t at = directory + 2 + 12 * std::uint64_t{i};
    if (number_at(tiff, at, 2, little) != tag) continue;
    constexpr std::uint32_t is_short = 3;
    return number_at(tiff, at + 8, number_at(tiff, at + 2, 2, little) == is_short ? 2 : 4, little);
  }
  return 0;
}

Bytes exif_of_jpeg(Bytes file) {
  constexpr std::uint32_t app1 = 0xe1, scan = 0xda, end = 0xd9;
  for (std::uint64_t at = 2; at + 4 <= file.size();) {
    if (number_at(file, at, 1, false) != 0xff) return {};
    const std::uint32_t marker = number_at(file, at + 1, 1, false);
    if (marker == 0xff) {  // a byte that fills up
      ++at;
      continue;
    }
    if (marker == scan || marker == end) return {};
    const std::uint32_t length = number_at(file, at + 2, 2, false);
    const Bytes body =
        rest_of(file, at + 4)
            .first(std::min<std::uint64_t>(length < 2 ? 0 : length - 2, file.size() - at - 4));
    if (marker == app1 && text_of(body).starts_with("Exif")) return body;
    at += 2 + std::uint64_t{length};
  }
  return {};
}

// The first chunk of that name: its length and name in front of it, `behind` bytes behind it.
Bytes chunk(Bytes file, std::uint64_t at, std::string_view name, bool riff) {
  while (at + 8 <= file.size()) {
    const std::uint64_t length = number_at(file, riff ? at + 4 : at, 4, riff);
    const Bytes body =
        rest_of(file, at + 8).first(std::min<std::uint64_t>(length, file.size() - at - 8));
    if (text_of(rest_of(file, riff ? at : at + 4)).starts_with(name)) return body;
    at += 8 + length + (riff ? length % 2 : 4);  // padding, or a checksum
  }
  return {};
}

}  // namespace

int exif_orientation(Bytes file) {
  constexpr std::uint32_t tag = 274;
  const std::string_view begin = text_of(file.first(std::min<std::size_t>(file.size(), 4)));
  const std::uint32_t value =
      tiff_value(begin.starts_with("\xff\xd8")  ? exif_of_jpeg(file)
                 : begin.starts_with("\x89PNG") ? chunk(file, 8, "eXIf", false)
                 : begin.starts_with("RIFF")    ? chunk(file, 12, "EXIF", true)
                                                : file,
                 tag);
  return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
}

bool is_misread_tiff(Bytes file) {
  constexpr std::uint32_t compression = 259, photometric = 262, range = 532;
  constexpr std::uint32_t old_jpeg = 6, jpeg = 7, ycbcr = 6;
  const std::uint32_t how = tiff_value(file, compression);
  return how == old_jpeg || how == jpeg ||
         (tiff_value(file, photometric) == ycbcr && tiff_value(file, range) == 0);
}

UprightWalk upright_walk(int orientation, std::int64_t height, std::int64_t width,
                         std::int64_t stride) {
  const std::int64_t bottom = (height - 1) * stride, right = (width - 1) * 3;
  const std::array<UprightWalk, 8> walks = {{{0, 3, stride},
                                             {right, -3, stride},
                                             {bottom + right, -3, -stride},
                                             {bottom, 3, -stride},
                                             {0, stride, 3},
                                             {bottom, -stride, 3},
                                             {bottom + right, -stride, -3},
                                             {right, stride, -3}}};
  return walks.at(static_cast<std::size_t>(orientation - 1));
}

}  // namespace weft
