#include "data/ingest/image_list.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "data/ingest/inputs.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* image_list_hint =
    "a line is {\"fpath_img\": \"a.jpg\", \"fpath_segm\": \"a.png\", \"width\": 640, \"height\": "
    "480}";

// Calls `take` for each line that is not empty, with its number.
template <class F>
void each_line(const std::string& text, F&& take) {
  std::size_t line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string one = text.substr(at, end - at);
    if (one.ends_with('\r')) one.pop_back();
    at = end + 1;
    ++line;
    if (one.find_first_not_of(" \t") != std::string::npos) take(one, line);
  }
}

std::vector<ImagePair> read_odgt(const IngestDeck& deck, const MediaDeck& limits) {
  const std::string& list = deck.images;
  const fs::path root = deck.root.empty() ? fs::path(list).parent_path() : fs::path(deck.root);
  std::vector<ImagePair> pairs;
  each_line(read_list(list, limits), [&](const std::string& text, std::size_t line) {
    const auto object = try_parse_json(text);
    const auto is_text = [&](const char* key) {
      return object.is_object() && object.contains(key) && object[key].is_string() &&
             !object[key].template get_ref<const std::string&>().empty();
    };
    WEFT_CHECK(is_text("fpath_img") && is_text("fpath_segm"), Exit::data, image_list_hint,
               "list {}, line {}: not a JSON object with texts fpath_img and fpath_segm", list,
               line);
    ImagePair& p = pairs.emplace_back();
    p.name = object["fpath_img"].get<std::string>();
    p.image = (root / p.name).string();
    p.labels = (root / object["fpath_segm"].get<std::string>()).string();
    p.where = fmt::format("{}, line {}", list, line);
    for (const auto& [key, side] :
         {std::pair{"height", &p.size.height}, std::pair{"width", &p.size.width}}) {
      if (!object.contains(key)) continue;
      WEFT_CHECK(object[key].is_number_integer() && object[key].template get<std::int64_t>() > 0,
                 Exit::data, image_list_hint, "list {}, line {}: {} is not a number of pixels",
                 list, line, key);
      *side = object[key].template get<std::int64_t>();
    }
  });
  return pairs;
}

// Files of a folder with one of these extensions, by their names without it, sorted.
template <std::size_t N>
std::map<std::string, std::string> files_of(const std::string& folder,
                                            const std::array<std::string_view, N>& extensions) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::string extension = entry.path().extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (std::find(extensions.begin(), extensions.end(), extension) == extensions.end()) continue;
    const auto [other, added] = files.emplace(entry.path().stem().string(), name);
    WEFT_CHECK(added, Exit::data, "rename one of them, and its labels",
               "folder {} has {} and {}, which have the same labels", folder, other->second, name);
  }
  return files;
}

std::vector<ImagePair> read_folders(const IngestDeck& deck) {
  WEFT_CHECK(!deck.labels.empty() && fs::is_directory(deck.labels), Exit::data,
             "set ingest.labels to the folder of the label maps",
             "ingest.images is the folder {}, and ingest.labels = \"{}\" is none", deck.images,
             deck.labels);
  constexpr std::array<std::string_view, 5> pictures = {".jpg", ".jpeg", ".png", ".bmp", ".webp"};
  constexpr std::array<std::string_view, 1> maps = {".png"};
  const auto labels = files_of(deck.labels, maps);
  std::vector<ImagePair> pairs;
  for (const auto& [stem, file] : files_of(deck.images, pictures)) {
    const auto found = labels.find(stem);
    pairs.push_back(
        {(fs::path(deck.images) / file).string(),
         (fs::path(deck.labels) / (found == labels.end() ? stem + ".png" : found->second)).string(),
         file,
         "",
         {}});
  }
  return pairs;
}

}  // namespace

std::vector<ImagePair> list_images(const IngestDeck& deck, const MediaDeck& limits) {
  std::error_code none;
  const bool folder = fs::is_directory(deck.images, none);
  WEFT_CHECK(folder || deck.labels.empty(), Exit::data,
             "leave ingest.labels out with a list, which names the labels too",
             "ingest.labels = \"{}\", but ingest.images = \"{}\" is no folder", deck.labels,
             deck.images);
  std::vector<ImagePair> pairs = folder ? read_folders(deck) : read_odgt(deck, limits);
  WEFT_CHECK(!pairs.empty(), Exit::data, "give a list (.odgt) or a folder of JPEG or PNG files",
             "{} names no image", deck.images);
  return pairs;
}

std::vector<std::string> read_class_names(const std::string& path, const MediaDeck& limits) {
  std::vector<std::string> names;
  if (path.ends_with(".csv")) {
    check_list_size(path, limits);
    TableReader table(path, "Name");
    for (TableRow row; table.next(row);) {
      WEFT_CHECK(!row.path.empty(), Exit::data, "give every row a name",
                 "{}, line {}, column Name: no value", path, row.line);
      names.push_back(row.path.substr(0, row.path.find(';')));
    }
  } else {
    each_line(read_list(path, limits),
              [&](const std::string& line, std::size_t) { names.push_back(line); });
  }
  WEFT_CHECK(!names.empty() && names.size() <= 255, Exit::data, "give 1 to 255 names",
             "{} has {} names of classes", path, names.size());
  return names;
}

}  // namespace weft
