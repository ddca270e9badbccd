#include "data/ingest/inputs.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"

namespace weft {
namespace {

constexpr const char* list_hint = "a list has the columns path and, if there are captions, text";

void add(std::vector<IngestInput>& out, std::string path, MediaTrust trust, std::string text = "") {
  IngestInput& input = out.emplace_back();
  input.media.path = std::move(path);
  input.media.trust = trust;
  input.text = std::move(text);
}

// A path in a list is relative to the list, so that a folder can be moved as a whole.
std::string beside(const std::string& list, const std::string& path) {
  if (is_source_graph(path) || path.starts_with("/")) return path;
  return (std::filesystem::path(list).parent_path() / path).string();
}

void read_csv(const std::string& path, const MediaDeck& limits, std::vector<IngestInput>& out) {
  const auto rows = parse_csv(path, read_list(path, limits));
  WEFT_CHECK(!rows.empty(), Exit::data, list_hint, "list {} is empty", path);
  const auto& header = rows[0].fields;
  const auto column = [&](const char* name) {
    return static_cast<std::size_t>(std::find(header.begin(), header.end(), name) - header.begin());
  };
  const std::size_t path_column = column("path"), text_column = column("text");
  WEFT_CHECK(path_column < header.size(), Exit::data, list_hint,
             "list {} has no column named path in its first line", path);
  for (std::size_t r = 1; r < rows.size(); ++r) {
    const auto& fields = rows[r].fields;
    WEFT_CHECK(fields.size() == header.size(), Exit::data, list_hint,
               "list {}, line {}: {} columns, the first line has {}", path, rows[r].line,
               fields.size(), header.size());
    add(out, beside(path, fields[path_column]), MediaTrust::untrusted,
        text_column < fields.size() ? fields[text_column] : std::string());
  }
}

void read_jsonl(const std::string& path, const MediaDeck& limits, std::vector<IngestInput>& out) {
  const std::string text = read_list(path, limits);
  std::size_t line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string one = text.substr(at, end - at);
    at = end + 1;
    ++line;
    if (one.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto object = try_parse_json(one);
    WEFT_CHECK(object.is_object() && object.contains("path") && object["path"].is_string(),
               Exit::data, list_hint, "list {}, line {}: not a JSON object with a string `path`",
               path, line);
    const auto caption = object.find("text");
    const bool has = caption != object.end() && !caption->is_null();
    WEFT_CHECK(!has || caption->is_string(), Exit::data, list_hint,
               "list {}, line {}: `text` is not a string", path, line);
    add(out, beside(path, object["path"].get<std::string>()), MediaTrust::untrusted,
        has ? caption->get<std::string>() : std::string());
  }
}

void expand_glob(const std::string& pattern, std::vector<IngestInput>& out) {
  glob_t found{};
  const int status = glob(pattern.c_str(), 0, nullptr, &found);  // sorted
  for (std::size_t i = 0; status == 0 && i < found.gl_pathc; ++i)
    add(out, found.gl_pathv[i], MediaTrust::deck);
  globfree(&found);
  WEFT_CHECK(status == 0, Exit::data, "check ingest.inputs, and the directory weft was started in",
             "no file matches {}", pattern);
}

}  // namespace

std::string read_list(const std::string& path, const MediaDeck& limits) {
  return read_whole(path, static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20)), Exit::data,
                    "split the list, or raise media.max_list_mib");
}

std::vector<CsvRow> parse_csv(const std::string& path, const std::string& text) {
  std::vector<CsvRow> rows;
  CsvRow row;
  std::string field;
  bool quoted = false, any = false;
  std::size_t line = 1;
  const auto end_row = [&] {
    if (any || !field.empty() || !row.fields.empty()) {
      row.fields.push_back(std::move(field));
      rows.push_back(std::move(row));
    }
    row = CsvRow{line, {}};
    field.clear();
    any = false;
  };
  std::size_t i = text.starts_with("\xEF\xBB\xBF") ? 3 : 0;  // a byte order mark, from spreadsheets
  for (; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line;
    if (quoted) {
      if (c != '"')
        field += c;
      else if (i + 1 < text.size() && text[i + 1] == '"')
        field += text[++i];
      else
        quoted = false;
    } else if (c == '"') {
      quoted = any = true;
    } else if (c == ',') {
      row.fields.push_back(std::move(field));
      field.clear();
    } else if (c == '\n') {
      end_row();
    } else if (c != '\r') {
      field += c;
    }
  }
  WEFT_CHECK(!quoted, Exit::data, list_hint, "list {}: the quote in the row of line {} never ends",
             path, row.line);
  end_row();
  return rows;
}

std::vector<IngestInput> expand_inputs(const std::vector<std::string>& inputs,
                                       const MediaDeck& limits) {
  std::vector<IngestInput> out;
  for (const std::string& input : inputs) {
    if (is_source_graph(input))
      add(out, input, MediaTrust::deck);
    else if (input.ends_with(".csv"))
      read_csv(input, limits, out);
    else if (input.ends_with(".jsonl"))
      read_jsonl(input, limits, out);
    else if (input.find_first_of("*?[") != std::string::npos && !std::filesystem::exists(input))
      expand_glob(input, out);
    else
      add(out, input, MediaTrust::deck);
  }
  return out;
}

}  // namespace weft
