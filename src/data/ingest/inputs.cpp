#include "data/ingest/inputs.h"

#include <glob.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"

namespace weft {
namespace {

std::string dumped(const nlohmann::json& value) {
  return shown(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

constexpr const char* number_hint = "give a number from 0 on, or leave the value empty";

void add_input(std::vector<IngestInput>& out, std::string path, MediaTrust trust) {
  IngestInput& input = out.emplace_back();
  input.media.path = std::move(path);
  input.media.trust = trust;
}

// What pandas writes, or reads, for a value that is missing.
bool is_missing(std::string_view value) {
  constexpr std::array<std::string_view, 7> missing = {"",     "nan",  "NaN", "NA",
                                                       "None", "null", "N/A"};
  return std::ranges::find(missing, value) != missing.end();
}

bool is_fact(double value) { return std::isfinite(value) && value >= 0; }

void read_csv_list(const std::string& path, std::vector<IngestInput>& out) {
  TableReader table(path);
  const FactColumns facts(table, path);
  const auto text = std::ranges::find(table.columns(), "text") - table.columns().begin();
  for (TableRow row; table.next(row);) {
    WEFT_CHECK(row.fields.size() == table.columns().size(), Exit::data,
               "put a value that has commas in quotes, and give every row all columns",
               "{}, line {} has {} values, and there are {} columns", path, row.line,
               row.fields.size(), table.columns().size());
    WEFT_CHECK(!row.path.empty(), Exit::data, "name a file, or remove the row",
               "{}, line {}, column path: no value", path, row.line);
    std::vector<std::string> values = table.values(row);
    add_input(out, beside_list(path, row.path), MediaTrust::untrusted);
    out.back().facts = facts.read(row, values);
    if (text < std::ssize(values))
      out.back().text = std::move(values[static_cast<std::size_t>(text)]);
  }
}

void read_jsonl_list(const std::string& path, std::vector<IngestInput>& out) {
  TableReader table(path);
  for (TableRow row; table.next(row);) {
    const auto object = try_parse_json(row.text);
    const auto caption = object.find("text");
    const bool has = caption != object.end() && !caption->is_null();
    const std::string where = fmt::format("{}, line {}", path, row.line);
    WEFT_CHECK(!has || caption->is_string(), Exit::data, "put the caption in quotes",
               "{}, column text: {} is not a string", where, dumped(*caption));
    WEFT_CHECK(!row.path.empty(), Exit::data, "name a file, or remove the row",
               "{}, column path: no value", where);
    add_input(out, beside_list(path, row.path), MediaTrust::untrusted);
    out.back().facts = FactColumns::read(object, where);
    if (has) out.back().text = caption->get<std::string>();
  }
}

void expand_glob(const std::string& pattern, std::vector<IngestInput>& out) {
  glob_t found{};
  const int status = glob(pattern.c_str(), 0, nullptr, &found);  // sorted
  for (std::size_t i = 0; status == 0 && i < found.gl_pathc; ++i)
    add_input(out, found.gl_pathv[i], MediaTrust::deck);
  globfree(&found);
  WEFT_CHECK(status == 0, Exit::data, "check ingest.inputs, and the directory weft was started in",
             "no file matches {}", pattern);
}

}  // namespace

std::string shown(std::string text, std::size_t longest) {
  if (text.size() > longest) text = text.substr(0, longest) + "...";
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

std::string beside_list(const std::string& list, const std::string& path) {
  if (is_source_graph(path) || path.starts_with("/")) return path;
  return (std::filesystem::path(list).parent_path() / path).string();
}

void check_list_size(const std::string& path, const MediaDeck& limits) {
  const auto size = static_cast<double>(File::open(path, Exit::data).size());
  WEFT_CHECK(size <= limits.max_list_mib * (1 << 20), Exit::data,
             "split the list, or raise media.max_list_mib",
             "{} has {:.1f} MiB, media.max_list_mib = {}", path, size / (1 << 20),
             limits.max_list_mib);
}

std::string read_list(const std::string& path, const MediaDeck& limits) {
  return read_whole(path, static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20)), Exit::data,
                    "split the list, or raise media.max_list_mib");
}

FactColumns::FactColumns(const TableReader& table, std::string path) : path_(std::move(path)) {
  for (std::size_t f = 0; f < fact_names.size(); ++f) {
    const auto found = std::ranges::find(table.columns(), fact_names[f]);
    if (found != table.columns().end())
      columns_.emplace_back(static_cast<Fact>(f),
                            static_cast<std::size_t>(found - table.columns().begin()));
  }
}

Facts FactColumns::read(const TableRow& row, const std::vector<std::string>& values) const {
  Facts facts;
  for (const auto& [fact, column] : columns_) {
    std::string_view text = values[column];
    while (text.starts_with(' ')) text.remove_prefix(1);
    while (text.ends_with(' ')) text.remove_suffix(1);
    if (is_missing(text)) continue;
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    WEFT_CHECK(error == std::errc() && end == text.data() + text.size() && is_fact(value),
               Exit::data, number_hint, "{}, line {}, column {}: \"{}\" is no number from 0 on",
               path_, row.line, fact_names[static_cast<std::size_t>(fact)], shown(values[column]));
    facts[fact] = value;
  }
  return facts;
}

Facts FactColumns::read(const nlohmann::json& object, const std::string& where) {
  Facts facts;
  for (std::size_t f = 0; f < fact_names.size(); ++f) {
    const auto found = object.find(fact_names[f]);
    if (found == object.end() || found->is_null()) continue;
    WEFT_CHECK(found->is_number() && is_fact(found->get<double>()), Exit::data, number_hint,
               "{}, column {}: {} is no number from 0 on", where, fact_names[f], dumped(*found));
    facts.values[f] = found->get<double>();
  }
  return facts;
}

std::vector<IngestInput> expand_inputs(const std::vector<std::string>& inputs,
                                       const MediaDeck& limits) {
  std::vector<IngestInput> out;
  for (const std::string& input : inputs) {
    const bool csv = input.ends_with(".csv"), jsonl = input.ends_with(".jsonl");
    if (!is_source_graph(input) && (csv || jsonl)) check_list_size(input, limits);
    if (is_source_graph(input))
      add_input(out, input, MediaTrust::deck);
    else if (csv)
      read_csv_list(input, out);
    else if (jsonl)
      read_jsonl_list(input, out);
    else if (input.find_first_of("*?[") != std::string::npos && !std::filesystem::exists(input))
      expand_glob(input, out);
    else
      add_input(out, input, MediaTrust::deck);
  }
  return out;
}

}  // namespace weft
