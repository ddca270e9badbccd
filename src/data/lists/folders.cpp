#include "data/lists/folders.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct Walk {
  const std::function<bool(const std::string&)>& wanted;
  const fs::path& results;
  std::vector<std::string> files = {}, others = {}, unreadable = {};
  std::int64_t linked = 0, hidden = 0;

  // Why the folder cannot be listed.
  std::error_code enter(const fs::path& folder) {
    std::error_code failed;
    fs::directory_iterator entry(folder, failed);
    for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) take(*entry);
    return failed;
  }

  // Whether it is the job's output, or lies beside it with more behind its name (OUTPUT.parts).
  bool is_result(const fs::path& path) const {
    std::error_code none;
    const auto folder = [](const fs::path& p) {
      return p.has_parent_path() ? p.parent_path() : fs::path(".");
    };
    return results.has_filename() &&
           path.filename().string().starts_with(results.filename().string()) &&
           fs::equivalent(folder(path), folder(results), none);
  }

  void take(const fs::directory_entry& entry) {
    std::error_code none;
    const fs::path& path = entry.path();
    const std::string name = path.filename().string();
    if (name.starts_with('.')) {
      ++hidden;
    } else if (!entry.is_directory(none)) {
      if (wanted(name))
        files.push_back(path.string());
      else if (!is_result(path))
        others.push_back(path.string());
    } else if (entry.is_symlink(none)) {
      ++linked;
    } else if (!fs::equivalent(path, results, none) &&
               !fs::equivalent(path, results.string() + ".parts", none)) {
      if (const std::error_code failed = enter(path); failed)
        unreadable.push_back(fmt::format("{}: {}", path.string(), failed.message()));
    }
  }
};

std::string without_ending(const std::string& path) {
  return fs::path(path).replace_extension().string();
}

}  // namespace

std::string ending_of(const std::string& path) {
  std::string ending = fs::path(path).extension().string();
  for (char& c : ending)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return ending;
}

MediumKind kind_of_name(const std::string& name) {
  static constexpr std::array<std::string_view, 38> videos = {
      ".mp4", ".m4v", ".mov",  ".qt",   ".3gp", ".3g2",  ".f4v",  ".mkv",  ".webm", ".avi",
      ".mpg", ".mpe", ".mpeg", ".m1v",  ".m2v", ".vob",  ".ts",   ".mts",  ".m2t",  ".m2ts",
      ".flv", ".ogv", ".ogm",  ".mxf",  ".wmv", ".asf",  ".gif",  ".apng", ".nut",  ".ivf",
      ".obu", ".y4m", ".dv",   ".h264", ".264", ".hevc", ".h265", ".mjpeg"};
  if (is_picture_name(name)) return MediumKind::picture;
  return std::ranges::find(videos, ending_of(name)) != videos.end() ? MediumKind::video
                                                                    : MediumKind::other;
}

FolderFiles files_below(const std::string& folder,
                        const std::function<bool(const std::string& name)>& wanted,
                        const fs::path& results) {
  Walk walk{wanted, results};
  const std::error_code failed = walk.enter(folder);
  WEFT_CHECK(!failed, Exit::data, "name a folder that can be read", "cannot list folder {}: {}",
             folder, failed.message());
  FolderFiles found;
  found.files = std::move(walk.files);
  std::ranges::sort(found.files);
  const auto add = [&](const std::string& text) {
    found.left_out += (found.left_out.empty() || text.empty() ? "" : ", ") + text;
  };
  add(count_by_ending(walk.others, found.files));
  if (walk.linked > 0) add(counted(walk.linked, "linked folder"));
  if (!walk.unreadable.empty())
    add(fmt::format("{} that cannot be read ({}{})", counted(std::ssize(walk.unreadable), "folder"),
                    *std::ranges::min_element(walk.unreadable),
                    walk.unreadable.size() > 1 ? ", ..." : ""));
  found.only_hidden = found.left_out.empty();
  if (walk.hidden > 0) add(fmt::format("{} hidden", walk.hidden));
  return found;
}

std::string count_by_ending(const std::vector<std::string>& others,
                            const std::vector<std::string>& taken) {
  std::set<std::string> stems;
  for (const std::string& file : taken) stems.insert(without_ending(file));
  std::map<std::string, std::int64_t> count;
  std::int64_t all = 0;
  for (const std::string& file : others) {
    const std::string ending = ending_of(file);
    if (file.ends_with("_caption.txt") && stems.contains(file.substr(0, file.size() - 12)))
      continue;
    if ((ending == ".txt" || ending == ".json") && stems.contains(without_ending(file))) continue;
    ++count[ending];
    ++all;
  }
  if (all == 0) return "";
  std::vector<std::pair<std::string, std::int64_t>> sorted(count.begin(), count.end());
  std::ranges::stable_sort(sorted, std::ranges::greater(), [](const auto& e) { return e.second; });
  if (constexpr std::size_t most = 10; sorted.size() > most) sorted.resize(most);
  std::string text;
  std::int64_t named = 0;
  for (const auto& [ending, n] : sorted) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ",
                        ending.empty() ? "without an ending" : ending, n);
    named += n;
  }
  if (named < all) text += fmt::format(", others {}", all - named);
  return fmt::format("{} ({})", counted(all, "file"), text);
}

void tell_left_out(const std::string& where, const std::string& left_out, bool only_hidden) {
  if (log::rank() != 0 || left_out.empty()) return;
  const std::string line = fmt::format("left out of {}: {}", where, left_out);
  if (only_hidden)
    log::write_info(line);
  else
    log::write_warn(line);
}

bool is_picture_name(const std::string& path) {
  static constexpr std::array<std::string_view, 20> extensions = {
      ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif",  ".tiff", ".webp",
      ".ppm", ".pgm",  ".pbm", ".pnm",  ".jp2", ".jxl", ".qoi", ".avif", ".heic", ".heif"};
  return std::ranges::find(extensions, ending_of(path)) != extensions.end();
}

bool has_pictures(const std::string& path) {
  std::error_code error;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    if (is_picture_name(entries->path().string())) return true;
  return false;
}

std::vector<std::string> list_pictures(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> paths;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    if (is_picture_name(entries->path().string())) paths.push_back(entries->path().string());
  WEFT_CHECK(!error, Exit::data, "name a folder that can be read", "cannot list folder {}: {}",
             folder, error.message());
  WEFT_CHECK(!paths.empty(), Exit::data, "put .jpg, .png, .bmp, .tif or .webp files into it",
             "folder {} has no pictures", folder);
  std::ranges::sort(paths);
  return paths;
}

}  // namespace weft
