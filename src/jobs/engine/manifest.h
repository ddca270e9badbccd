// The folder of a list job: its lock, its manifest, the names of its files and how they come into
// it.
//
// The manifest says which items are finished: DIR/STEM.jsonl, one sealed JSON object (core/hash.h)
// an item, with the members
//   name, key, rank          of the item: unique; a hash of everything that decides the result; who
//                            made it
//   file, bytes, file_xxh3   its file in DIR, size and XXH3-128; a member X beside X_bytes and
//                            X_xxh3 is another file; X_offset (file: offset) where the result is a
//                            piece of a file that it shares with others
//   fault                    if the item failed, and why: it is not finished
//   died                     instead of a file: how many ranks have died with the item in hand
// and whatever else the job wants to say. While a job runs, each rank writes a part of its own,
// DIR/STEM.rankN.jsonl, in which it also notes what it begins: {"begun": NAME, "key": KEY}; what it
// gives up: {"ended": NAME}; and when it stops or ends without being killed: {"ended": true}. An
// item that was begun, and neither finished nor ended, was in hand when its rank died.
//
// What was in hand when a rank died gets died: 1, and is made alone from then on, no two such items
// at a time (list_job.h). The one in hand at a further death gets died: 2 and is given up. Where a
// launcher kills the other ranks without warning, their items are in hand, too, so one death proves
// nothing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "core/file.h"

namespace weft {

constexpr int most_deaths = 2;  // then an item is given up: it may be what ends its ranks

struct ManifestLine {
  std::string key;
  // The whole line, sealed: there may be millions, and parsed ones take much more.
  std::string text;
  int died = 0;
  bool fault = false;
  nlohmann::ordered_json parsed() const;
};
using ManifestLines = std::map<std::string, ManifestLine>;  // by name

class Manifest {
 public:
  // On one rank, while no other writes. Gathers the parts of all ranks, also of a killed job, into
  // DIR/STEM.jsonl, where the newest line of a name counts, and removes the parts. A last line that
  // is cut off is dropped; a damaged line is dropped with a WARN. Exit::data if the directory
  // cannot be written.
  static ManifestLines gather(const std::filesystem::path& directory, const std::string& stem);
  // The gathered lines.
  static ManifestLines gathered(const std::filesystem::path& directory, const std::string& stem);
  // The gathered lines and all that ranks have added since, also while they write; changes nothing.
  static ManifestLines all(const std::filesystem::path& directory, const std::string& stem);

  // This rank's part, created with its first line. No two ranks append to one file: network file
  // systems would mix up their lines.
  Manifest(const std::filesystem::path& directory, const std::string& stem, int rank);
  ~Manifest();
  Manifest(const Manifest&) = delete;
  Manifest& operator=(const Manifest&) = delete;

  // Appends a line, which others can read on return. Lines of the last second may be lost with
  // their node: an item is made again, a death is not counted. Thread-safe.
  void add(const nlohmann::ordered_json& line);
  // Notes that this rank begins the item; that it leaves that one unfinished; that it leaves all
  // that it has unfinished, without having died. Thread-safe.
  void begin(const std::string& name, const std::string& key);
  void end(const std::string& name);
  void end_all();
  // Notes the last, and closes the file. So does the destructor.
  void close();

 private:
  void sync();
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::mutex mutex_;
  double synced_at_ = 0;
};

// Whether the item is finished: its line has that key, no fault and no deaths, and its files, which
// are read, match the line. A damaged file is a WARN.
bool is_finished(const ManifestLines& lines, const std::string& name, const std::string& key,
                 const std::filesystem::path& directory);

// Whether the line is a result of that key: neither a fault nor a death.
inline bool is_result(const ManifestLine& line, const std::string& key) {
  return line.key == key && !line.fault && line.died == 0;
}

// Whether it is a result of any request, and its files are still there, unread. A part that is kept
// under a hidden name until its whole is made is none.
bool has_result(const ManifestLine& line, const std::filesystem::path& directory);

// Reads a whole file of DIR and adds the members PREFIX, PREFIX_bytes (file: bytes) and
// PREFIX_xxh3.
void add_file(nlohmann::ordered_json& line, const std::filesystem::path& directory,
              const std::string& file, const std::string& prefix = "file");

// ---- Files of results ----

// On rank 0; null on the others, who wait for it in the engine. Makes the folder, and keeps other
// jobs out of it while the lock lives: Exit::checkpoint if one is in it, as for a run directory.
// `key` of the deck names the folder.
std::shared_ptr<FolderLock> lock_output(const std::filesystem::path& folder,
                                        const std::string& key);

// Removes what killed jobs have left half-written: `.X.partial`, where X is the file of a result of
// that name (NAME, NAME.mp4, NAME_watermark.mp4).
void remove_remains(const std::filesystem::path& folder, const std::set<std::string>& names);

// Whether results in a folder of that name, within the output folder, would be in the way of the
// job's own files. `stem`: ListSettings::stem.
bool is_own_name(const std::string& folder, const std::string& stem);

// The path of a result, `file` of `directory`, once the folders in between are there. Exit::data
// where a link or a file is in their place: results stay in the output folder.
std::filesystem::path result_path(const std::filesystem::path& directory,
                                  const std::filesystem::path& file);

// ---- Names of items and results, made of names of others ----

// The name of a file as an item's: unique for each path, valid UTF-8 without control characters.
std::string item_name(const std::string& path);

// Bytes that are not UTF-8 become U+FFFD: lines of JSON are UTF-8.
std::string as_utf8(const std::string& name);
// As UTF-8, with _ for control characters and for the characters `others`: may be printed.
std::string plain_text(const std::string& name, std::string_view others = {});
// At most `most` bytes of UTF-8, no character cut.
std::string cut_text(std::string text, std::size_t most);
// The last part of a path without its ending, of letters, digits, dots, dashes and underlines
// alone, 100 at most.
std::string plain_stem(const std::string& path);

}  // namespace weft
