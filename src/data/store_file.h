// A store of clips or of labelled images, opened: its file, and what HDF5 reported about it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "data/clip_store_open.h"

namespace weft {

class StoreFile {
 public:
  // Opens the file and has its structure read (clip_store_child.h). Throws Exit::data. Warnings
  // have been logged.
  explicit StoreFile(const std::string& path);
  StoreFile(StoreFile&& other) noexcept;
  ~StoreFile();

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  // The owner takes out what it keeps.
  StoreFacts& facts() { return facts_; }

  // Reads out.size() bytes from `offset` by pread, past HDF5 and its lock, and returns their
  // XXH3-64 if `hashed`, else 0. Safe from several threads at once. Throws Exit::data: "cannot read
  // WHAT in PATH".
  std::uint64_t read(const std::string& what, std::uint64_t offset, std::span<std::byte> out,
                     bool hashed) const;

 private:
  std::string path_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  StoreFacts facts_;
};

}  // namespace weft
