// Which clips are finished: OUT/generated.jsonl, one JSON object a clip.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>

namespace weft {

struct FinishedClip {
  std::string name;  // without directory and ending
  std::string file;  // name in the directory
  std::string key;   // ClipItem::key
  std::string prompt;
  std::int64_t seed = 0, frames = 0, height = 0, width = 0;
  double seconds = 0;       // its share of the batch's steps, and its decoding
  std::uint64_t bytes = 0;  // of the file
  std::string xxh3;         // XXH3-128 of its bytes; "" in a manifest of an older weft
  std::string marked;       // the copy with the watermark, a name in the directory; "" without one
  std::uint64_t marked_bytes = 0;
  std::string marked_xxh3;
  std::string pixels;  // XXH3-128 of the pixels [T,H,W,3] before they were compressed
  int rank = 0;
};

class ClipManifest {
 public:
  // One rank, while nobody writes. Gathers the parts that ranks have left, also those of a job that was killed, into
  // OUT/generated.jsonl, the newest line of a name counting, and removes the parts and half-written clips. A last line that is
  // cut off is dropped, and so is a damaged one, with a WARN. Exit::data where the directory cannot be written.
  static std::map<std::string, FinishedClip> gather(const std::filesystem::path& directory);

  // What a rank has added to its part since, also while others write.
  static std::map<std::string, FinishedClip> of_rank(const std::filesystem::path& directory,
                                                     int rank);

  // This rank's part, made with its first line: no two ranks append to one file, which network file systems mix up.
  ClipManifest(std::filesystem::path directory, int rank);
  ~ClipManifest();
  ClipManifest(const ClipManifest&) = delete;
  ClipManifest& operator=(const ClipManifest&) = delete;

  // Appends a line and sees it to the disk. Thread-safe.
  void add(const FinishedClip& clip);

 private:
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::mutex mutex_;
};

// Whether the clip is there as its line says: of that key, its files with those bytes, which are read. A file that is
// there but damaged is a WARN.
bool is_finished(const std::map<std::string, FinishedClip>& finished, const std::string& name,
                 const std::string& key, const std::filesystem::path& directory);

}  // namespace weft
