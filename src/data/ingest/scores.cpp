#include "data/ingest/scores.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <unordered_map>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// The absolute path of a file, without links in its folder's. Files of a folder ask once.
class CanonicalPaths {
 public:
  std::string operator()(const std::string& path) {
    std::error_code none;
    const fs::path absolute = fs::absolute(path, none);
    const auto [folder, added] = folders_.try_emplace(absolute.parent_path().string());
    if (added) folder->second = fs::weakly_canonical(folder->first, none);
    return (folder->second / absolute.filename()).string();
  }

 private:
  std::unordered_map<std::string, fs::path> folders_;
};

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

std::size_t join_scores(const std::string& path, const MediaDeck& limits,
                        std::vector<MediaItem>& items) {
  check_list_size(path, limits);
  TableReader table(path);
  struct Row {
    Facts facts;
    std::int64_t line = 0;
  };
  CanonicalPaths canonical;
  std::unordered_map<std::string, Row> rows;
  bool any = std::ranges::any_of(
      fact_names, [&](const char* name) { return table.column(name) != std::string::npos; });
  for (TableRow row; table.next(row);) {
    if (row.path.empty()) continue;
    const Row found{facts_of(table, row), row.line};
    for (const double value : found.facts.values) any = any || !std::isnan(value);
    const auto [known, added] = rows.emplace(canonical(beside_list(path, row.path)), found);
    WEFT_CHECK(
        added || std::ranges::equal(known->second.facts.values, found.facts.values, same_value),
        Exit::data, "keep one of these rows", "{}, column path: {} has other scores in line {}",
        table.where(row), printable(row.path), known->second.line);
  }
  WEFT_CHECK(any, Exit::data,
             fmt::format("give it one of the columns {}", fmt::join(fact_names, ", ")),
             "{} has no score of an item", path);
  std::size_t joined = 0;
  for (MediaItem& item : items) {
    if (is_source_graph(item.media.path)) continue;
    const auto row = rows.find(canonical(item.media.name()));
    if (row == rows.end()) continue;
    ++joined;
    const Facts& facts = row->second.facts;
    for (std::size_t f = 0; f < facts.values.size(); ++f)
      if (!std::isnan(facts.values[f])) item.facts.values[f] = facts.values[f];
  }
  return joined;
}

}  // namespace weft
