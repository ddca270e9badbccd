#include "data/store_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/clip_store_child.h"

namespace weft {
namespace {

// What is hashed is read in pieces that are still in the cache then. Smaller pieces cost more in
// system calls than they save; measured with `weft bench read`.
constexpr std::size_t piece = 256 << 10;

}  // namespace

StoreFile::StoreFile(const std::string& path) : path_(path) {
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  WEFT_CHECK(
      fd_ >= 0, Exit::data,
      "check data.path, which begins where weft was started; `weft ingest` makes stores of clips "
      "and, with ingest.images, of labelled images, `weft encode` those of latents; synthetic:... "
      "(docs/decks.md) stands for clips that are not there, as for a plan",
      "cannot open clip store {}: {}", path, std::strerror(errno));
  try {
    struct stat status {};
    WEFT_CHECK(fstat(fd_, &status) == 0 && S_ISREG(status.st_mode), Exit::data,
               "data.path must be a file that `weft ingest` made", "{} is not a file", path);
    bytes_ = static_cast<std::uint64_t>(status.st_size);
    WEFT_CHECK(is_hdf5(path), Exit::data, "data.path must be a file that `weft ingest` made",
               "{} is not an HDF5 file, so it is no clip store", path);
    facts_ = read_store(path, bytes_);
  } catch (...) {
    close(fd_);
    throw;
  }
  for (const std::string& warning : facts_.warnings) log::warn("{}", warning);
}

StoreFile::StoreFile(StoreFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_),
      facts_(std::move(other.facts_)) {}

StoreFile::~StoreFile() {
  if (fd_ >= 0) close(fd_);
}

std::uint64_t StoreFile::read(const std::string& what, std::uint64_t offset,
                              std::span<std::byte> out, bool hashed) const {
  ClipHash hash;
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t want = hashed ? std::min(piece, out.size() - done) : out.size() - done;
    const ssize_t got = pread(fd_, out.data() + done, want, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;  // interrupted by a signal: nothing was read
    WEFT_CHECK(
        got > 0, Exit::data, "check the file system; the store may have been replaced",
        "cannot read {} in {}: {}", what, path_,
        got < 0 ? std::strerror(errno)
                : fmt::format("the file ends before the {} does", what.substr(0, what.find(' '))));
    if (hashed) hash.update(out.data() + done, static_cast<std::size_t>(got));
    done += static_cast<std::size_t>(got);
  }
  return hashed ? hash.digest() : 0;
}

}  // namespace weft
