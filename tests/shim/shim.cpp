// A library for LD_PRELOAD that puts faults between weft and the system. WEFT_SHIM says which, with
// commas between them:
//   init_signal=N   sends the process signal N within MPI_Init_thread, as somebody does who stops a
//                   job at once
//   mpi_version=TEXT    the MPI calls itself TEXT
//   node_ranks=N    so many consecutive ranks share a host's memory, and no more
//   slow_reads=MS:AT:FILE   the AT-th pread of a clip (and all behind it) by a rank, of a file
//                           whose name ends with FILE, takes MS milliseconds longer
//   held_read=LOOKS:FILE    a rank's first pread of a clip of such a file returns when its main
//                   thread has been seen asleep, in one and the same wait, LOOKS times in a row,
//                   10 ms apart
//   held_writes=UNTIL:PART  each pwrite of a file with PART in its path waits until a file UNTIL
//                   exists
//   bad_writes=PART  each pwrite of a file with PART in its path turns one bit of its first byte
//   free_space=BYTES:PART   the file system of what has PART in its path has BYTES left
//   slow_names=MICROSECONDS:PART    open, opendir, rename, faccessat and fdatasync of what has PART
//                                   in its path take that much longer, half of it before and half
//                                   behind, as over a network
//   held_names=UNTIL:PART   the same calls of a rank, of what has PART in its path, wait until a
//                   file UNTIL exists
//   no_locks=REASON  locks of files answer with this errno, as on NFS or Lustre without them: 37
//                    for ENOLCK, 95 for EOPNOTSUPP
//   wall_clock=SECONDS:EVERY:LOG:FILE   once FILE exists, a rank's wall clock jumps by SECONDS each
//                   time the rank has asked any clock EVERY times more: there, back, there. Each
//                   jump is a line "RANK SECONDS" of LOG
//   wall_clock_of_ranks=SECONDS   rank r's wall clock is r times SECONDS ahead
//   record=LOG:DIR  what happens to the files below DIR goes to LOG, in one order over all
//                   processes (tests/e2e/test_power_cut.py reads it)
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace {

// What stands behind "NAME=" in WEFT_SHIM, cut at its colons; empty where it is not asked for.
std::vector<std::string> wish(const std::string& name) {
  const char* all = std::getenv("WEFT_SHIM");
  std::istringstream orders(all == nullptr ? "" : all);
  std::vector<std::string> fields;
  for (std::string order; std::getline(orders, order, ',');) {
    if (order.rfind(name + "=", 0) != 0) continue;
    std::istringstream values(order.substr(name.size() + 1));
    for (std::string field; std::getline(values, field, ':');) fields.push_back(field);
  }
  return fields;
}

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

std::atomic<bool> is_rank = false;  // not a process that a rank has started

std::string path_of(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  char name[PATH_MAX];
  const ssize_t length = readlink(link.c_str(), name, sizeof name);
  return length < 0 ? "" : std::string(name, static_cast<size_t>(length));
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void pause_for(long milliseconds) {
  const timespec pause{milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&pause, nullptr);
}

void wait_for_file(const std::string& path) {
  while (access(path.c_str(), F_OK) != 0) pause_for(10);
}

// A network's way to a file server and back, around a call on a name.
class Trip {
 public:
  explicit Trip(const std::string& path) {
    static const std::vector<std::string> slow = wish("slow_names"), held = wish("held_names");
    if (is_rank && held.size() == 2 && path.find(held[1]) != std::string::npos)
      wait_for_file(held[0]);
    if (is_rank && slow.size() == 2 && path.find(slow[1]) != std::string::npos)
      half_ = std::stol(slow[0]) / 2;
    wait();
  }
  ~Trip() {
    const int reason = errno;
    wait();
    errno = reason;
  }

 private:
  void wait() const {
    const timespec pause{half_ / 1000000, half_ % 1000000 * 1000};
    if (half_ > 0) nanosleep(&pause, nullptr);
  }
  long half_ = 0;
};

// How often the main thread has gone to sleep so far, if it sleeps now.
std::optional<std::string> main_asleep() {
  std::ifstream status("/proc/self/task/" + std::to_string(getpid()) + "/status");
  bool asleep = false;
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("State:", 0) == 0) asleep = line.find('S', 6) != line.npos;
    if (asleep && line.rfind("voluntary_ctxt_switches:", 0) == 0) return line;
  }
  return std::nullopt;
}

void delay_read(int fd, size_t bytes) {
  // A clip, and not a look at the file's head.
  if (!is_rank || bytes < 1000) return;
  static const std::vector<std::string> slow = wish("slow_reads"), held = wish("held_read");
  if (slow.size() == 3 && ends_with(path_of(fd), slow[2])) {
    static std::atomic<int> reads = 0;
    if (++reads >= std::stoi(slow[1])) pause_for(std::stol(slow[0]));
  }
  if (held.size() == 2 && ends_with(path_of(fd), held[1]) && syscall(SYS_gettid) != getpid()) {
    static std::atomic<bool> first = true;
    if (!first.exchange(false)) return;
    const int wanted = std::stoi(held[0]);
    std::optional<std::string> before;
    for (int looks = 0; looks < wanted; ++looks) {
      pause_for(10);
      const std::optional<std::string> now = main_asleep();
      if (!now || now != before) looks = 0;
      before = now;
    }
  }
}

void hold_write(int fd) {
  static const std::vector<std::string> held = wish("held_writes");
  if (held.size() != 2 || path_of(fd).find(held[1]) == std::string::npos) return;
  wait_for_file(held[0]);
}

// Seconds that this rank's clock on the wall is wrong by now: what an administrator or NTP may do
// to it.
time_t wall_clock_error() {
  if (!is_rank) return 0;
  // Open MPI's launcher, or MPICH's.
  static const char* const open_mpi = std::getenv("OMPI_COMM_WORLD_RANK");
  static const char* const rank = open_mpi != nullptr ? open_mpi : std::getenv("PMI_RANK");
  static const std::vector<std::string> jumps = wish("wall_clock"),
                                        apart = wish("wall_clock_of_ranks");
  if (apart.size() == 1 && rank != nullptr) return std::stol(apart[0]) * std::stol(rank);
  if (jumps.size() != 4) return 0;
  static std::atomic<bool> began = false;
  if (!began && access(jumps[3].c_str(), F_OK) != 0) return 0;
  began = true;
  static const long every = std::stol(jumps[1]);
  static std::atomic<long> asked = 0;
  const long now = asked++;
  const time_t there = std::stol(jumps[0]), error = now / every % 2 == 0 ? there : 0;
  if (now % every == 0) {
    const std::string line = std::string(rank == nullptr ? "0" : rank) + " " +
                             std::to_string(error == 0 ? -there : there) + "\n";
    const int log = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, jumps[2].c_str(),
                                               O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (::syscall(SYS_write, log, line.data(), line.size()) != static_cast<long>(line.size()))
      abort();
    close(log);
  }
  return error;
}

// One act at a time over all processes, and its record in the same breath: the log's order is what
// happened.
class Record {
 public:
  explicit Record(const std::string& path) : Record(path, asked()) {}
  ~Record() {
    if (fd_ < 0) return;
    if (!text_.empty() &&
        ::syscall(SYS_write, fd_, text_.data(), text_.size()) != static_cast<long>(text_.size()))
      abort();
    close(fd_);
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  bool on() const { return fd_ >= 0; }
  // What the log is to say if the act succeeded, which `result` tells.
  template <class R>
  R done(R result, const std::string& text) {
    if (on() && result >= 0) text_ = text;
    return result;
  }

 private:
  static const std::vector<std::string>& asked() {
    static const std::vector<std::string> fields = wish("record");
    return fields;
  }
  Record(const std::string& path, const std::vector<std::string>& fields) {
    if (fields.size() != 2 || path.compare(0, fields[1].size(), fields[1]) != 0) return;
    fd_ = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, fields[0].c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (fd_ < 0 || ::syscall(SYS_flock, fd_, LOCK_EX) != 0) abort();
  }

  int fd_ = -1;
  std::string text_;
};

// A name as "INODE-OF-ITS-DIRECTORY NAME", and its whole path.
struct Name {
  std::string path, text;
  Name(int dir, const char* given) {
    std::string whole = given;
    if (whole.empty() || whole[0] != '/')
      whole = (dir == AT_FDCWD ? path_of_here() : path_of(dir)) + "/" + whole;
    const size_t cut = whole.rfind('/');
    char real[PATH_MAX];
    if (realpath(whole.substr(0, cut + 1).c_str(), real) == nullptr) return;
    struct stat status {};
    stat(real, &status);
    path = std::string(real) + "/" + whole.substr(cut + 1);
    text = std::to_string(status.st_ino) + " " + whole.substr(cut + 1);
  }
  static std::string path_of_here() {
    char here[PATH_MAX];
    return getcwd(here, sizeof here) == nullptr ? "" : here;
  }
};

std::string inode_of(const std::string& path) {
  struct stat status {};
  lstat(path.c_str(), &status);
  return std::to_string(status.st_ino);
}

std::string inode_of(int fd) {
  struct stat status {};
  fstat(fd, &status);
  return std::to_string(status.st_ino);
}

template <class F>
int open_file(const char* function, const char* path, int flags, mode_t mode) {
  const F real = next<F>(function);
  const Trip trip(path);
  if ((flags & O_CREAT) == 0) return real(path, flags, mode);
  const Name name(AT_FDCWD, path);
  Record record(name.path);
  const bool there = access(path, F_OK) == 0;
  const int fd = real(path, flags, mode);
  const int reason = errno;
  if (fd >= 0 && (!there || (flags & O_TRUNC) != 0))
    record.done(fd, (there ? "cut " : "file ") + name.text + " " + inode_of(fd) + "\n");
  errno = reason;
  return fd;
}

template <class F>
ssize_t write_file(const char* function, int fd, const void* from, size_t bytes, off_t offset) {
  hold_write(fd);
  static const std::vector<std::string> bad = wish("bad_writes");
  std::string turned;
  if (bad.size() == 1 && bytes > 0 && path_of(fd).find(bad[0]) != std::string::npos) {
    turned.assign(static_cast<const char*>(from), bytes);
    turned[0] = static_cast<char>(turned[0] ^ 1);
    from = turned.data();
  }
  Record record(path_of(fd));
  const ssize_t n = next<F>(function)(fd, from, bytes, offset);
  if (!record.on() || n < 0) return n;
  const auto written = static_cast<size_t>(n);
  return record.done(n, "write " + inode_of(fd) + " " + std::to_string(offset) + " " +
                            std::to_string(written) + "\n" +
                            std::string(static_cast<const char*>(from), written) + "\n");
}

template <class Found>
int space_left(const char* function, const char* path, Found* found) {
  const int result = next<int (*)(const char*, Found*)>(function)(path, found);
  static const std::vector<std::string> space = wish("free_space");
  if (result == 0 && space.size() == 2 && std::string(path).find(space[1]) != std::string::npos) {
    found->f_frsize = 1;
    found->f_bavail = std::stoul(space[0]);
  }
  return result;
}

int lock_or(const char* function, int fd, int command, void* argument) {
  static const std::vector<std::string> reason = wish("no_locks");
  const bool lock = command == F_SETLK || command == F_SETLKW || command == F_GETLK ||
                    command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_OFD_GETLK;
  if (!lock || reason.size() != 1)
    return next<int (*)(int, int, ...)>(function)(fd, command, argument);
  errno = std::stoi(reason[0]);
  return -1;
}

}  // namespace

extern "C" {

int MPI_Get_library_version(char* text, int* length) {
  const auto other = wish("mpi_version");
  if (other.empty())
    return next<decltype(&MPI_Get_library_version)>("MPI_Get_library_version")(text, length);
  *length = std::snprintf(text, MPI_MAX_LIBRARY_VERSION_STRING, "%s", other[0].c_str());
  return MPI_SUCCESS;
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* part) {
  const auto ranks = wish("node_ranks");
  if (ranks.empty() || type != MPI_COMM_TYPE_SHARED)
    return next<decltype(&MPI_Comm_split_type)>("MPI_Comm_split_type")(comm, type, key, info, part);
  int rank = 0;
  next<decltype(&MPI_Comm_rank)>("MPI_Comm_rank")(comm, &rank);
  return next<decltype(&MPI_Comm_split)>("MPI_Comm_split")(comm, rank / std::stoi(ranks[0]), key,
                                                           part);
}

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  if (const auto signal = wish("init_signal"); !signal.empty())
    kill(getpid(), std::stoi(signal[0]));
  is_rank = true;
  return next<decltype(&MPI_Init_thread)>("MPI_Init_thread")(argc, argv, required, provided);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  delay_read(fd, bytes);
  return next<decltype(&pread)>("pread")(fd, to, bytes, offset);
}

ssize_t pread64(int fd, void* to, size_t bytes, off64_t offset) {
  delay_read(fd, bytes);
  return next<decltype(&pread64)>("pread64")(fd, to, bytes, offset);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  return write_file<decltype(&pwrite)>("pwrite", fd, from, bytes, offset);
}

ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t offset) {
  return write_file<decltype(&pwrite64)>("pwrite64", fd, from, bytes, offset);
}

int statvfs(const char* path, struct statvfs* found) noexcept {
  return space_left("statvfs", path, found);
}

int statvfs64(const char* path, struct statvfs64* found) noexcept {
  return space_left("statvfs64", path, found);
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return open_file<int (*)(const char*, int, mode_t)>("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return open_file<int (*)(const char*, int, mode_t)>("open64", path, flags, mode);
}

int flock(int fd, int operation) noexcept {
  static const std::vector<std::string> reason = wish("no_locks");
  if (reason.size() != 1) return static_cast<int>(::syscall(SYS_flock, fd, operation));
  errno = std::stoi(reason[0]);
  return -1;
}

int fcntl(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void* const argument = va_arg(more, void*);
  va_end(more);
  return lock_or("fcntl", fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void* const argument = va_arg(more, void*);
  va_end(more);
  return lock_or("fcntl64", fd, command, argument);
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = next<decltype(&clock_gettime)>("clock_gettime");
  const int result = real(clock, time);
  // Every clock counts; those of the wall are moved.
  const time_t error = wall_clock_error();
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    time->tv_sec += error;
  return result;
}

int gettimeofday(timeval* time, void* zone) noexcept {
  static const auto real = next<decltype(&gettimeofday)>("gettimeofday");
  const int result = real(time, zone);
  if (result == 0) time->tv_sec += wall_clock_error();
  return result;
}

time_t time(time_t* to) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (to != nullptr) *to = now.tv_sec;
  return now.tv_sec;
}

int fsync(int fd) {
  Record record(path_of(fd));
  return record.done(next<decltype(&fsync)>("fsync")(fd), "sync " + inode_of(fd) + "\n");
}

int fdatasync(int fd) {
  const Trip trip(path_of(fd));
  return next<decltype(&fdatasync)>("fdatasync")(fd);
}

DIR* opendir(const char* path) {
  const Trip trip(path);
  return next<decltype(&opendir)>("opendir")(path);
}

int faccessat(int dir, const char* path, int mode, int flags) noexcept {
  const Trip trip(path_of(dir));
  return next<decltype(&faccessat)>("faccessat")(dir, path, mode, flags);
}

int mkdir(const char* path, mode_t mode) {
  const Name name(AT_FDCWD, path);
  Record record(name.path);
  const int result = next<decltype(&mkdir)>("mkdir")(path, mode);
  const int reason = errno;
  record.done(result, "directory " + name.text + " " + inode_of(name.path) + "\n");
  errno = reason;
  return result;
}

int symlink(const char* target, const char* path) {
  const Name name(AT_FDCWD, path);
  Record record(name.path);
  return record.done(next<decltype(&symlink)>("symlink")(target, path),
                     "link " + name.text + " " + target + "\n");
}

int rename(const char* from, const char* to) {
  const Name before(AT_FDCWD, from), after(AT_FDCWD, to);
  Record record(before.path);
  const Trip trip(before.path);
  return record.done(next<decltype(&rename)>("rename")(from, to),
                     "rename " + before.text + " " + after.text + "\n");
}

int unlinkat(int dir, const char* path, int flags) {
  const Name name(dir, path);
  Record record(name.path);
  return record.done(next<decltype(&unlinkat)>("unlinkat")(dir, path, flags),
                     "unlink " + name.text + "\n");
}

int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  const int result = unlink(path);
  return result != 0 && errno == EISDIR ? rmdir(path) : result;
}
}
