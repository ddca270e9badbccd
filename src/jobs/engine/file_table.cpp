#include "jobs/engine/file_table.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "media/media_source.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t longest_path = 4096;

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

}  // namespace

bool names_a_table(const std::string& input) {
  return form_of_name(input) != TableForm::none && !is_glob(input);
}

std::string table_of_files(const std::vector<MediaItem>& items, TableForm form) {
  const bool csv = form == TableForm::csv;
  const bool texts = std::ranges::any_of(items, [](const MediaItem& i) { return !i.text.empty(); });
  std::string table = !csv ? "" : texts ? "path,text\n" : "path\n";
  for (const MediaItem& item : items) {
    const std::string path = item.media.name();
    WEFT_CHECK(find_non_utf8(path) == path.npos, Exit::data, "rename it",
               "the name of {} is not UTF-8, as tables are", path);
    if (csv) {
      table += csv_cell(path) + (texts ? "," + csv_cell(item.text) : "");
    } else {
      nlohmann::ordered_json row{{"path", path}};
      if (texts) row["text"] = item.text;
      table += dump_json(row);
    }
    table += '\n';
  }
  return table;
}

bool paths_have_moved(const std::string& input, const std::string& output) {
  const bool table = form_of_name(input) != TableForm::none;
  std::error_code none;
  return !fs::equivalent(table ? folder_of(input) : ".", folder_of(output), none);
}

std::string moved_path(const std::string& path) {
  return path.empty() || is_source_graph(path) ? path
                                               : fs::absolute(path).lexically_normal().string();
}

std::string item_name(const std::string& path) {
  const std::string name = path.empty() ? "(no path)" : printable(path, longest_path);
  return name == path ? name : name + " #" + to_hex(hash128(path));
}

}  // namespace weft
