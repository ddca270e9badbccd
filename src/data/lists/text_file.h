// Text of others: lists, captions next to media. It is UTF-8, or refused with what to do about it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

// Exit::data for a file that, by its first bytes (16 will do), is a Parquet table, a workbook, an
// archive, UTF-16 text and so on: each is named, with the way to convert it.
void refuse_other_kinds(const std::string& path, std::string_view begin);
// The same, and for other files with zero bytes.
void check_is_text(const std::string& path, std::string_view begin);

inline constexpr std::uint64_t longest_text = 0x7fffffff;  // in bytes, for the next
// The first byte of `text` that is not UTF-8, or npos.
std::size_t find_non_utf8(std::string_view text);
// Exit::data: the byte `byte` of the file `path` is not UTF-8; `where` is its line and column.
[[noreturn]] void refuse_encoding(const std::string& path, const std::string& where, char byte);

// `text`, of a file called `path` in messages, without its byte order mark. Exit::data unless it is
// UTF-8.
std::string checked_text(std::string text, const std::string& path);
// The same of a file. Exit::data, with `hint`, for one of more than `most` bytes.
std::string read_text_file(const std::string& path, std::uint64_t most, const std::string& hint);

inline constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
// Without white space at both ends.
std::string_view trimmed(std::string_view text);
// What pandas.read_csv takes for a missing value unless it is told otherwise.
bool is_missing(std::string_view value);

}  // namespace weft
