#include "core/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "core/host.h"
#include "core/log.h"

namespace weft {
namespace {

// What the user can do about it. Covers only common errors; the rest explain themselves.
const char* hint_for(int reason) {
  switch (reason) {
    case ENOSPC:
      return "the file system is full: free some space or choose another directory";
    case EDQUOT:
      return "your quota is used up: delete something or choose another file system";
    case EFBIG:
      return "larger than the limit for a file (ulimit -f) or than the file system allows";
    case EACCES:
    case EPERM:
      return "check owner and mode of the file and of the directories above it";
    case EROFS:
      return "the file system is mounted for reading alone on this host";
    case ENOENT:
      return "check the path, which begins where weft was started, that of a list in the list's "
             "folder; on a cluster, that this host mounts it";
    case EIO:
      return "the storage reports an error: check the system log, report it to the administrators";
    case EMFILE:
    case ENFILE:
      return "too many open files: raise ulimit -n";
    case ELOOP:
      return "a symbolic link where a file is expected, or a loop of links";
    case ENAMETOOLONG:
      return "a name may have 255 bytes, a path 4095";
    case ENOTDIR:
      return "a parent in the path is not a directory";
    case EAGAIN:
      return "a limit of this user or container is reached: raise ulimit -u or -v, or fewer ranks "
             "and threads a host";
    default:
      return "";
  }
}

[[noreturn]] void refuse(Exit code, int reason, std::string what) {
  throw Error(code, fmt::format("{}: {}", what, std::strerror(reason)), hint_for(reason), __FILE__,
              __LINE__);
}

// Some kernels refuse more than 2 GiB in one call, and a signal should not have to wait long.
constexpr std::size_t longest_call = std::size_t{64} << 20;

}  // namespace

File File::open(const std::filesystem::path& path, Exit code, bool follow_links) {
  // O_NONBLOCK: a pipe in place of the file must not hang the job.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (follow_links ? 0 : O_NOFOLLOW);
  const int fd = ::open(path.c_str(), flags);
  if (fd < 0) refuse(code, errno, fmt::format("cannot open {}", path.string()));
  File file(path, fd, code);
  struct stat st {};
  if (fstat(fd, &st) != 0) file.fail("stat", 0, 0);
  WEFT_CHECK(S_ISREG(st.st_mode), code, "give the path of a regular file", "{} is {}, not a file",
             path.string(), S_ISDIR(st.st_mode) ? "a directory" : "a pipe or device");
  return file;
}

// O_EXCL and O_NOFOLLOW: never write through a file or link that someone placed there beforehand.
File File::create(const std::filesystem::path& path, Exit code) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd < 0) refuse(code, errno, fmt::format("cannot create {}", path.string()));
  return File(path, fd, code);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), code_(other.code_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(code_, other.code_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t File::size() const {
  struct stat st {};
  if (fstat(fd_, &st) != 0) fail("stat", 0, 0);
  return static_cast<std::uint64_t>(st.st_size);
}

void File::read(std::span<std::byte> out, std::uint64_t offset) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t want = std::min(out.size() - done, longest_call);
    const ssize_t n = pread(fd_, out.data() + done, want, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("read", want, offset + done);
    WEFT_CHECK(n > 0, code_, "it was cut off: copy or make it again",
               "{} ends at byte {}, but {} bytes from byte {} are needed", path_.string(),
               offset + done, out.size(), offset);
    done += static_cast<std::size_t>(n);
  }
}

void File::write(std::span<const std::byte> bytes, std::uint64_t offset) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const std::size_t want = std::min(bytes.size() - done, longest_call);
    const ssize_t n = pwrite(fd_, bytes.data() + done, want, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    // Some file systems write nothing and report no error when they are full.
    if (n == 0) errno = ENOSPC;
    if (n <= 0) fail("write", bytes.size() - done, offset + done);
    done += static_cast<std::size_t>(n);
  }
}

// An error here is final: the kernel may have dropped the pages, so a second try proves nothing.
void File::sync() {
  while (fsync(fd_) != 0)
    if (errno != EINTR) fail("sync", 0, 0);
}

// Works on clean pages only, so after sync(). Advice: a kernel that ignores it costs certainty
// about the disk, not correctness.
void File::drop_cache() const { posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }

void File::close() {
  const int fd = std::exchange(fd_, -1);
  // On Linux the descriptor is closed even after EINTR; a second close could hit another thread's
  // file.
  if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail("close", 0, 0);
}

void File::fail(const char* verb, std::uint64_t bytes, std::uint64_t offset) const {
  const int reason = errno;
  if (bytes == 0) refuse(code_, reason, fmt::format("cannot {} {}", verb, path_.string()));
  refuse(code_, reason,
         fmt::format("cannot {} {} bytes of {} at byte {}", verb, bytes, path_.string(), offset));
}

void sync_directory(const std::filesystem::path& dir, Exit code) {
  const int fd = ::open(dir.empty() ? "." : dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) refuse(code, errno, fmt::format("cannot open directory {}", dir.string()));
  const int result = fsync(fd);
  const int reason = errno;
  ::close(fd);
  // Some network file systems cannot sync directories and return EINVAL: nothing more can be done.
  if (result != 0 && reason != EINVAL)
    refuse(code, reason, fmt::format("cannot sync directory {}", dir.string()));
}

void rename_file(const std::filesystem::path& from, const std::filesystem::path& to, Exit code) {
  // As root, rename() would replace /dev/null.
  struct stat there {};
  const bool exists = ::lstat(to.c_str(), &there) == 0;
  WEFT_CHECK(!exists || !(S_ISCHR(there.st_mode) || S_ISBLK(there.st_mode)), code, "name a file",
             "{} is a device, which no result replaces", to.string());
  if (std::rename(from.c_str(), to.c_str()) != 0)
    refuse(code, errno, fmt::format("cannot rename {} to {}", from.string(), to.string()));
}

WholeFile::WholeFile(std::filesystem::path path, Exit code, std::filesystem::path draft)
    : path_(std::move(path)), draft_(std::move(draft)), code_(code) {
  if (draft_.empty()) draft_ = path_.parent_path() / ("." + path_.filename().string() + ".partial");
  ::unlink(draft_.c_str());  // left over from a crash, or a link that was laid there
}

WholeFile::~WholeFile() {
  if (!draft_.empty()) ::unlink(draft_.c_str());  // a full disk needs the space
}

void WholeFile::add(std::string_view text) {
  if (!file_) file_ = std::make_unique<File>(File::create(draft_, code_));
  buffer_ += text;
  if (buffer_.size() >= (std::size_t{1} << 20)) write();
}

void WholeFile::write() {
  file_->write(std::as_bytes(std::span(buffer_)), written_);
  written_ += buffer_.size();
  buffer_.clear();
}

void WholeFile::close(Durable durable) {
  if (!file_) return;
  if (!buffer_.empty()) write();
  if (durable == Durable::yes) file_->sync();
  file_->close();
  file_.reset();
}

void WholeFile::commit(Durable durable) {
  close(durable);
  rename_file(draft_, path_, code_);
  draft_.clear();
  if (durable == Durable::yes) sync_directory(path_.parent_path(), code_);
}

void replace_file(const std::filesystem::path& path, std::string_view text, Exit code,
                  Durable durable) {
  WholeFile file(path, code, path.string() + ".tmp");
  file.add(text);
  file.commit(durable);
}

std::string content_of(const std::filesystem::path& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(content).str();
}

bool is_there(const std::filesystem::path& path, Exit code) {
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR)
    refuse(code, errno, fmt::format("cannot open {}", path.string()));
  return false;
}

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder, Exit code) {
  std::vector<std::filesystem::path> entries;
  std::error_code failed;
  for (std::filesystem::directory_iterator it(folder, failed), last; !failed && it != last;
       it.increment(failed))
    entries.push_back(it->path());
  if (failed) refuse(code, failed.value(), fmt::format("cannot list {}", folder.string()));
  return entries;
}

Error error_of(const std::system_error& e, Exit code) {
  const int reason = e.code().value();
  std::string what = e.what();
  if (const auto* of_file = dynamic_cast<const std::filesystem::filesystem_error*>(&e)) {
    const std::string second = of_file->path2().string();
    what = fmt::format("cannot use {}{}: {}", of_file->path1().string(),
                       second.empty() ? "" : " and " + second, std::strerror(reason));
  } else if (reason == EAGAIN) {  // std::thread says only that
    what = "cannot start a thread: " + what;
  }
  return Error(code, what, hint_for(reason), __FILE__, __LINE__);
}

std::string read_whole(const std::filesystem::path& path, std::uint64_t most, Exit code,
                       const std::string& hint) {
  const File file = File::open(path, code);
  const std::uint64_t size = file.size();
  WEFT_CHECK(size <= most, code, hint, "{} has {:.3f} MiB, {:.3f} are allowed", path.string(),
             static_cast<double>(size) / (1 << 20), static_cast<double>(most) / (1 << 20));
  std::string text(size, '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

FileHash hash_of_file(const std::filesystem::path& path) {
  const File file = File::open(path, Exit::data);
  FileHash found{file.size(), {}};
  Hasher hasher;
  std::vector<std::byte> piece(1 << 20);
  for (std::uint64_t at = 0; at < found.bytes; at += piece.size()) {
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), found.bytes - at));
    file.read(std::span(piece).first(n), at);
    hasher.add(std::span(piece).first(n));
  }
  found.hash = hasher.value();
  return found;
}

std::string file_identity(const std::string& file) {
  std::error_code none;
  const auto size = std::filesystem::file_size(file, none);
  const auto time = std::filesystem::last_write_time(file, none).time_since_epoch().count();
  return none
             ? file
             : fmt::format("{} {} {}", std::filesystem::path(file).filename().string(), size, time);
}

std::string folder_identity(const std::string& path) {
  std::error_code none;
  std::filesystem::path folder = path;
  // An index stands for its shards, which may be rewritten next to it: identify the whole folder.
  if (path.ends_with(".json")) folder = std::filesystem::absolute(folder).parent_path();
  if (!std::filesystem::is_directory(folder, none)) return file_identity(path);
  std::set<std::string> files;
  for (const std::filesystem::path& entry : entries_of(folder, Exit::data))
    files.insert(file_identity(entry.string()));
  return fmt::format("{}", fmt::join(files, "; "));
}

void make_folders(const std::filesystem::path& folder, Exit code, const std::string& hint) {
  namespace fs = std::filesystem;
  std::error_code failed, none;
  fs::create_directories(folder, failed);
  if (!failed) return;
  std::string why = failed.message();
  for (fs::path p = folder; !p.empty() && p != p.parent_path(); p = p.parent_path())
    if (fs::is_symlink(p, none) && !fs::is_directory(p, none))
      why = fmt::format("{} is a link to {}, which is no folder", p.string(),
                        fs::read_symlink(p, none).string());
  WEFT_CHECK(false, code, hint, "cannot make the folder {}: {}", folder.string(), why);
}

void make_own_folder(const std::filesystem::path& folder, Exit code) {
  namespace fs = std::filesystem;
  const fs::path path = folder.has_filename() ? folder : folder.parent_path();  // without a slash
  std::error_code failed, none;
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), failed);
  if (!failed) fs::create_directory(path, failed);
  const fs::file_type type = fs::symlink_status(path, none).type();
  WEFT_CHECK(type == fs::file_type::directory, code, "remove it, or choose another output folder",
             "cannot make the folder {}: {}", path.string(),
             type == fs::file_type::symlink      ? "a link stands in its place"
             : fs::exists(fs::file_status(type)) ? "a file of that name exists"
                                                 : failed.message());
}

FolderLock::FolderLock(std::filesystem::path file, const std::string& what, const std::string& key,
                       Exit code)
    : path_(std::move(file)) {
  if (path_.has_parent_path())
    make_folders(path_.parent_path(), code,
                 fmt::format("choose another {}, or check its permissions", key));
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
