#include "media/file_kind.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

namespace weft {
namespace {

using std::string_view_literals::operator""sv;

constexpr const char* unpack = "unpack it, and name what is in it";
constexpr const char* as_list = "name the files themselves, or a .csv or .jsonl list of them";
constexpr const char* as_jpeg = "convert it to JPEG or PNG";
constexpr const char* as_heic =
    "convert it to JPEG or PNG, as with: heif-convert X.heic X.png (package libheif-examples)";
constexpr const char* as_still_webp =
    "FFmpeg does not decode it: take a picture out, as with: webpmux -get frame 1 X.webp -o "
    "Y.webp, "
    "or make a video of it";

struct Signature {
  std::size_t at;
  std::string_view bytes;
  FileKind kind;
};
constexpr std::array signatures = {
    Signature{0, "PAR1"sv, {"a Parquet table", as_list}},
    Signature{0, "ARROW1"sv, {"an Arrow table", as_list}},
    Signature{0, "\x89HDF\r\n\x1a\n"sv, {"an HDF5 file", as_list}},
    Signature{0, "\x93NUMPY"sv, {"a NumPy array", as_list}},
    Signature{0, "SQLite format 3"sv, {"an SQLite database", as_list}},
    Signature{0, "PK\x03\x04"sv, {"a ZIP archive", unpack}},
    Signature{0, "PK\x05\x06"sv, {"an empty ZIP archive", unpack}},
    Signature{0, "\x1f\x8b"sv, {"packed with gzip", unpack}},
    Signature{0, "BZh"sv, {"packed with bzip2", unpack}},
    Signature{0,
              "\xfd"
              "7zXZ\0"sv,
              {"packed with xz", unpack}},
    Signature{0, "\x28\xb5\x2f\xfd"sv, {"packed with zstd", unpack}},
    Signature{0, "7z\xbc\xaf\x27\x1c"sv, {"a 7z archive", unpack}},
    Signature{0, "Rar!"sv, {"a RAR archive", unpack}},
    Signature{257, "ustar"sv, {"a tar archive", "unpack it; weft ingest reads SHARD.tar"}},
    Signature{0, "%PDF"sv, {"a PDF", as_jpeg}},
    Signature{0, "%!PS"sv, {"PostScript", as_jpeg}},
    Signature{0, "8BPS"sv, {"a Photoshop file", as_jpeg}},
    Signature{0, "gimp xcf"sv, {"a GIMP file", as_jpeg}},
    Signature{0, "FUJIFILMCCD-RAW"sv, {"a camera's raw picture", as_jpeg}},
    Signature{0, "IIU\0"sv, {"a camera's raw picture", as_jpeg}},
    Signature{0, "IIRO"sv, {"a camera's raw picture", as_jpeg}},
    Signature{8, "CR\2"sv, {"a camera's raw picture", as_jpeg}},
    Signature{4, "ftypcrx "sv, {"a camera's raw picture", as_jpeg}},
    Signature{0,
              "version https://git-lfs"sv,
              {"a pointer of Git LFS, not the file itself", "fetch it: git lfs pull"}},
    Signature{0,
              "\x7f"
              "ELF"sv,
              {"a program", "name a file of media"}},
};

bool has(std::string_view text, std::size_t at, std::string_view bytes) {
  return text.size() >= at && text.substr(at).starts_with(bytes);
}

// "<!DOCTYPE html", "<html": what a server sent where a file was asked for.
bool is_html(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of("\xef\xbb\xbf \t\r\n"), text.size()));
  constexpr std::array<std::string_view, 2> words = {"<!doctype html", "<html"};
  return std::ranges::any_of(words, [&](std::string_view word) {
    return std::ranges::equal(text.substr(0, word.size()), word, {},
                              [](char c) { return c >= 'A' && c <= 'Z' ? c + 'a' - 'A' : c; });
  });
}

// Of a box of the ISO's, whose brands say what follows.
bool is_heic(std::string_view text) {
  if (!has(text, 4, "ftyp")) return false;
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::size_t length =
      std::min<std::size_t>(text.size(), std::size_t{byte(2)} << 8 | byte(3));
  constexpr std::array brands = {"heic"sv, "heix"sv, "heim"sv, "heis"sv};
  for (std::size_t at = 8; at + 4 <= length; at += at == 8 ? 8 : 4)  // 4 bytes of version
    if (std::ranges::find(brands, text.substr(at, 4)) != brands.end()) return true;
  return false;
}

bool is_animated_webp(std::string_view text) {
  constexpr int animated = 2;
  return has(text, 0, "RIFF") && has(text, 8, "WEBPVP8X") && text.size() > 20 &&
         (text[20] & animated) != 0;
}

}  // namespace

FileKind unreadable_kind(std::span<const std::byte> begin) {
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), begin.size());
  if (text.empty()) return {"an empty file", "copy it again, or leave it out"};
  if (is_heic(text)) return {"a HEIC picture", as_heic};
  if (is_animated_webp(text)) return {"an animated WebP", as_still_webp};
  if (is_html(text)) return {"a web page", "was it a download? fetch it again"};
  for (const Signature& s : signatures)
    if (has(text, s.at, s.bytes)) return s.kind;
  return {};
}

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

// Of a TIFF file, the form of which a block of EXIF has too: a whole number in its first directory,
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
