#include "jobs/manifest.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "core/seal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* whole_name = "generated.jsonl";
constexpr const char* part_prefix = "generated.rank";

std::string to_line(const FinishedClip& c) {
  nlohmann::ordered_json j = {{"name", c.name},     {"file", c.file},       {"prompt", c.prompt},
                              {"seed", c.seed},     {"frames", c.frames},   {"height", c.height},
                              {"width", c.width},   {"seconds", c.seconds}, {"bytes", c.bytes},
                              {"pixels", c.pixels}, {"rank", c.rank},       {"key", c.key}};
  j["file_xxh3"] = c.xxh3;
  if (!c.marked.empty()) {
    j["marked"] = c.marked;
    j["marked_bytes"] = c.marked_bytes;
    j["marked_xxh3"] = c.marked_xxh3;
  }
  return seal_json(j.dump()) + "\n";
}

void read_lines(const fs::path& path, std::map<std::string, FinishedClip>& clips) {
  std::ifstream in(path);
  std::int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    bool whole = seal_holds(line);
    try {
      const auto j = parse_json(line);
      FinishedClip c;
      j.at("name").get_to(c.name);
      j.at("file").get_to(c.file);
      j.at("prompt").get_to(c.prompt);
      c.seed = whole_number<std::int64_t>(j.at("seed"));
      c.frames = whole_number<std::int64_t>(j.at("frames"));
      c.height = whole_number<std::int64_t>(j.at("height"));
      c.width = whole_number<std::int64_t>(j.at("width"));
      j.at("seconds").get_to(c.seconds);
      c.bytes = whole_number<std::uint64_t>(j.at("bytes"));
      j.at("pixels").get_to(c.pixels);
      c.rank = whole_number<int>(j.at("rank"));
      j.at("key").get_to(c.key);
      c.xxh3 = j.value("file_xxh3", "");
      c.marked = j.value("marked", "");
      c.marked_bytes = j.value("marked_bytes", std::uint64_t{0});
      c.marked_xxh3 = j.value("marked_xxh3", "");
      if (whole) clips[c.name] = c;
    } catch (const nlohmann::json::exception&) {
      whole = false;
    }
    if (!whole && !is_cut_off(line, in.eof()))
      log::warn("{}, line {} is damaged: its clip is made again", path.string(), number);
  }
}

fs::path part_of(const fs::path& directory, int rank) {
  return directory / fmt::format("{}{}.jsonl", part_prefix, rank);
}

[[noreturn]] void fail(const fs::path& path, const std::string& reason) {
  throw Error(Exit::data, fmt::format("cannot write {}: {}", path.string(), reason),
              "is the disk full, or the directory not writable? see generate.output", __FILE__,
              __LINE__);
}

bool is_whole(const fs::path& file, std::uint64_t bytes, const std::string& xxh3) {
  std::error_code gone;
  if (!fs::exists(file, gone)) return false;
  std::string fault;
  try {
    const FileHash found = hash_of_file(file);
    if (found.bytes != bytes)
      fault = fmt::format("it has {} bytes, not {}", found.bytes, bytes);
    else if (!xxh3.empty() && to_hex(found.hash) != xxh3)
      fault = fmt::format("its XXH3-128 is {}, not {}", to_hex(found.hash), xxh3);
  } catch (const Error& e) {
    fault = e.what();
  }
  if (!fault.empty())
    log::warn("{} is damaged or was changed: {}; it is made again", file.string(), fault);
  return fault.empty();
}

}  // namespace

std::map<std::string, FinishedClip> ClipManifest::gather(const fs::path& directory) {
  std::map<std::string, FinishedClip> clips;
  std::error_code failed;
  fs::create_directories(directory, failed);
  if (failed) fail(directory, failed.message());
  const fs::path whole = directory / whole_name;
  read_lines(whole, clips);
  std::vector<fs::path> parts;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(part_prefix)) parts.push_back(entry.path());
    if (name.starts_with('.') && name.find(".partial") != std::string::npos)
      fs::remove(entry.path(), failed);
  }
  for (const fs::path& part : parts) read_lines(part, clips);
  if (parts.empty()) return clips;
  const fs::path made = directory / (std::string(whole_name) + ".tmp");
  std::ofstream out(made, std::ios::trunc);
  for (const auto& [name, clip] : clips) out << to_line(clip);
  out.close();
  if (!out) fail(made, std::strerror(errno));
  rename_file(made, whole, Exit::data);
  for (const fs::path& part : parts) fs::remove(part, failed);
  return clips;
}

std::map<std::string, FinishedClip> ClipManifest::of_rank(const fs::path& directory, int rank) {
  std::map<std::string, FinishedClip> clips;
  read_lines(part_of(directory, rank), clips);
  return clips;
}

ClipManifest::ClipManifest(fs::path directory, int rank) : path_(part_of(directory, rank)) {}

ClipManifest::~ClipManifest() {
  if (file_ != nullptr) std::fclose(file_);
}

void ClipManifest::add(const FinishedClip& clip) {
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr) file_ = std::fopen(path_.c_str(), "a");
  if (file_ == nullptr) fail(path_, std::strerror(errno));
  const std::string line = to_line(clip);
  const bool written = std::fwrite(line.data(), 1, line.size(), file_) == line.size() &&
                       std::fflush(file_) == 0 && fsync(fileno(file_)) == 0;
  if (!written) fail(path_, std::strerror(errno));
}

bool is_finished(const std::map<std::string, FinishedClip>& finished, const std::string& name,
                 const std::string& key, const fs::path& directory) {
  const auto found = finished.find(name);
  if (found == finished.end() || found->second.key != key) return false;
  const FinishedClip& c = found->second;
  return is_whole(directory / c.file, c.bytes, c.xxh3) &&
         (c.marked.empty() || is_whole(directory / c.marked, c.marked_bytes, c.marked_xxh3));
}

}  // namespace weft
