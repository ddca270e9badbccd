#include "data/ingest/image_list.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>

#include "core/error.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/lists.h"
#include "data/lists/text_file.h"
#include "data/text_images/picture_files.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* image_list_hint =
    "a line is {\"fpath_img\": \"a.jpg\", \"fpath_segm\": \"a.png\", \"width\": 640, \"height\": "
    "480}";

std::vector<ImagePair> read_image_list(const IngestDeck& deck, const MediaDeck& limits) {
  const std::string& list = deck.images;
  const fs::path root = deck.root.empty() ? fs::path(list).parent_path() : fs::path(deck.root);
  check_list_size(list, limits);
  TableReader table(list, "fpath_img", TableForm::json_lines);
  std::vector<ImagePair> pairs;
  for (TableRow row; table.next(row);) {
    const auto labels = table.value(row, "fpath_segm");
    WEFT_CHECK(!row.path.empty() && labels.is_string() &&
                   labels.get_ref<const std::string&>().find('\0') == std::string::npos,
               Exit::data, image_list_hint, "{}: no texts fpath_img and fpath_segm",
               table.where(row));
    // 0 where the list does not say.
    const auto side = [facts = facts_of(table, row)](Fact fact) {
      return facts[fact] > 0 ? static_cast<std::int64_t>(std::min(facts[fact], 1e9)) : 0;
    };
    pairs.push_back({(root / row.path).string(),
                     (root / labels.get<std::string>()).string(),
                     row.path,
                     table.where(row),
                     {side(Fact::height), side(Fact::width)}});
  }
  return pairs;
}

// Files of a folder by their paths from there without an ending, sorted.
std::map<std::string, std::string> files_of(const std::string& folder, const std::string& other,
                                            const std::function<bool(const std::string&)>& wanted) {
  const FolderFiles found = files_below(folder, wanted, other);
  tell_left_out(folder, found.left_out, found.only_hidden);
  std::map<std::string, std::string> files;
  for (const std::string& path : found.files) {
    const fs::path below = fs::path(path).lexically_relative(folder);
    const auto [known, added] =
        files.emplace(fs::path(below).replace_extension().string(), below.string());
    WEFT_CHECK(added, Exit::data, "rename one of them, and its labels",
               "folder {} has {} and {}, which have the same labels", folder, known->second,
               below.string());
  }
  return files;
}

std::vector<ImagePair> read_folders(const IngestDeck& deck) {
  std::error_code none;
  WEFT_CHECK(!deck.labels.empty() && fs::is_directory(deck.labels, none), Exit::data,
             "set ingest.labels to the folder of the label maps",
             "ingest.images is the folder {}, and ingest.labels = \"{}\" is none", deck.images,
             deck.labels);
  auto labels = files_of(deck.labels, deck.images,
                         [](const std::string& name) { return ending_of(name) == ".png"; });
  std::vector<ImagePair> pairs;
  for (const auto& [stem, file] : files_of(deck.images, deck.labels, is_picture_name)) {
    const auto found = labels.extract(stem);
    pairs.push_back(
        {(fs::path(deck.images) / file).string(),
         (fs::path(deck.labels) / (found.empty() ? stem + ".png" : found.mapped())).string(),
         file,
         "",
         {}});
  }
  if (!labels.empty())
    tell_left_out(deck.labels, counted(std::ssize(labels), "label map") + " without a picture");
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
  std::vector<ImagePair> pairs = folder ? read_folders(deck) : read_image_list(deck, limits);
  WEFT_CHECK(!pairs.empty(), Exit::data, "give a list (.odgt) or a folder of JPEG or PNG files",
             "{} names no image", deck.images);
  return pairs;
}

std::vector<std::string> read_class_names(const std::string& path, const MediaDeck& limits) {
  std::vector<std::string> names;
  check_list_size(path, limits);
  if (form_of_name(path) == TableForm::csv) {
    TableReader table(path, "Name");
    for (TableRow row; table.next(row);) {
      WEFT_CHECK(!row.path.empty(), Exit::data, "give every row a name",
                 "{}, column Name: no value", table.where(row));
      names.push_back(row.path.substr(0, row.path.find(';')));
    }
  } else {
    std::istringstream lines(read_text_file(path, longest_text, ""));
    for (std::string line; std::getline(lines, line);)
      if (const std::string_view name = trimmed(line); !name.empty()) names.emplace_back(name);
  }
  WEFT_CHECK(!names.empty() && names.size() <= 255, Exit::data, "give 1 to 255 names",
             "{} has {} names of classes", path, names.size());
  return names;
}

}  // namespace weft
