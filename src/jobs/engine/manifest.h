// Which items of a job are finished: DIR/STEM.jsonl, one sealed JSON object (core/hash.h) an item,
// with the members
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
// Deaths are counted so that no other item pays for the one that kills its rank. Where a launcher
// kills the other ranks without warning, their items are in hand, too. So all items in hand at a
// death get died: 1; a second death counts only for an item that was the only one of them in hand.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "core/error.h"

namespace weft {

// An error of the job, though its code may be that of an item's fault: a full disk, say, which all
// others would meet too.
class JobError : public Error {
 public:
  using Error::Error;
};

struct ManifestLine {
  std::string key;
  std::string
      text;  // the whole line, sealed: there may be millions, and parsed ones take much more
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

  // Appends a line. It is on the disk on return, unless lines come so fast that this would take
  // more than a tenth of the time: then a later line or the destructor syncs it. Thread-safe.
  void add(const nlohmann::ordered_json& line);
  // Notes that this rank begins the item; that it leaves that one unfinished; that it leaves all
  // that it has unfinished, without having died. Thread-safe.
  void begin(const std::string& name, const std::string& key);
  void end(const std::string& name);
  void end_all();
  // Notes the last, and closes the file. So does the destructor.
  void close();

 private:
  enum class Sync { no, cheaply, yes };
  void write(const nlohmann::ordered_json& line, Sync sync);
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::mutex mutex_;
  double synced_at_ = 0, sync_seconds_ = 0;
};

// Whether the item is finished: its line has that key, no fault and no deaths, and its files, which
// are read, match the line. A damaged file is a WARN.
bool is_finished(const ManifestLines& lines, const std::string& name, const std::string& key,
                 const std::filesystem::path& directory);

// Whether the line is a result of that key: neither a fault nor a death.
bool is_result(const ManifestLine& line, const std::string& key);

// Ranks that have died with the item of that key in hand.
int deaths_of(const ManifestLines& lines, const std::string& name, const std::string& key);

// Reads a whole file of DIR and adds the members PREFIX, PREFIX_bytes (file: bytes) and
// PREFIX_xxh3.
void add_file(nlohmann::ordered_json& line, const std::filesystem::path& directory,
              const std::string& file, const std::string& prefix = "file");

}  // namespace weft
