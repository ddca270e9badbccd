// Tables of files, such as lists of footage and the table of `weft score`: rows with a column
// `path`, or another one, read and written one at a time, so that their number does not matter. CSV
// as pandas reads it (RFC 4180: quotes, line breaks within them, LF, CRLF or CR, a byte order mark,
// blank lines skipped), or JSON lines. Both are UTF-8. Names of columns count without blanks around
// them and in any case; a CSV with blanks behind the commas of its header may have them everywhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <istream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

enum class TableForm { none, csv, json_lines };
// By the ending of a file's name, in any case: .csv; .jsonl, .ndjson or .odgt.
TableForm form_of_name(const std::string& path);

// Whether a column of the name `name` is the one that is called `wanted`.
bool is_column(std::string_view name, std::string_view wanted);
// The member of an object that is_column calls so; null where there is none, and for texts that
// mean that (is_missing).
nlohmann::ordered_json member_of(const nlohmann::ordered_json& object, std::string_view wanted);

// Where a value begins and ends in a row's text.
struct TextSpan {
  std::size_t begin = 0, end = 0;
};

struct TableRow {
  std::int64_t line = 1;          // of the file, from 1
  std::string text;               // as it is in the file, without its end of line
  std::string path;               // of the column wanted; empty where the row has none
  std::vector<TextSpan> fields;   // of CSV: each value, quotes included
  nlohmann::ordered_json object;  // of JSON lines
};

class TableReader {
 public:
  // Opens it and reads a CSV's header. Exit::data for what is no regular file, no text (a Parquet
  // table, UTF-16), is empty, or has no column of the name `wanted`; the error lists
  // the columns that are there. "": any columns will do. A file whose name does not tell its form
  // is of `otherwise`.
  explicit TableReader(const std::filesystem::path& path, std::string wanted = "path",
                       TableForm otherwise = TableForm::csv);
  // The same of a table in memory, called `name` in messages, with a column `path`.
  static TableReader of_text(std::string text, const std::string& name, TableForm form);

  bool is_csv() const { return csv_; }
  // The columns of CSV. The first of two of the same name counts.
  const std::vector<std::string>& columns() const { return columns_; }
  std::size_t column(std::string_view name) const;  // its place; npos: there is none
  const TableRow& header() const { return header_; }
  const std::string& mark() const { return mark_; }  // the byte order mark, or ""
  const std::string& line_end() const { return line_end_; }

  // The next row; false at the end. Exit::data, naming the line, for a quote that nobody closes, a
  // row with more values than columns, a line of JSON that is no object or lacks the column, bytes
  // that are not UTF-8, a zero byte in the path.
  bool next(TableRow& row);

  // A value of a row: of CSV a text without quotes and blanks around it. Null where there is none,
  // and for texts that mean that (is_missing).
  nlohmann::ordered_json value(const TableRow& row, std::string_view column) const;
  // "meta.csv, line 3": for messages.
  std::string where(const TableRow& row) const;

 private:
  TableReader(std::filesystem::path path, std::string wanted, TableForm form,
              std::unique_ptr<std::istream> in);
  bool read_record(TableRow& row);
  bool read_json(TableRow& row);
  void check_encoding(const TableRow& row) const;
  std::string cell(const TableRow& row, std::size_t column) const;
  int get();

  std::filesystem::path path_;
  std::string wanted_;
  std::unique_ptr<std::istream> in_;
  bool csv_;
  bool blanks_ = true;  // blanks in front of a quote do not count
  std::int64_t line_ = 1;
  std::string mark_, line_end_;
  std::vector<std::string> columns_, keys_;  // keys: in small letters
  TableRow header_;
  std::size_t path_column_ = 0;
};

// The columns of a table, of JSON lines the names in the first, for messages: up to twenty.
std::string columns_in(const std::filesystem::path& table);

// A value as a field of CSV: in quotes where it has to be.
std::string csv_cell(const std::string& value);

// Writes rows of a reader with columns of its own: what was in the table stays byte for byte. A
// column that the table has already is replaced in its place, others come last.
class TableWriter {
 public:
  using Sink = std::function<void(std::string_view)>;
  TableWriter(const TableReader& table, std::vector<std::string> columns, Sink sink);
  // One value a column; null is an empty cell, or JSON's null.
  void add(const TableRow& row, const std::vector<nlohmann::ordered_json>& values);

 private:
  void add_csv(const TableRow& row, const std::vector<std::string>& cells);
  void add_json(const TableRow& row, const std::vector<nlohmann::ordered_json>& values);

  const TableReader& table_;
  std::vector<std::string> columns_;
  std::vector<std::size_t> places_;  // of each column in the table; npos: behind it
  Sink sink_;
};

// Text of others (lists, captions next to media) is UTF-8, or refused with what to do about it.

// Exit::data for a file that, by its first bytes (16 will do), is a Parquet table, a workbook, an
// archive, UTF-16 text and so on: each is named, with the way to convert it.
void refuse_other_kinds(const std::string& path, std::string_view begin);

inline constexpr std::uint64_t longest_text = 0x7fffffff;  // in bytes, for the next
// The first byte of `text` that is not UTF-8, or npos.
std::size_t find_non_utf8(std::string_view text);

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
