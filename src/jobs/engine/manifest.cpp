#include "jobs/engine/manifest.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "core/seal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

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

void read_lines(const fs::path& path, ManifestLines& lines) {
  std::ifstream in(path);
  std::int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    bool whole = seal_holds(line);
    try {
      const auto j = parse_json<Json>(line);
      const auto name = j.at("name").get<std::string>();
      auto key = j.at("key").get<std::string>();
      whole_number<int>(j.at("rank"));
      files_of(j);
      if (whole) lines[name] = {std::move(key), std::move(line)};
    } catch (const nlohmann::json::exception&) {
      whole = false;
    }
    if (!whole && !is_cut_off(line, in.eof()))
      log::warn("{}, line {} is damaged: its item is made again", path.string(), number);
  }
}

fs::path whole_path(const fs::path& directory, const std::string& stem) {
  return directory / (stem + ".jsonl");
}
fs::path part_path(const fs::path& directory, const std::string& stem, int rank) {
  return directory / fmt::format("{}.rank{}.jsonl", stem, rank);
}

[[noreturn]] void fail(const fs::path& path, const std::string& reason) {
  throw Error(Exit::data, fmt::format("cannot write {}: {}", path.string(), reason),
              "is the disk full, or the directory not writable? what is finished is kept", __FILE__,
              __LINE__);
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
  std::error_code failed;
  fs::create_directories(directory, failed);
  if (failed) fail(directory, failed.message());
  ManifestLines lines = gathered(directory, stem);
  std::vector<fs::path> parts;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(stem + ".rank")) parts.push_back(entry.path());
    if (name.starts_with('.') && name.find(".partial") != std::string::npos)
      fs::remove(entry.path(), failed);
  }
  // After the gathered lines: a part's line of the same name is newer.
  for (const fs::path& part : parts) read_lines(part, lines);
  if (parts.empty()) return lines;
  const fs::path whole = whole_path(directory, stem), made = whole.string() + ".tmp";
  std::ofstream out(made, std::ios::trunc);
  for (const auto& [name, line] : lines) out << line.text << "\n";
  out.close();
  if (!out) fail(made, std::strerror(errno));
  // The parts go only after the rename: a kill in between leaves all lines readable.
  rename_file(made, whole, Exit::data);
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
  for (fs::directory_iterator it(directory, failed), end; !failed && it != end;
       it.increment(failed))
    if (it->path().filename().string().starts_with(stem + ".rank")) read_lines(it->path(), lines);
  return lines;
}

ManifestLines Manifest::of_rank(const fs::path& directory, const std::string& stem, int rank) {
  ManifestLines lines;
  read_lines(part_path(directory, stem, rank), lines);
  return lines;
}

Manifest::Manifest(const fs::path& directory, const std::string& stem, int rank)
    : path_(part_path(directory, stem, rank)) {}

Manifest::~Manifest() {
  if (file_ == nullptr) return;
  fsync(fileno(file_));
  std::fclose(file_);
}

void Manifest::add(const Json& line) {
  const std::string text = seal_json(line.dump()) + "\n";
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr) file_ = std::fopen(path_.c_str(), "a");
  if (file_ == nullptr) fail(path_, std::strerror(errno));
  bool written =
      std::fwrite(text.data(), 1, text.size(), file_) == text.size() && std::fflush(file_) == 0;
  const double begin = now_seconds();
  // fsync takes a tenth of the time at most.
  if (written && begin - synced_at_ >= 10 * sync_seconds_) {
    written = fsync(fileno(file_)) == 0;
    synced_at_ = now_seconds();
    sync_seconds_ = synced_at_ - begin;
  }
  if (!written) fail(path_, std::strerror(errno));
}

bool is_finished(const ManifestLines& lines, const std::string& name, const std::string& key,
                 const fs::path& directory) {
  const auto found = lines.find(name);
  if (found == lines.end() || found->second.key != key) return false;
  const Json line = found->second.parsed();
  if (line.contains("fault")) return false;
  for (const NamedFile& file : files_of(line))
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

}  // namespace weft
