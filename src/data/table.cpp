#include "data/table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t npos = std::string::npos;
constexpr int end_of_file = std::char_traits<char>::eof();
constexpr std::size_t longest_json = std::size_t{8} << 20;  // parsed it takes a multiple of that
constexpr std::size_t longest_row = std::size_t{64} << 20;  // more is a quote that nobody closed

bool ends_in_jsonl(const std::filesystem::path& path) {
  std::string ending = path.extension().string();
  for (char& c : ending)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return ending == ".jsonl";
}

// The value of a CSV field. Quotes count where the field begins with one; what follows the closing
// one belongs to it, as in pandas.
std::string field_value(std::string_view field) {
  if (!field.starts_with('"')) return std::string(field);
  std::string value;
  bool quoted = true;
  for (std::size_t i = 1; i < field.size(); ++i) {
    if (!quoted || field[i] != '"')
      value += field[i];
    else if (i + 1 < field.size() && field[i + 1] == '"')
      value += field[++i];
    else
      quoted = false;
  }
  return value;
}

std::string as_field(const std::string& value) {
  if (value.find_first_of(",\"\r\n") == npos) return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string as_cell(const Json& value) {
  if (value.is_null()) return "";
  return as_field(value.is_string() ? value.get<std::string>() : dump(value));
}

// The columns as an error names them: some, and nothing that a terminal obeys.
std::string listed(const std::vector<std::string>& columns) {
  constexpr std::size_t most = 20, longest = 60;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, columns.size()); ++i)
    list += (i == 0 ? "" : ", ") + columns[i].substr(0, longest);
  if (columns.size() > most) list += fmt::format(", and {} more", columns.size() - most);
  for (char& c : list)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
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
        {Json::parse(text.substr(name->begin, name->end - name->begin)), {value, end}});
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

}  // namespace

TableReader::TableReader(const std::filesystem::path& path, std::string wanted)
    : path_(path), wanted_(std::move(wanted)), csv_(!ends_in_jsonl(path)) {
  File::open(path, Exit::data);  // refuses folders and pipes
  in_.open(path, std::ios::binary);
  WEFT_CHECK(in_.is_open(), Exit::data, "check its permissions", "cannot open {}", path.string());
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
  std::string begin(byte_order_mark.size(), '\0');
  in_.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  if (in_.gcount() == std::ssize(begin) && begin == byte_order_mark) {
    mark_ = begin;
  } else {
    in_.clear();
    in_.seekg(0);
  }
  if (!csv_) {
    line_end_ = "\n";
    return;
  }
  WEFT_CHECK(read_record(header_), Exit::data,
             wanted_.empty() ? "give it a header line that names its columns"
                             : fmt::format("give it a header line with a column `{}`", wanted_),
             "{} is empty", path.string());
  for (const TextSpan& f : header_.fields)
    columns_.push_back(
        field_value(std::string_view(header_.text).substr(f.begin, f.end - f.begin)));
  if (wanted_.empty()) return;
  const auto found = std::ranges::find(columns_, wanted_);
  WEFT_CHECK(
      found != columns_.end(), Exit::data,
      fmt::format("name the column with the files `{}`; columns are separated by commas", wanted_),
      "{} has no column `{}`, but: {}", path.string(), wanted_, listed(columns_));
  path_column_ = static_cast<std::size_t>(found - columns_.begin());
}

int TableReader::get() { return in_.rdbuf()->sbumpc(); }

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
      } else {
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
      WEFT_CHECK(!in_.bad(), Exit::data, "copy it again", "cannot read {}", path_.string());
      if (line_end_.empty()) line_end_ = "\n";
      return !row.text.empty();
    }
    ++line_;
    std::string end(1, static_cast<char>(c));
    if (c == '\r' && in_.rdbuf()->sgetc() == '\n') end += static_cast<char>(get());
    if (line_end_.empty()) line_end_ = end;
    if (!row.text.empty()) return true;
  }
}

bool TableReader::read_json(TableRow& row) {
  row.fields.clear();
  const auto next_line = [&] {
    row.text.clear();
    int c = in_.get();
    for (; c != end_of_file && c != '\n'; c = in_.get()) {
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
    const auto j = try_parse_json<Json>(row.text);
    WEFT_CHECK(j.is_object(), Exit::data,
               fmt::format("a line holds one object, such as {{\"{}\": ...}}",
                           wanted_.empty() ? "name" : wanted_),
               "{}, line {} is no JSON object", path_.string(), row.line);
    if (wanted_.empty()) return true;
    const auto found = j.find(wanted_);
    std::vector<std::string> names;
    for (const auto& [name, value] : j.items()) names.push_back(name);
    WEFT_CHECK(found != j.end() && found->is_string(), Exit::data,
               fmt::format("each line has the file as the text `{}`", wanted_),
               "{}, line {} has no text `{}`, but: {}", path_.string(), row.line, wanted_,
               listed(names));
    row.path = found->get<std::string>();
    return true;
  }
  return false;
}

bool TableReader::next(TableRow& row) {
  if (!csv_) return read_json(row);
  if (!read_record(row)) return false;
  WEFT_CHECK(row.fields.size() <= columns_.size(), Exit::data,
             "put a value that has commas in quotes",
             "{}, line {} has {} values, and there are {} columns", path_.string(), row.line,
             row.fields.size(), columns_.size());
  row.path.clear();
  if (!wanted_.empty() && path_column_ < row.fields.size()) {
    const TextSpan f = row.fields[path_column_];
    row.path = field_value(std::string_view(row.text).substr(f.begin, f.end - f.begin));
  }
  return true;
}

std::vector<std::string> TableReader::values(const TableRow& row) const {
  std::vector<std::string> values(columns_.size());
  for (std::size_t i = 0; i < row.fields.size(); ++i) {
    const TextSpan f = row.fields[i];
    values[i] = field_value(std::string_view(row.text).substr(f.begin, f.end - f.begin));
  }
  return values;
}

TableWriter::TableWriter(const TableReader& table, std::vector<std::string> columns, Sink sink)
    : table_(table), columns_(std::move(columns)), sink_(std::move(sink)) {
  sink_(table_.mark());
  for (const std::string& column : columns_) {
    const auto found = std::ranges::find(table_.columns(), column);
    places_.push_back(found == table_.columns().end()
                          ? npos
                          : static_cast<std::size_t>(found - table_.columns().begin()));
  }
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
      line += cells[static_cast<std::size_t>(mine - places_.begin())];
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
      if (m.name == columns_[i]) {
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
