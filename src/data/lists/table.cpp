#include "data/lists/table.h"

#include <unicode/utf8.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"

namespace weft {
namespace {

struct OtherKind {
  std::string_view begin;
  const char *name, *hint;
};

constexpr const char* utf16_hint = "convert it: iconv -f UTF-16 -t UTF-8 {0} > utf8_{1}";

using namespace std::string_view_literals;
constexpr std::array<OtherKind, 7> other_kinds = {{
    {"PAR1", "a Parquet table",
     "write it as CSV: python3 -c \"import pandas; pandas.read_parquet('{0}')"
     ".to_csv('list.csv', index=False)\""},
    {"ARROW1", "an Arrow table", "write it as CSV, as with pandas' to_csv"},
    {"\x89HDF\r\n\x1a\n", "an HDF5 file",
     "a store of weft is read by data.path; write a table as CSV, as with pandas' to_csv"},
    {"PK\3\4", "a workbook or a ZIP archive",
     "write a workbook's sheet as CSV, or unpack the archive"},
    {"\xd0\xcf\x11\xe0", "a workbook of an old Excel", "write its sheet as CSV"},
    {"\xff\xfe"sv, "UTF-16 text", utf16_hint},
    {"\xfe\xff"sv, "UTF-16 text", utf16_hint},
}};

[[noreturn]] void refuse_kind(const std::string& path, const char* name, const char* hint) {
  throw Error(Exit::data, fmt::format("{} is {}, not UTF-8 text", path, name),
              fmt::format(fmt::runtime(hint), path, path.substr(path.rfind('/') + 1)), __FILE__,
              __LINE__);
}

// Exit::data for a file that is no text by its first bytes, some zero bytes among them.
void check_is_text(const std::string& path, std::string_view begin) {
  refuse_other_kinds(path, begin);
  // UTF-16 without a mark: of Latin text every second byte is zero.
  if (begin.size() >= 2 && begin[0] == '\0' && begin[1] != '\0')
    refuse_kind(path, "UTF-16 text", "convert it: iconv -f UTF-16BE -t UTF-8 {0} > utf8_{1}");
  if (begin.size() >= 2 && begin[0] != '\0' && begin[1] == '\0')
    refuse_kind(path, "UTF-16 text", "convert it: iconv -f UTF-16LE -t UTF-8 {0} > utf8_{1}");
  if (begin.find('\0') < 16) refuse_kind(path, "a binary file", "is it the right file?");
}

// The byte `byte` of the file `path` is not UTF-8; `where` is its line and column.
[[noreturn]] void refuse_encoding(const std::string& path, const std::string& where, char byte) {
  throw Error(Exit::data,
              fmt::format("{}, {}: the byte 0x{:02x} is not UTF-8", path, where,
                          static_cast<unsigned char>(byte)),
              fmt::format("convert it, from the encoding it was saved in: iconv -f WINDOWS-1252 -t "
                          "UTF-8 {} > utf8_{}",
                          path, path.substr(path.rfind('/') + 1)),
              __FILE__, __LINE__);
}

}  // namespace

void refuse_other_kinds(const std::string& path, std::string_view begin) {
  for (const OtherKind& kind : other_kinds)
    if (begin.starts_with(kind.begin)) refuse_kind(path, kind.name, kind.hint);
  const FileKind kind = unreadable_kind(std::as_bytes(std::span(begin)));
  if (kind.what != nullptr && !begin.empty()) refuse_kind(path, kind.what, kind.hint);
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

std::string checked_text(std::string text, const std::string& path) {
  check_is_text(path, std::string_view(text).substr(0, 64));
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

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t npos = std::string::npos;
constexpr int end_of_file = std::char_traits<char>::eof();
constexpr std::size_t longest_json = std::size_t{8} << 20;  // parsed it takes a multiple of that
constexpr std::size_t longest_row = std::size_t{64} << 20;  // more is a quote that nobody closed

std::string small_letters(std::string_view text) {
  std::string small(text);
  for (char& c : small)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return small;
}

// A column's name without blanks and byte order marks around it.
std::string_view plain_name(std::string_view name) {
  name = trimmed(name);
  while (name.starts_with(byte_order_mark)) name = trimmed(name.substr(byte_order_mark.size()));
  return name;
}

// The value of a CSV field. Quotes count where the field begins with one; what follows the closing
// one belongs to it, as in pandas.
std::string field_value(std::string_view field, bool blanks) {
  const std::size_t quote = blanks ? field.find_first_not_of(" \t") : 0;
  if (quote >= field.size() || field[quote] != '"') return std::string(trimmed(field));
  std::string value;
  bool quoted = true;
  for (std::size_t i = quote + 1; i < field.size(); ++i) {
    if (!quoted || field[i] != '"')
      value += field[i];
    else if (i + 1 < field.size() && field[i + 1] == '"')
      value += field[++i];
    else
      quoted = false;
  }
  return value;
}

std::string dump(const Json& value) {
  return dump_json(value, -1, ' ', false, Json::error_handler_t::replace);
}

std::string as_cell(const Json& value) {
  if (value.is_null()) return "";
  return csv_cell(value.is_string() ? value.get<std::string>() : dump(value));
}

bool means_none(const Json& value) {
  return value.is_string() && is_missing(trimmed(value.get_ref<const std::string&>()));
}

const Json* find_member(const Json& object, std::string_view wanted) {
  if (const auto exact = object.find(wanted); exact != object.end()) return &*exact;
  for (const auto& [name, value] : object.items())
    if (is_column(name, wanted)) return &value;
  return nullptr;
}

// The columns as an error names them: some, and nothing that a terminal obeys.
std::string listed(const std::vector<std::string>& columns) {
  constexpr std::size_t most = 20, longest = 60;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, columns.size()); ++i)
    list += (i == 0 ? "" : ", ") + printable(columns[i], longest);
  if (columns.size() > most) list += fmt::format(", and {} more", columns.size() - most);
  return list;
}

// A member of the outermost object of valid JSON.
struct Member {
  std::string name;
  TextSpan value;
};

std::size_t end_of_string(const std::string& text, std::size_t at) {
  for (++at; text[at] != '"'; ++at)
    if (text[at] == '\\') ++at;
  return at + 1;
}

std::vector<Member> members_of(const std::string& text) {
  std::vector<Member> members;
  int depth = 0;
  std::optional<TextSpan> name;  // of the member whose value is being read
  std::size_t value = npos;
  const auto end_value = [&](std::size_t end) {
    if (!name || value == npos) return;
    while (end > value && std::string_view(" \t\r\n").find(text[end - 1]) != npos) --end;
    members.push_back(
        {parse_json<Json>(text.substr(name->begin, name->end - name->begin)), {value, end}});
    name.reset();
    value = npos;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (std::string_view(" \t\r\n").find(c) != npos) continue;
    if (depth == 1 && !name && c == '"') {
      const std::size_t end = end_of_string(text, i);
      name = {i, end};
      i = end - 1;
      continue;
    }
    if (depth == 1 && name && value == npos && c == ':') {
      value = text.find_first_not_of(" \t\r\n", i + 1);
      continue;
    }
    if (c == '"') i = end_of_string(text, i) - 1;
    if (depth == 1 && (c == ',' || c == '}')) end_value(i);
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
  }
  return members;
}

std::unique_ptr<std::istream> open_text(const std::filesystem::path& path) {
  File::open(path, Exit::data);  // refuses folders and pipes
  auto in = std::make_unique<std::ifstream>(path, std::ios::binary);
  WEFT_CHECK(in->good(), Exit::data, "check its permissions", "cannot open {}", path.string());
  return in;
}

}  // namespace

TableForm form_of_name(const std::string& path) {
  const std::string ending = ending_of(path);
  if (ending == ".csv") return TableForm::csv;
  return ending == ".jsonl" || ending == ".ndjson" || ending == ".odgt" ? TableForm::json_lines
                                                                        : TableForm::none;
}

bool is_column(std::string_view name, std::string_view wanted) {
  return small_letters(plain_name(name)) == small_letters(wanted);
}

Json member_of(const Json& object, std::string_view wanted) {
  const Json* found = find_member(object, wanted);
  return found == nullptr || means_none(*found) ? Json() : *found;
}

TableReader::TableReader(const std::filesystem::path& path, std::string wanted, TableForm otherwise)
    : TableReader(
          path, std::move(wanted),
          form_of_name(path.string()) == TableForm::none ? otherwise : form_of_name(path.string()),
          open_text(path)) {}

TableReader TableReader::of_text(std::string text, const std::string& name, TableForm form) {
  return {name, "path", form, std::make_unique<std::istringstream>(std::move(text))};
}

TableReader::TableReader(std::filesystem::path path, std::string wanted, TableForm form,
                         std::unique_ptr<std::istream> in)
    : path_(std::move(path)),
      wanted_(std::move(wanted)),
      in_(std::move(in)),
      csv_(form == TableForm::csv) {
  std::string first(64, '\0');
  in_->read(first.data(), std::ssize(first));
  first.resize(in_->gcount());
  check_is_text(path_.string(), first);
  if (first.starts_with(byte_order_mark)) mark_ = byte_order_mark;
  in_->clear();
  in_->seekg(std::ssize(mark_));
  if (!csv_) {
    line_end_ = "\n";
    return;
  }
  WEFT_CHECK(read_record(header_), Exit::data,
             wanted_.empty() ? "give it a header line that names its columns"
                             : fmt::format("give it a header line with a column `{}`", wanted_),
             "{} is empty", path_.string());
  check_encoding(header_);
  blanks_ = false;
  for (std::size_t i = 0; i < header_.fields.size(); ++i) {
    const char c = header_.text.c_str()[header_.fields[i].begin];
    blanks_ = blanks_ || (i > 0 && (c == ' ' || c == '\t'));
  }
  for (const TextSpan& f : header_.fields)
    columns_.emplace_back(plain_name(
        field_value(std::string_view(header_.text).substr(f.begin, f.end - f.begin), true)));
  for (const std::string& column : columns_) keys_.push_back(small_letters(column));
  if (wanted_.empty()) return;
  path_column_ = column(wanted_);
  WEFT_CHECK(
      path_column_ != npos, Exit::data,
      fmt::format("name the column with the files `{}`; columns are separated by commas", wanted_),
      "{} has no column `{}`, but: {}", path_.string(), wanted_, listed(columns_));
}

std::size_t TableReader::column(std::string_view name) const {
  if (const auto exact = std::ranges::find(columns_, name); exact != columns_.end())
    return static_cast<std::size_t>(exact - columns_.begin());
  const auto found = std::ranges::find(keys_, small_letters(name));
  return found == keys_.end() ? npos : static_cast<std::size_t>(found - keys_.begin());
}

std::string TableReader::where(const TableRow& row) const {
  return fmt::format("{}, line {}", path_.string(), row.line);
}

void TableReader::check_encoding(const TableRow& row) const {
  const std::size_t bad = find_non_utf8(row.text);
  if (bad == npos) return;
  std::string place = fmt::format(
      "line {}", row.line + std::ranges::count(std::string_view(row.text).substr(0, bad), '\n'));
  for (std::size_t i = 0; i < row.fields.size() && i < columns_.size(); ++i)
    if (row.fields[i].begin <= bad && bad < row.fields[i].end)
      place += fmt::format(", column {}", columns_[i]);
  refuse_encoding(path_.string(), place, row.text[bad]);
}

int TableReader::get() { return in_->rdbuf()->sbumpc(); }

// One record with its fields, blank lines skipped.
bool TableReader::read_record(TableRow& row) {
  enum class At { field, plain, quoted, quote };
  for (;;) {
    row.text.clear();
    row.fields.clear();
    row.line = line_;
    std::size_t begin = 0;
    At at = At::field;
    std::int64_t quote_line = line_;
    int c = 0;
    for (;;) {
      c = get();
      if (c == end_of_file) break;
      const bool line_break = c == '\n' || c == '\r';
      if (line_break && at != At::quoted) break;
      if (c == '\n') ++line_;
      if (at == At::quoted) {
        if (c == '"') at = At::quote;
      } else if (c == ',') {
        row.fields.push_back({begin, row.text.size()});
        begin = row.text.size() + 1;
        at = At::field;
      } else if (c == '"' && at != At::plain) {
        at = At::quoted;  // also a doubled one
        quote_line = line_;
      } else if (!blanks_ || at != At::field || (c != ' ' && c != '\t')) {
        at = At::plain;
      }
      row.text += static_cast<char>(c);
      WEFT_CHECK(row.text.size() <= longest_row, Exit::data, "close the quote",
                 "{}, line {}: a row of more than {} MiB", path_.string(), row.line,
                 longest_row >> 20);
    }
    WEFT_CHECK(at != At::quoted, Exit::data, "close the quote; within quotes it is doubled",
               "{}, line {}: a quote is not closed", path_.string(), quote_line);
    row.fields.push_back({begin, row.text.size()});
    if (c == end_of_file) {
      WEFT_CHECK(!in_->bad(), Exit::data, "copy it again", "cannot read {}", path_.string());
      if (line_end_.empty()) line_end_ = "\n";
      return !row.text.empty();
    }
    ++line_;
    std::string end(1, static_cast<char>(c));
    if (c == '\r' && in_->rdbuf()->sgetc() == '\n') end += static_cast<char>(get());
    if (line_end_.empty()) line_end_ = end;
    if (!row.text.empty()) return true;
  }
}

bool TableReader::read_json(TableRow& row) {
  row.fields.clear();
  const auto next_line = [&] {
    row.text.clear();
    int c = get();
    for (; c != end_of_file && c != '\n'; c = get()) {
      row.text += static_cast<char>(c);
      WEFT_CHECK(row.text.size() <= longest_json, Exit::data, "is it a table of JSON lines?",
                 "{}, line {}: a line of more than {} MiB", path_.string(), line_,
                 longest_json >> 20);
    }
    return c == '\n' || !row.text.empty();
  };
  while (next_line()) {
    row.line = line_++;
    if (row.text.ends_with('\r')) {
      row.text.pop_back();
      line_end_ = "\r\n";
    }
    if (row.text.find_first_not_of(" \t") == npos) continue;
    check_encoding(row);
    row.object = try_parse_json<Json>(row.text);
    WEFT_CHECK(row.object.is_object(), Exit::data,
               fmt::format("a line holds one object, such as {{\"{}\": ...}}",
                           wanted_.empty() ? "name" : wanted_),
               "{} is no JSON object", where(row));
    if (wanted_.empty()) return true;
    const Json* path = find_member(row.object, wanted_);
    std::vector<std::string> names;
    for (const auto& [name, value] : row.object.items()) names.push_back(name);
    WEFT_CHECK(path != nullptr && path->is_string(), Exit::data,
               fmt::format("each line has the file as the text `{}`", wanted_),
               "{} has no text `{}`, but: {}", where(row), wanted_, listed(names));
    row.path = path->get<std::string>();
    return true;
  }
  return false;
}

bool TableReader::next(TableRow& row) {
  if (!(csv_ ? read_record(row) : read_json(row))) return false;
  if (csv_) {
    check_encoding(row);
    WEFT_CHECK(row.fields.size() <= columns_.size(), Exit::data,
               "put a value that has commas in quotes",
               "{} has {} values, and there are {} columns", where(row), row.fields.size(),
               columns_.size());
    row.path = wanted_.empty() ? "" : cell(row, path_column_);
  }
  if (is_missing(row.path)) row.path.clear();
  WEFT_CHECK(row.path.find('\0') == npos, Exit::data, "name a file", "{}: the path has a zero byte",
             where(row));
  return true;
}

std::string TableReader::cell(const TableRow& row, std::size_t column) const {
  if (column >= row.fields.size()) return "";  // a short row ends in empty values
  const TextSpan f = row.fields[column];
  return field_value(std::string_view(row.text).substr(f.begin, f.end - f.begin), blanks_);
}

Json TableReader::value(const TableRow& row, std::string_view name) const {
  if (!csv_) return member_of(row.object, name);
  Json value = cell(row, column(name));
  return means_none(value) ? Json() : value;
}

std::string columns_in(const std::filesystem::path& table) {
  TableReader reader(table, "");
  std::vector<std::string> names = reader.columns();
  if (TableRow row; !reader.is_csv() && reader.next(row))
    for (const auto& [name, value] : row.object.items()) names.push_back(name);
  return listed(names);
}

std::string csv_cell(const std::string& value) {
  if (value.find_first_of(",\"\r\n") == npos && trimmed(value) == value) return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

TableWriter::TableWriter(const TableReader& table, std::vector<std::string> columns, Sink sink)
    : table_(table), columns_(std::move(columns)), sink_(std::move(sink)) {
  sink_(table_.mark());
  for (const std::string& column : columns_) places_.push_back(table_.column(column));
  if (table_.is_csv()) add_csv(table_.header(), columns_);
}

void TableWriter::add(const TableRow& row, const std::vector<Json>& values) {
  WEFT_ASSERT(values.size() == columns_.size());
  if (!table_.is_csv()) {
    add_json(row, values);
    return;
  }
  std::vector<std::string> cells;
  for (const Json& value : values) cells.push_back(as_cell(value));
  add_csv(row, cells);
}

void TableWriter::add_csv(const TableRow& row, const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < table_.columns().size(); ++i) {
    if (i > 0) line += ',';
    const auto mine = std::ranges::find(places_, i);
    if (mine != places_.end())
      line += cells[mine - places_.begin()];
    else if (i < row.fields.size())  // a short row ends in empty values
      line += row.text.substr(row.fields[i].begin, row.fields[i].end - row.fields[i].begin);
  }
  for (std::size_t i = 0; i < cells.size(); ++i)
    if (places_[i] == npos) line += ',' + cells[i];
  sink_(line + table_.line_end());
}

// In the row's own text, so that its numbers keep their digits.
void TableWriter::add_json(const TableRow& row, const std::vector<Json>& values) {
  const std::vector<Member> members = members_of(row.text);
  std::vector<std::pair<TextSpan, std::string>> changes;
  std::string added;
  for (std::size_t i = 0; i < values.size(); ++i) {
    bool replaced = false;
    for (const Member& m : members)
      if (is_column(m.name, columns_[i])) {
        changes.emplace_back(m.value, dump(values[i]));
        replaced = true;
      }
    // A row has a `path`, so there is a member before.
    if (!replaced) added += fmt::format(", {}: {}", dump(columns_[i]), dump(values[i]));
  }
  const std::size_t last = members.back().value.end;
  changes.push_back({{last, last}, added});
  std::ranges::sort(changes, {}, [](const auto& c) { return c.first.begin; });
  std::string line;
  std::size_t at = 0;
  for (const auto& [span, text] : changes) {
    line += row.text.substr(at, span.begin - at) + text;
    at = span.end;
  }
  sink_(line + row.text.substr(at) + table_.line_end());
}

}  // namespace weft
