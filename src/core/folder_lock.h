// One job a folder: a file in it is locked while a job writes there. The kernel lifts the lock when
// the job dies, however it dies; the file names the holder.
#pragma once

#include <filesystem>
#include <string>

#include "core/error.h"

namespace weft {

class FolderLock {
 public:
  // Makes and locks `file`, and the folder that it lies in. `what` is locked by it, such as "run
  // directory X", and `key` of the deck names that. Throws Exit::checkpoint, naming host and
  // process, when a live job holds it; Error(code) where the file cannot be made. Where the file
  // system has no locks a WARN says so, and only a job of this host is noticed.
  FolderLock(std::filesystem::path file, const std::string& what, const std::string& key,
             Exit code);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace weft
