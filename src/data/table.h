// Tables of files, such as lists of footage and the table of `weft score`: rows with a column
// `path`, or another one, read and written one at a time, so that their number does not matter. CSV
// as pandas reads it (RFC 4180: quotes, line breaks within them, LF, CRLF or CR, a byte order mark,
// blank lines skipped), or JSON lines, where the name ends in .jsonl.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace weft {

// Where a value begins and ends in a row's text.
struct TextSpan {
  std::size_t begin = 0, end = 0;
};

struct TableRow {
  std::int64_t line = 1;         // of the file, from 1
  std::string text;              // as it is in the file, without its end of line
  std::string path;              // of the column wanted; empty where the row has none
  std::vector<TextSpan> fields;  // of CSV: each value, quotes included
};

class TableReader {
 public:
  // Opens it and reads a CSV's header. Exit::data for what is no regular file, is empty, or has no
  // column of the name `wanted`; the error lists the columns that are there. "": any columns will
  // do.
  explicit TableReader(const std::filesystem::path& path, std::string wanted = "path");

  bool is_csv() const { return csv_; }
  // Of CSV. The first of two of the same name counts.
  const std::vector<std::string>& columns() const { return columns_; }
  const TableRow& header() const { return header_; }
  const std::string& mark() const { return mark_; }  // the byte order mark, or ""
  const std::string& line_end() const { return line_end_; }

  // The next row; false at the end. Exit::data, naming the line, for a quote that nobody closes, a
  // row with more values than columns, a line of JSON that is no object or lacks the column.
  bool next(TableRow& row);

  // A CSV row's values without their quotes; a short row ends in empty ones.
  std::vector<std::string> values(const TableRow& row) const;

 private:
  bool read_record(TableRow& row);
  bool read_json(TableRow& row);
  int get();

  std::filesystem::path path_;
  std::string wanted_;
  std::ifstream in_;
  bool csv_;
  std::int64_t line_ = 1;
  std::string mark_, line_end_;
  std::vector<std::string> columns_;
  TableRow header_;
  std::size_t path_column_ = 0;
};

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

}  // namespace weft
