// What a clip leaves on the disk until it is whole: OUTPUT/.work/NAME/ holds its preparation, its
// finished segments, and the locks by which ranks keep from making the same thing twice.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace weft {

// A lock that ends with its owner's process, whichever way that ends. Where a file system shows no
// locks of other nodes, two ranks may hold it: then both make the same bytes.
class WorkLock {
 public:
  // Waits for it. False from `go_on`, asked while it waits, gives up: held() is false then.
  // Exit::data where the folder cannot be written.
  WorkLock(const std::filesystem::path& file, const std::function<bool()>& go_on);
  ~WorkLock();
  WorkLock(const WorkLock&) = delete;
  WorkLock& operator=(const WorkLock&) = delete;
  bool held() const { return held_; }

 private:
  int fd_ = -1;
  bool held_ = false;
};

class WorkFolder {
 public:
  // Of the clip NAME, whose files are of `key`: others of an earlier key do not count.
  WorkFolder(const std::filesystem::path& output, const std::string& name, const std::string& key);

  // All names are relative to the output folder, as the manifest has them.
  std::string prepared() const { return mark_ + ".prepared.safetensors"; }
  std::string segment(std::int64_t first) const;
  std::string lock(const std::string& of) const { return of + ".lock"; }
  std::filesystem::path path(const std::string& file) const { return output_ / file; }
  bool has(const std::string& file) const;
  void create() const;
  // Removes files of other keys.
  void drop_others() const;
  void remove() const;

  // Within one job: that the clip is whole, or why it cannot be made.
  struct End {
    bool whole = false;
    int code = 0;  // Exit
    std::string what, hint;
  };
  std::optional<End> end() const;
  void note_end(const End& end) const;
  void forget_end() const;

 private:
  std::filesystem::path output_;
  std::string folder_, mark_;  // .work/NAME, and .work/NAME/KEY
  std::filesystem::path end_file() const;
};

// Removes OUTPUT/.work, all of it.
void remove_work(const std::filesystem::path& output);

}  // namespace weft
