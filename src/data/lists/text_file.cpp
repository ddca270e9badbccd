#include "data/lists/text_file.h"

#include <unicode/utf8.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/file.h"

namespace weft {
namespace {

struct OtherKind {
  std::string_view begin;
  const char *name, *hint;
};

constexpr const char* unpack_hint = "unpack it first";
constexpr const char* utf16_hint = "convert it: iconv -f UTF-16 -t UTF-8 {0} > utf8_{1}";

using namespace std::string_view_literals;
constexpr std::array<OtherKind, 13> other_kinds = {{
    {"PAR1", "a Parquet table",
     "write it as CSV: python3 -c \"import pandas; pandas.read_parquet('{0}')"
     ".to_csv('list.csv', index=False)\""},
    {"ARROW1", "an Arrow table", "write it as CSV, as with pandas' to_csv"},
    {"\x89HDF\r\n\x1a\n", "an HDF5 file",
     "a store of weft is read by data.path; write a table as CSV, as with pandas' to_csv"},
    {"PK\3\4", "a workbook or a ZIP archive",
     "write a workbook's sheet as CSV, or unpack the archive"},
    {"\xd0\xcf\x11\xe0", "a workbook of an old Excel", "write its sheet as CSV"},
    {"\x1f\x8b", "a gzip archive", unpack_hint},
    {"\x28\xb5\x2f\xfd", "a zstd archive", unpack_hint},
    {"BZh", "a bzip2 archive", unpack_hint},
    {"\xfd"
     "7zXZ",
     "an xz archive", unpack_hint},
    {"7z\xbc\xaf\x27\x1c", "a 7z archive", unpack_hint},
    {"SQLite format 3", "an SQLite database", "write its table as CSV"},
    {"\xff\xfe"sv, "UTF-16 text", utf16_hint},
    {"\xfe\xff"sv, "UTF-16 text", utf16_hint},
}};

[[noreturn]] void refuse_kind(const std::string& path, const char* name, const char* hint) {
  throw Error(Exit::data, fmt::format("{} is {}, not UTF-8 text", path, name),
              fmt::format(fmt::runtime(hint), path, path.substr(path.rfind('/') + 1)), __FILE__,
              __LINE__);
}

}  // namespace

void refuse_other_kinds(const std::string& path, std::string_view begin) {
  for (const OtherKind& kind : other_kinds)
    if (begin.starts_with(kind.begin)) refuse_kind(path, kind.name, kind.hint);
}

void check_is_text(const std::string& path, std::string_view begin) {
  refuse_other_kinds(path, begin);
  // UTF-16 without a mark: of Latin text every second byte is zero.
  if (begin.size() >= 2 && begin[0] == '\0' && begin[1] != '\0')
    refuse_kind(path, "UTF-16 text", "convert it: iconv -f UTF-16BE -t UTF-8 {0} > utf8_{1}");
  if (begin.size() >= 2 && begin[0] != '\0' && begin[1] == '\0')
    refuse_kind(path, "UTF-16 text", "convert it: iconv -f UTF-16LE -t UTF-8 {0} > utf8_{1}");
  if (begin.find('\0') != begin.npos) refuse_kind(path, "a binary file", "is it the right file?");
}

std::size_t find_non_utf8(std::string_view text) {
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    const std::int32_t at = i;
    UChar32 c = 0;
    U8_NEXT(text.data(), i, length, c);
    if (c < 0) return static_cast<std::size_t>(at);
  }
  return text.npos;
}

void refuse_encoding(const std::string& path, const std::string& where, char byte) {
  throw Error(Exit::data,
              fmt::format("{}, {}: the byte 0x{:02x} is not UTF-8", path, where,
                          static_cast<unsigned char>(byte)),
              fmt::format("convert it, from the encoding it was saved in: iconv -f WINDOWS-1252 -t "
                          "UTF-8 {} > utf8_{}",
                          path, path.substr(path.rfind('/') + 1)),
              __FILE__, __LINE__);
}

std::string checked_text(std::string text, const std::string& path) {
  check_is_text(path, std::string_view(text).substr(0, 16));
  if (text.starts_with(byte_order_mark)) text.erase(0, byte_order_mark.size());
  const std::size_t bad = find_non_utf8(text);
  if (bad != text.npos)
    refuse_encoding(
        path,
        fmt::format("line {}", 1 + std::ranges::count(std::string_view(text).substr(0, bad), '\n')),
        text[bad]);
  return text;
}

std::string read_text_file(const std::string& path, std::uint64_t most, const std::string& hint) {
  return checked_text(read_whole(path, std::min(most, longest_text), Exit::data, hint), path);
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view white = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(white);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(white) - begin + 1);
}

bool is_missing(std::string_view value) {
  constexpr std::array<std::string_view, 19> missing = {
      "",     "#N/A",   "#N/A N/A", "#NA",  "-1.#IND", "-1.#QNAN", "-NaN",
      "-nan", "1.#IND", "1.#QNAN",  "<NA>", "N/A",     "NA",       "NULL",
      "NaN",  "None",   "n/a",      "nan",  "null"};
  return std::ranges::find(missing, value) != missing.end();
}

}  // namespace weft
