#include "core/file_kind.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/file.h"

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
              {"a pointer of Git LFS, not the file itself", "fetch it: git lfs pull", true}},
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

// An ISO media file whose brands name HEIC.
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
  if (text.empty()) return {"an empty file", "copy it again, or leave it out", true};
  if (is_heic(text)) return {"a HEIC picture", as_heic};
  if (is_animated_webp(text)) return {"an animated WebP", as_still_webp};
  if (is_html(text)) return {"a web page", "was it a download? fetch it again", true};
  for (const Signature& s : signatures)
    if (has(text, s.at, s.bytes)) return s.kind;
  return {};
}

void refuse_other_kind(const std::filesystem::path& path, Exit code, const char* hint) {
  const File file = File::open(path, code);
  std::vector<std::byte> begin(std::min<std::uint64_t>(file.size(), 512));
  file.read(begin, 0);
  const FileKind kind = unreadable_kind(begin);
  WEFT_CHECK(kind.what == nullptr, code, kind.stands_in ? kind.hint : hint, "{} is {}",
             path.string(), kind.what);
}

}  // namespace weft
