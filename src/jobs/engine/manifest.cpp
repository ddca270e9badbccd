#include "jobs/engine/manifest.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <span>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr double seconds_between_syncs = 1;

std::string member(const std::string& prefix, const char* of_file) {
  return prefix == "file" ? of_file : prefix + "_" + of_file;
}

// One file that a line names.
struct NamedFile {
  std::string name, xxh3;  // no hash in a manifest of an older weft
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> offset;
};

std::vector<NamedFile> files_of(const Json& line) {
  std::vector<NamedFile> files;
  const auto add = [&](const std::string& prefix, const std::string& xxh3) {
    NamedFile f{line.at(prefix).get<std::string>(),
                xxh3,
                whole_number<std::uint64_t>(line.at(member(prefix, "bytes"))),
                {}};
    if (const auto offset = line.find(member(prefix, "offset")); offset != line.end())
      f.offset = whole_number<std::uint64_t>(*offset);
    files.push_back(std::move(f));
  };
  // A manifest of an older weft.
  if (line.contains("file") && !line.contains("file_xxh3")) add("file", "");
  for (const auto& [name, value] : line.items())
    if (name.ends_with("_xxh3")) add(name.substr(0, name.size() - 5), value.get<std::string>());
  return files;
}

// Items begun and neither finished nor ended, with their keys.
using InHand = std::map<std::string, std::string>;

InHand read_lines(const fs::path& path, ManifestLines& lines) {
  InHand in_hand;
  std::ifstream in(path);
  std::int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    bool whole = seal_holds(line);
    try {
      const auto j = parse_json<Json>(line);
      if (j.contains("begun") || j.contains("ended")) {
        if (whole && j.contains("ended")) {
          const Json& ended = j.at("ended");
          if (ended.is_string())
            in_hand.erase(ended.get<std::string>());
          else
            in_hand.clear();
        }
        if (whole && j.contains("begun"))
          in_hand[j.at("begun").get<std::string>()] = j.at("key").get<std::string>();
        continue;
      }
      const auto name = j.at("name").get<std::string>();
      auto key = j.at("key").get<std::string>();
      whole_number<int>(j.at("rank"));
      files_of(j);
      in_hand.erase(name);
      if (whole)
        lines[name] = {std::move(key), std::move(line), j.value("died", 0), j.contains("fault")};
    } catch (const nlohmann::json::exception&) {
      whole = false;
    }
    if (!whole && !is_cut_off(line, in.eof()))
      log::warn("{}, line {} is damaged: its item is made again", path.string(), number);
  }
  return in_hand;
}

// Counts a death for each item that was in hand when its rank died.
void note_deaths(const InHand& in_hand, ManifestLines& lines) {
  std::string names;
  for (const auto& [name, key] : in_hand) {
    ManifestLine& line = lines[name];
    const int died = line.key == key ? line.died + 1 : 1;
    line = {key,
            seal_json(dump_json(Json{{"name", name}, {"key", key}, {"rank", 0}, {"died", died}})),
            died};
    names += (names.empty() ? "" : ", ") + printable(name);
  }
  if (!names.empty()) log::warn("in progress when a rank died: {}", printable(names, 500));
}

fs::path whole_path(const fs::path& directory, const std::string& stem) {
  return directory / (stem + ".jsonl");
}
fs::path part_path(const fs::path& directory, const std::string& stem, int rank) {
  return directory / fmt::format("{}.rank{}.jsonl", stem, rank);
}

// The parts that ranks have left, and nothing else: results may have names that begin likewise.
std::vector<fs::path> parts_in(const fs::path& directory, const std::string& stem,
                               std::error_code& failed) {
  const std::string begin = stem + ".rank", end = ".jsonl";
  std::vector<fs::path> parts;
  for (fs::directory_iterator it(directory, failed), last; !failed && it != last;
       it.increment(failed)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(begin) || !name.ends_with(end) ||
        name.size() <= begin.size() + end.size())
      continue;
    if (name.find_first_not_of("0123456789", begin.size()) == name.size() - end.size())
      parts.push_back(it->path());
  }
  return parts;
}

[[noreturn]] void fail(const fs::path& path, const std::string& reason) {
  throw Error(Exit::data, fmt::format("cannot write {}: {}", path.string(), reason),
              "is the disk full, or the directory not writable? what is finished is kept", __FILE__,
              __LINE__)
      .for_job();
}

FileHash hash_of_piece(const fs::path& path, std::uint64_t offset, std::uint64_t bytes) {
  const File file = File::open(path, Exit::data);
  if (offset > file.size() || bytes > file.size() - offset) return {};
  std::vector<std::byte> piece(bytes);
  file.read(piece, offset);
  return {bytes, hash128(piece)};
}

bool is_whole(const fs::path& directory, const NamedFile& file) {
  const fs::path path = directory / file.name;
  std::error_code gone;
  if (!fs::exists(path, gone)) return false;
  std::string fault;
  try {
    const FileHash found =
        file.offset ? hash_of_piece(path, *file.offset, file.bytes) : hash_of_file(path);
    if (found.bytes != file.bytes)
      fault = fmt::format("it has {} bytes, not {}", found.bytes, file.bytes);
    else if (!file.xxh3.empty() && to_hex(found.hash) != file.xxh3)
      fault = fmt::format("its XXH3-128 is {}, not {}", to_hex(found.hash), file.xxh3);
  } catch (const Error& e) {
    fault = e.what();
  }
  if (!fault.empty())
    log::warn("{} is damaged or was changed: {}; it is made again", path.string(), fault);
  return fault.empty();
}

}  // namespace

Json ManifestLine::parsed() const { return parse_json<Json>(text); }

ManifestLines Manifest::gather(const fs::path& directory, const std::string& stem) {
  make_folders(directory, Exit::data, "choose another output folder, or check its permissions");
  std::error_code failed;
  ManifestLines lines = gathered(directory, stem);
  const std::vector<fs::path> parts = parts_in(directory, stem, failed);
  WEFT_CHECK(!failed, Exit::data, "check its permissions", "cannot list {}: {}", directory.string(),
             failed.message());
  // After the gathered lines: a part's line of the same name is newer.
  InHand in_hand;
  std::vector<fs::path> of_dead;
  for (const fs::path& part : parts) {
    InHand of_rank = read_lines(part, lines);
    if (!of_rank.empty()) of_dead.push_back(part);
    in_hand.merge(of_rank);
  }
  note_deaths(in_hand, lines);
  if (parts.empty()) return lines;
  WholeFile whole(whole_path(directory, stem), Exit::data);
  whole.add("");  // there may be no line
  for (const auto& [name, line] : lines) whole.add(line.text + "\n");
  whole.close();  // on a full disk the parts below still tell of the deaths
  // A kill before the parts are gone must not count these deaths twice.
  for (const fs::path& part : of_dead)
    std::ofstream(part, std::ios::app) << "\n"
                                       << seal_json(dump_json(Json{{"ended", true}})) << "\n";
  // The parts go only after the rename: a kill in between leaves all lines readable.
  whole.commit();
  for (const fs::path& part : parts) fs::remove(part, failed);
  return lines;
}

ManifestLines Manifest::gathered(const fs::path& directory, const std::string& stem) {
  ManifestLines lines;
  read_lines(whole_path(directory, stem), lines);
  return lines;
}

ManifestLines Manifest::all(const fs::path& directory, const std::string& stem) {
  ManifestLines lines = gathered(directory, stem);
  std::error_code failed;
  for (const fs::path& part : parts_in(directory, stem, failed)) read_lines(part, lines);
  return lines;
}

Manifest::Manifest(const fs::path& directory, const std::string& stem, int rank)
    : path_(part_path(directory, stem, rank)) {}

Manifest::~Manifest() {
  try {
    close();
  } catch (const Error& e) {
    log::warn("{}", e.what());
  }
}

void Manifest::begin(const std::string& name, const std::string& key) {
  add({{"begun", name}, {"key", key}});
}

void Manifest::end(const std::string& name) { add({{"ended", name}}); }

void Manifest::end_all() {
  add({{"ended", true}});
  const std::lock_guard lock(mutex_);
  sync();
}

void Manifest::close() {
  end_all();
  const std::lock_guard lock(mutex_);
  if (file_ != nullptr) std::fclose(file_);
  file_ = nullptr;
}

void Manifest::add(const Json& line) {
  const std::string text = seal_json(dump_json(line)) + "\n";
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr && line.contains("ended")) return;  // nothing was begun
  if (file_ == nullptr) {
    const int fd =
        ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) fail(path_, std::strerror(errno));
    file_ = fdopen(fd, "a");
  }
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    fail(path_, std::strerror(errno));
  // Ranks of other nodes ask why an item failed.
  if (line.contains("fault") || now_seconds() - synced_at_ >= seconds_between_syncs) sync();
}

void Manifest::sync() {
  if (file_ == nullptr) return;
  if (fsync(fileno(file_)) != 0) fail(path_, std::strerror(errno));
  synced_at_ = now_seconds();
}

bool has_result(const ManifestLine& line, const fs::path& directory) {
  if (!is_result(line, line.key)) return false;
  return std::ranges::all_of(files_of(line.parsed()), [&](const NamedFile& file) {
    std::error_code none;
    return !file.name.starts_with('.') && fs::exists(directory / file.name, none);
  });
}

bool is_finished(const ManifestLines& lines, const std::string& name, const std::string& key,
                 const fs::path& directory) {
  const auto found = lines.find(name);
  if (found == lines.end() || !is_result(found->second, key)) return false;
  for (const NamedFile& file : files_of(found->second.parsed()))
    if (!is_whole(directory, file)) return false;
  return true;
}

void add_file(Json& line, const fs::path& directory, const std::string& file,
              const std::string& prefix) {
  const FileHash hash = hash_of_file(directory / file);
  line[prefix] = file;
  line[member(prefix, "bytes")] = hash.bytes;
  line[prefix + "_xxh3"] = to_hex(hash.hash);
}

// ---- Files of results ----

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
  const std::array<std::string, 12> own = {".lock",        ".ranks",        ".work",
                                           "stop",         "stopped",       "status.json",
                                           "summary.json", "cite.bib",      "report.html",
                                           "legend.svg",   stem + ".jsonl", stem + "_report.json"};
  const auto is = [&](const std::string& name) {
    return folder == name || folder == name + ".tmp";
  };
  return folder.starts_with(stem + ".rank") || std::ranges::any_of(own, is);
}

fs::path result_path(const fs::path& directory, const fs::path& file) {
  std::error_code none;
  WEFT_CHECK(!file.has_parent_path() || fs::is_directory(directory, none), Exit::data,
             "do not remove it while a job runs", "cannot make a folder in {}, which is gone",
             directory.string());
  fs::path folder = directory;
  for (const fs::path& part : file.parent_path()) {
    folder /= part;
    make_own_folder(folder, Exit::data);
  }
  return directory / file;
}

// ---- Names of items and results ----

std::string item_name(const std::string& path) {
  constexpr std::size_t longest_path = 4096;
  const std::string name = path.empty() ? "(no path)" : printable(path, longest_path);
  return name == path ? name : name + " #" + to_hex(hash128(path));
}

std::string as_utf8(const std::string& name) {
  const nlohmann::json j = name;
  return parse_json(dump_json(j, -1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::string plain_text(const std::string& name, std::string_view others) {
  std::string text = as_utf8(name);
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || others.find(c) != others.npos) c = '_';
  return text;
}

std::string cut_text(std::string text, std::size_t most) {
  std::size_t end = std::min(text.size(), most);
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  return text;
}

std::string plain_stem(const std::string& path) {
  std::string stem = fs::path(path).stem().string().substr(0, 100);
  for (char& c : stem) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '-' || c == '_' || c == '.';
    if (!plain) c = '_';
  }
  return stem;
}

}  // namespace weft
