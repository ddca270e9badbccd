#include "models/segmentation/class_names.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "models/segmentation/options.h"
#include "text/utf8.h"

namespace weft {
namespace {

std::vector<std::string> split(const std::string& line, char at) {
  std::vector<std::string> cells;
  std::istringstream in(line);
  for (std::string cell; std::getline(in, cell, at);) cells.push_back(cell);
  return cells;
}

}  // namespace

std::vector<std::string> read_class_names(const std::filesystem::path& file,
                                          const MediaDeck& limits) {
  const auto most = static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20));
  std::string text = read_whole(file, most, Exit::usage, "is this a list of class names?");
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  check_utf8(text, file.string());
  std::vector<std::string> names;
  std::size_t column = 0;
  bool table = false;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) line.pop_back();
    const std::vector<std::string> cells = split(line, ',');
    if (names.empty() && !table) {
      const auto name = std::ranges::find(cells, "Name");
      if (table = cells.size() > 1 && name != cells.end(); table) {
        column = static_cast<std::size_t>(name - cells.begin());
        continue;
      }
    }
    if (table) {
      const std::vector<std::string> words =
          column < cells.size() ? split(cells[column], ';') : std::vector<std::string>();
      line = words.empty() ? "" : words.front();
    }
    names.push_back(strip(line));
  }
  while (!names.empty() && names.back().empty()) names.pop_back();
  return names;
}

std::vector<std::string> class_names(const Deck& deck, const std::vector<std::string>& of_data) {
  const SegmentationDeck& model = deck.get<SegmentationDeck>();
  std::vector<std::string> names = of_data;
  if (!model.class_names.empty()) {
    names = read_class_names(model.class_names, deck.media);
    WEFT_CHECK(std::ssize(names) == model.num_classes, Exit::usage,
               "name a file with a line for each class",
               "model.class_names = \"{}\" has {} names, and model.num_classes = {}",
               model.class_names, names.size(), model.num_classes);
  }
  for (std::int64_t c = std::ssize(names); c < model.num_classes; ++c)
    names.push_back(fmt::format("class {}", c));
  for (std::size_t c = 0; c < names.size(); ++c)
    if (names[c].empty()) names[c] = fmt::format("class {}", c);
  return names;
}

}  // namespace weft
