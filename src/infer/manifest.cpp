#include "infer/manifest.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "formats/file.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* whole_name = "generated.jsonl";
constexpr const char* part_prefix = "generated.rank";

std::string to_line(const FinishedClip& c) {
  const nlohmann::ordered_json j = {
      {"name", c.name},     {"file", c.file},     {"prompt", c.prompt}, {"seed", c.seed},
      {"frames", c.frames}, {"height", c.height}, {"width", c.width},   {"seconds", c.seconds},
      {"bytes", c.bytes},   {"pixels", c.pixels}, {"rank", c.rank},     {"key", c.key}};
  return j.dump() + "\n";
}

void read_lines(const fs::path& path, std::map<std::string, FinishedClip>& clips) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
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
      clips[c.name] = c;
    } catch (const nlohmann::json::exception&) {
      // The last line of a job that was killed; its clip is made again.
    }
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
  std::error_code gone;
  const auto bytes = fs::file_size(directory / found->second.file, gone);
  return !gone && bytes == found->second.bytes;
}

}  // namespace weft
