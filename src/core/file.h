// Files by POSIX calls: whole reads and writes, atomic replacement, and errors that name path,
// offset and reason; and the lock of a job's folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "core/hash.h"

namespace weft {

// Owns a descriptor. Every failing call throws Error with the exit code given at opening; the hint
// fits the reason (disk full, quota, permission ...).
class File {
 public:
  // Opens a regular file for reading. Refuses directories, pipes and devices without blocking on
  // them, and symbolic links where `follow_links` is false.
  static File open(const std::filesystem::path& path, Exit code, bool follow_links = true);
  // Makes a new file for writing; one that exists already, or a link in its place, is an error.
  static File create(const std::filesystem::path& path, Exit code);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  std::uint64_t size() const;
  // Exactly out.size() bytes from `offset`; a file that ends before is an error.
  void read(std::span<std::byte> out, std::uint64_t offset) const;
  void write(std::span<const std::byte> bytes, std::uint64_t offset);
  void sync();
  // Tells the kernel to forget cached pages, so that the next read comes from the disk.
  void drop_cache() const;
  // Closes now, so that errors which the file system reports late are noticed.
  void close();

  const std::filesystem::path& path() const { return path_; }

 private:
  File(std::filesystem::path path, int fd, Exit code)
      : path_(std::move(path)), fd_(fd), code_(code) {}
  [[noreturn]] void fail(const char* verb, std::uint64_t bytes, std::uint64_t offset) const;

  std::filesystem::path path_;
  int fd_ = -1;
  Exit code_ = Exit::data;
};

// All bytes of a file; none where it is not there or cannot be read.
std::string content_of(const std::filesystem::path& path);

// Whether something has that path, at the end of its links. Error(code) where that cannot be found
// out: a folder without permission, a name that is too long, links in a circle.
bool is_there(const std::filesystem::path& path, Exit code);
// What is in a folder, in no order. Error(code) where it cannot be listed.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder, Exit code);

// An error of std::filesystem, or another one that the system gave, as ours: what, the path and the
// reason, and a hint that fits. Never a bug of weft.
Error error_of(const std::system_error& e, Exit code);

// Reads a whole regular file of at most `most` bytes: Error(code) with `hint` if it is larger.
std::string read_whole(const std::filesystem::path& path, std::uint64_t most, Exit code,
                       const std::string& hint);

struct FileHash {
  std::uint64_t bytes = 0;
  Hash128 hash;
};
// Hash of a file's content, which is read. Throws Exit::data.
FileHash hash_of_file(const std::filesystem::path& path);

// Identifies one version of a file: name, size and time of the last change.
std::string file_identity(const std::string& file);
// The same for a file, or for all files in a folder.
std::string folder_identity(const std::string& path);

// Makes entries of a directory (new files, renames) survive a power cut.
void sync_directory(const std::filesystem::path& dir, Exit code);

enum class Durable { no, yes };

// A file that appears whole: what is written goes into a draft beside it, which commit() renames,
// so that readers see either the old file or all of the new one. A draft that is not committed is
// removed; one that a killed job has left makes room for the next.
class WholeFile {
 public:
  // `draft`: the path meanwhile; .NAME.partial beside the file unless given. Makes no file: a
  // library may write the draft, by its path.
  WholeFile(std::filesystem::path path, Exit code, std::filesystem::path draft = {});
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& draft() const { return draft_; }
  void add(std::string_view text);
  // Writes what is left, so that commit(), which does the same, can fail no more for want of room.
  // Nothing is added after it. With Durable::yes the file survives a power cut.
  void close(Durable durable = Durable::no);
  void commit(Durable durable = Durable::no);

 private:
  void write();

  std::filesystem::path path_, draft_;
  Exit code_;
  std::unique_ptr<File> file_;  // made by the first add()
  std::string buffer_;
  std::uint64_t written_ = 0;
};

// The same for a text that is there, by way of PATH.tmp.
void replace_file(const std::filesystem::path& path, std::string_view text, Exit code,
                  Durable durable);

// Renames `from` to `to` atomically; throws Error(code) with both names.
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to, Exit code);

// Makes the folder, and those above it. Error(code, hint) where it cannot.
void make_folders(const std::filesystem::path& folder, Exit code, const std::string& hint);
// The same; Error(code) where a link or a file has its place: results must not go elsewhere.
void make_own_folder(const std::filesystem::path& folder, Exit code);

// One job per folder: a file in it is locked while a job writes there. The kernel releases the lock
// when the job dies, however it dies; the file names the holder.
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
