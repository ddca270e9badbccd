#include "jobs/engine/output.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "core/log.h"

namespace weft {

namespace fs = std::filesystem;

std::shared_ptr<FolderLock> lock_output(const fs::path& folder, const std::string& key) {
  if (log::rank() != 0) return nullptr;
  return std::make_shared<FolderLock>(folder / ".lock", "output folder " + folder.string(), key,
                                      Exit::data);
}

void remove_remains(const fs::path& folder, const std::set<std::string>& names) {
  constexpr std::string_view end = ".partial", marked = "_watermark";
  std::vector<fs::path> remains;
  std::error_code failed;
  for (fs::directory_iterator it(folder, failed), last; !failed && it != last;
       it.increment(failed)) {
    const std::string hidden = it->path().filename().string();
    if (!hidden.starts_with('.') || !hidden.ends_with(end)) continue;
    const std::string file = hidden.substr(1, hidden.size() - 1 - end.size());
    std::string stem = fs::path(file).stem().string();
    if (stem.ends_with(marked)) stem.resize(stem.size() - marked.size());
    if (names.contains(file) || names.contains(stem)) remains.push_back(it->path());
  }
  for (const fs::path& file : remains) fs::remove(file, failed);
}

bool is_own_name(const std::string& folder, const std::string& stem) {
  const std::array<std::string, 9> own = {".lock",       ".ranks",        ".work",
                                          "stop",        "stopped",       "status.json",
                                          "report.html", stem + ".jsonl", stem + "_report.json"};
  const auto is = [&](const std::string& name) {
    return folder == name || folder == name + ".tmp";
  };
  return folder.starts_with(stem + ".rank") || std::ranges::any_of(own, is);
}

void make_folders(const fs::path& directory, const fs::path& file) {
  fs::path folder = directory;
  for (const fs::path& part : file.parent_path()) {
    folder /= part;
    std::error_code failed, none;
    fs::create_directory(folder, failed);
    const fs::file_type type = fs::symlink_status(folder, none).type();
    WEFT_CHECK(type == fs::file_type::directory, Exit::data,
               "remove it, or choose another output folder", "cannot make the folder {}: {}",
               folder.string(),
               type == fs::file_type::symlink     ? "a link stands in its place"
               : type == fs::file_type::not_found ? failed.message()
                                                  : "a file stands in its place");
  }
}

void write_whole(const fs::path& directory, const std::string& file,
                 const std::function<void(const std::string&)>& write) {
  const fs::path path = directory / file;
  const fs::path hidden = path.parent_path() / ("." + path.filename().string() + ".partial");
  make_folders(directory, file);
  std::error_code none;
  fs::remove(hidden, none);  // what a killed job left, or a link that was laid there
  try {
    write(hidden.string());
  } catch (...) {
    fs::remove(hidden, none);  // a full disk needs the space
    throw;
  }
  rename_file(hidden, path, Exit::data);
}

}  // namespace weft
