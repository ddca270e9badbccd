#include "core/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/host.h"
#include "core/log.h"

namespace weft {

FolderLock::FolderLock(std::filesystem::path file, const std::string& what, const std::string& key,
                       Exit code)
    : path_(std::move(file)) {
  std::error_code failed;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), failed);
  WEFT_CHECK(!failed, code, fmt::format("choose another {}, or check its permissions", key),
             "cannot make the folder {}: {}", path_.parent_path().string(), failed.message());
  for (;;) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    WEFT_CHECK(fd_ >= 0, code,
               fmt::format("check owner and mode of its folder, or choose another {}", key),
               "cannot open {}: {}", path_.string(), std::strerror(errno));
    std::array<char, 512> text{};
    const ssize_t n = pread(fd_, text.data(), text.size() - 1, 0);
    std::string holder(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
    while (!holder.empty() && holder.back() == '\n') holder.pop_back();
    // A lock's text goes with it: a file of somebody else's must not.
    struct stat kind {};
    const bool is_lock = fstat(fd_, &kind) == 0 && S_ISREG(kind.st_mode) && kind.st_nlink <= 1 &&
                         (holder.empty() ? kind.st_size == 0 : holder.starts_with("host "));
    if (!is_lock) {
      ::close(fd_);
      fd_ = -1;
      throw Error(code, fmt::format("{} is not a lock of weft's", path_.string()),
                  fmt::format("move it away, or choose another {}", key), __FILE__, __LINE__);
    }

    const bool got = flock(fd_, LOCK_EX | LOCK_NB) == 0;
    const bool no_locks = !got && errno != EWOULDBLOCK;
    const std::string why = std::strerror(errno);
    // On file systems without locks, check whether the process that the file names is alive, if it
    // ran on this host.
    bool alive = !got && !no_locks;
    const std::string mine = fmt::format("host {} process ", host_name());
    if (no_locks && holder.starts_with(mine)) {
      const int pid = std::atoi(holder.c_str() + mine.size());
      alive = pid > 0 && pid != getpid() && (kill(pid, 0) == 0 || errno == EPERM);
    }
    if (alive) {
      ::close(fd_);
      fd_ = -1;
      throw Error(Exit::checkpoint,
                  fmt::format("{} is in use by another job: {}", what,
                              holder.empty() ? "holder not known yet" : holder),
                  fmt::format("wait for it, stop it, or choose another {}{}", key,
                              no_locks ? fmt::format("; remove {} if that process is no weft",
                                                     path_.string())
                                       : std::string()),
                  __FILE__, __LINE__);
    }
    // The previous holder may have removed the file between our open and our lock: then the lock is
    // on a file that nobody else can open, and worth nothing, so try again.
    struct stat ours {
    }, theirs{};
    if (fstat(fd_, &ours) == 0 && ::stat(path_.c_str(), &theirs) == 0 &&
        ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev) {
      const bool elsewhere = !holder.empty() && !holder.starts_with(mine);
      if (no_locks)
        log::warn(
            "{} is on a file system without locks ({}): a job of another host in it is not "
            "noticed{}",
            what, why,
            elsewhere ? fmt::format("; its lock names {}, see that it has ended", holder)
                      : std::string());
      else if (!holder.empty())
        log::info("taking over the stale lock of {} ({})", what, holder);
      const std::string text_now = mine + std::to_string(getpid()) + "\n";
      if (ftruncate(fd_, 0) != 0 ||
          pwrite(fd_, text_now.data(), text_now.size(), 0) != static_cast<ssize_t>(text_now.size()))
        log::warn("cannot write {}: {}", path_.string(), std::strerror(errno));
      return;
    }
    ::close(fd_);
  }
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  // Removed while still locked: after close() the file may already be another job's lock.
  ::unlink(path_.c_str());
  ::close(fd_);
}

}  // namespace weft
