#include "data/ingest/items.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <optional>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "data/ingest/shards.h"
#include "data/text_images/picture_files.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

std::string caption_beside(const fs::path& file) {
  fs::path path = file;
  path.replace_extension(".txt");
  std::error_code none;
  if (path == file || !fs::is_regular_file(path, none)) return "";
  return trimmed_caption(
      read_whole(path, longest_caption, Exit::data, "is it a caption? shorten it, or move it"));
}

void list_folder(const std::string& folder, std::vector<IngestInput>& out) {
  std::error_code error;
  std::vector<std::string> files;
  fs::recursive_directory_iterator entries(folder, error);
  for (; !error && entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    std::error_code none;
    if (!name.starts_with('.') && kind_of_name(name) != MediumKind::other &&
        !entries->is_directory(none))
      files.push_back(entries->path().string());
  }
  WEFT_CHECK(!error, Exit::data, "name a folder that can be read", "cannot list folder {}: {}",
             folder, error.message());
  WEFT_CHECK(!files.empty(), Exit::data, "put videos or pictures into it, or name another folder",
             "folder {} has no videos and no pictures", folder);
  std::ranges::sort(files);
  for (const std::string& file : files) {
    IngestInput& item = out.emplace_back();
    item.media = {file, MediaTrust::untrusted};
    item.text = caption_beside(file);
  }
}

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

MediumKind kind_of_name(const std::string& name) {
  static constexpr std::array<std::string_view, 17> videos = {
      ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts",
      ".flv", ".ogv", ".mxf", ".wmv", ".gif",  ".nut", ".ivf", ".y4m"};
  if (is_picture_name(name)) return MediumKind::picture;
  std::string ending = fs::path(name).extension().string();
  std::ranges::transform(ending, ending.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return std::ranges::find(videos, ending) != videos.end() ? MediumKind::video : MediumKind::other;
}

std::string trimmed_caption(std::string text) {
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

std::vector<IngestInput> list_items(const std::vector<std::string>& inputs,
                                    const MediaDeck& limits) {
  std::vector<IngestInput> out;
  for (IngestInput& input : expand_inputs(inputs, limits)) {
    const std::string& path = input.media.path;
    std::error_code none;
    if (input.media.trust != MediaTrust::deck || is_source_graph(path)) {
      out.push_back(std::move(input));
    } else if (fs::is_directory(path, none)) {
      list_folder(path, out);
    } else if (path.ends_with(".tar")) {
      list_shard(path, out);
    } else {
      input.text = caption_beside(path);
      out.push_back(std::move(input));
    }
  }
  return out;
}

std::size_t join_scores(const std::string& path, const MediaDeck& limits,
                        std::vector<IngestInput>& items) {
  check_list_size(path, limits);
  TableReader table(path);
  const FactColumns columns(table, path);
  const fs::path here = fs::current_path(), folder = here / fs::path(path).parent_path();
  struct Row {
    Facts facts;
    std::int64_t line = 0;
  };
  std::unordered_map<std::string, Row> started, beside;  // by absolute path
  bool any = columns.any();
  for (TableRow row; table.next(row);) {
    if (row.path.empty()) continue;
    Row found;
    found.line = row.line;
    if (table.is_csv())
      found.facts = columns.read(row, table.values(row));
    else
      found.facts =
          FactColumns::read(try_parse_json(row.text), fmt::format("{}, line {}", path, row.line));
    for (const double value : found.facts.values) any = any || !std::isnan(value);
    const auto [known, added] = started.emplace((here / row.path).lexically_normal(), found);
    WEFT_CHECK(
        added || std::ranges::equal(known->second.facts.values, found.facts.values, same_value),
        Exit::data, "keep one of these rows",
        "{}, line {}, column path: {} has other scores in line {}", path, row.line, shown(row.path),
        known->second.line);
    beside.emplace((folder / row.path).lexically_normal(), found);
  }
  std::string names;
  for (const char* name : fact_names) names += (names.empty() ? "" : ", ") + std::string(name);
  WEFT_CHECK(any, Exit::data, fmt::format("give it one of the columns {}", names),
             "{} has no score of an item", path);
  std::size_t joined = 0;
  for (IngestInput& item : items) {
    if (is_source_graph(item.media.path)) continue;
    const std::string key = (here / item.media.name()).lexically_normal();
    const auto one = started.find(key), other = beside.find(key);
    if (one == started.end() && other == beside.end()) continue;
    ++joined;
    const Facts& facts = one != started.end() ? one->second.facts : other->second.facts;
    for (std::size_t f = 0; f < facts.values.size(); ++f)
      if (!std::isnan(facts.values[f])) item.facts.values[f] = facts.values[f];
  }
  return joined;
}

}  // namespace weft
