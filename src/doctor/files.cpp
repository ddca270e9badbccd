// How fast a rank reads files.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/clock.h"
#include "core/error.h"
#include "doctor/measure.h"

namespace weft {
namespace {

constexpr std::size_t most_bytes = 256u << 20;  // of a clip store
constexpr std::size_t temporary_bytes = 64u << 20;
constexpr std::size_t piece = 4u << 20;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// The kinds of statfs(2) that compute nodes have.
std::string file_system_of(int fd) {
  struct statfs s {};
  if (fstatfs(fd, &s) != 0) return "?";
  switch (static_cast<unsigned long>(s.f_type)) {
    case 0xEF53:
      return "ext4";
    case 0x58465342:
      return "XFS";
    case 0x9123683E:
      return "Btrfs";
    case 0x01021994:
      return "tmpfs";
    case 0x794C7630:
      return "overlay";
    case 0x6969:
      return "NFS";
    case 0x0BD00BD0:
      return "Lustre";
    case 0x47504653:
      return "GPFS";
    case 0x19830326:
      return "BeeGFS";
    case 0x00C36400:
      return "CephFS";
    case 0x2FC12FC1:
      return "ZFS";
    case 0x65735546:
      return "FUSE";
    default:
      return fmt::format("type {:#x}", static_cast<unsigned long>(s.f_type));
  }
}

double timed_read(int fd, std::size_t begin, std::size_t bytes, const std::string& name) {
  std::vector<std::byte> buffer(piece);
  // Without this the page cache would answer. It works on clean pages alone, and changes nothing for others.
  posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  const double start = now_seconds();
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n =
        pread(fd, buffer.data(), std::min(piece, bytes - done), static_cast<off_t>(begin + done));
    WEFT_CHECK(n > 0, Exit::data, "look at the file system and its log", "reading {} failed: {}",
               name, n == 0 ? "it ends early" : std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
  return now_seconds() - start;
}

}  // namespace

void measure_files(const std::string& path, RankFacts& facts) {
  struct stat s {};
  const bool store = !path.empty() && path.rfind("synthetic:", 0) != 0;
  if (store) {
    const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    WEFT_CHECK(file.fd() >= 0 && fstat(file.fd(), &s) == 0 && S_ISREG(s.st_mode), Exit::data,
               "see that data.path is a clip store that every node can read",
               "cannot read data.path {}: {}", path,
               errno != 0 ? std::strerror(errno) : "it is not a file");
    const auto size = static_cast<std::size_t>(s.st_size);
    const std::size_t bytes = std::min(most_bytes, size);
    // Each rank has a part of its own, as far as the file reaches.
    const std::size_t parts = std::max<std::size_t>(1, size / std::max<std::size_t>(1, bytes));
    const std::size_t begin = static_cast<std::size_t>(facts.rank) % parts * bytes;
    facts.file = path;
    facts.file_system = file_system_of(file.fd());
    if (bytes == 0) return;
    facts.measured["file read GB/s"] =
        1e-9 * static_cast<double>(bytes) / timed_read(file.fd(), begin, bytes, path);
    return;
  }
  const std::string name = fmt::format(".weft-doctor-{}-{}", facts.host, facts.pid);
  const File file(open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  WEFT_CHECK(file.fd() >= 0, Exit::data, "start weft in a directory that it may write to",
             "cannot make a file in the working directory: {}", std::strerror(errno));
  unlink(name.c_str());  // it goes with the last handle, whatever happens
  facts.file = "a temporary file in the working directory";
  facts.file_system = file_system_of(file.fd());
  const std::vector<std::byte> bytes(piece, std::byte{42});
  const double start = now_seconds();
  for (std::size_t done = 0; done < temporary_bytes; done += piece)
    WEFT_CHECK(pwrite(file.fd(), bytes.data(), piece, static_cast<off_t>(done)) ==
                   static_cast<ssize_t>(piece),
               Exit::data, "free space, or see your quota", "writing {} MiB here failed: {}",
               temporary_bytes >> 20, std::strerror(errno));
  WEFT_CHECK(fsync(file.fd()) == 0, Exit::data, "free space, or see your quota",
             "writing {} MiB here failed: {}", temporary_bytes >> 20, std::strerror(errno));
  facts.measured["file write GB/s"] =
      1e-9 * static_cast<double>(temporary_bytes) / (now_seconds() - start);
  facts.measured["file read GB/s"] =
      1e-9 * static_cast<double>(temporary_bytes) / timed_read(file.fd(), 0, temporary_bytes, name);
}

}  // namespace weft
