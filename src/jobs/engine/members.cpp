#include "jobs/engine/members.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "parallel/end_job.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// Whether all ranks see writes here at once: on local file systems (then all ranks are on one node)
// and on coherent shared ones. Others, such as NFS, need a flush.
bool is_coherent(int fd) {
  struct statfs about {};
  if (fstatfs(fd, &about) != 0) return false;
  constexpr std::array<std::uint32_t, 7> types = {
      EXT4_SUPER_MAGIC,      XFS_SUPER_MAGIC,         BTRFS_SUPER_MAGIC, TMPFS_MAGIC,
      OVERLAYFS_SUPER_MAGIC, 0x0BD00BD0 /* Lustre */, 0x47504653 /* GPFS */};
  return std::find(types.begin(), types.end(), static_cast<std::uint32_t>(about.f_type)) !=
         types.end();
}

}  // namespace

Members::Members(fs::path directory, const std::string& key, MPI_Comm world)
    : directory_(std::move(directory)), key_(key), world_(world) {
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &ranks_);
  std::error_code failure;
  if (rank_ == 0) {
    fs::remove_all(directory_, failure);
    fs::create_directories(directory_, failure);
  }
  WEFT_CHECK(!failure, Exit::data, key_ + " must be in a directory that all ranks can write to",
             "cannot make {}: {}", directory_.string(), failure.message());
  MPI_Barrier(world_);
  fd_ = ::open(file(rank_).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW | O_CLOEXEC,
               0666);
  WEFT_CHECK(fd_ >= 0, Exit::data, key_ + " must be in a directory that all ranks can write to",
             "cannot write {}: {}", file(rank_).string(), std::strerror(errno));
  flush_ = !is_coherent(fd_);
  note("host " + host_name());
  int good = flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 1 : 0;
  MPI_Barrier(world_);
  // Ranks are numbered node by node, so with several nodes some rank of the ring checks the file of
  // another node.
  for (const int other : neighbour()) {
    WEFT_CHECK(!state(other).host.empty(), Exit::data,
               key_ + " must be in a directory that all ranks share",
               "cannot read {}, which rank {} has written", file(other).string(), other);
    if (!locked(other)) good = 0;
  }
  MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, world_);
  locks_visible_ = good == 1;
  if (!locks_visible_ && rank_ == 0 && ranks_ > 1)
    log::warn("the file system of {} shows no locks of other ranks: a failed rank is not noticed",
              directory_.string());
  thread_ = std::jthread([this](const std::stop_token& end) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    while (!end.stop_requested()) {
      look_at_folder();
      look_at_watched();
      ended.wait_for(lock, end, std::chrono::seconds(1), [] { return false; });
    }
  });
}

Members::~Members() {
  // The error that unwinds the stack ends the job with its own exit code: this rank has not failed.
  if (std::uncaught_exceptions() > 0) {
    note_left();
    return;
  }
  // The watch goes on until all are here; those that come first say so.
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;  // the first rank removes the folder while others may still look
  }
  MPI_Barrier(world_);
  thread_ = std::jthread();
  note_left();
  ::close(fd_);
  std::error_code failure;
  if (rank_ == 0) fs::remove_all(directory_, failure);
}

void Members::note_left() {
  try {
    note("left");
  } catch (const Error& e) {
    log::warn("{}", e.what());  // in a destructor, and nobody waits for it
  }
}

fs::path Members::file(int rank) const { return directory_ / std::to_string(rank); }

bool Members::locked(int rank) const {
  const int fd = ::open(file(rank).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;  // unknown: never declare a rank failed that may live
  const bool got = flock(fd, LOCK_SH | LOCK_NB) == 0;
  const bool held = !got && errno == EWOULDBLOCK;
  ::close(fd);
  return held || (!got && locks_visible_);
}

bool Members::failed(int rank) {
  if (!locks_visible_ || rank == rank_) return false;
  {
    const std::lock_guard lock(mutex_);
    if (failed_.contains(rank)) return true;
  }
  if (locked(rank)) return false;
  std::ifstream in(file(rank));
  std::string line, last;
  while (std::getline(in, line)) last = line;
  if (!in.is_open() || last == "left") return false;
  const std::lock_guard lock(mutex_);
  failed_.insert(rank);
  return true;
}

void Members::check_folder() const {
  struct stat ours {
  }, there{};
  if (fstat(fd_, &ours) != 0) return;
  const bool found = ::stat(file(rank_).c_str(), &there) == 0;
  // Another reason than that it is not there may pass, as on a network file system.
  if (!found && errno != ENOENT && errno != ENOTDIR) return;
  WEFT_CHECK(
      found && ours.st_ino == there.st_ino && ours.st_dev == there.st_dev, Exit::data,
      "leave the folder alone while a job runs in it; the same command makes what is missing",
      "{} is gone: the folder was removed or renamed while the job ran", file(rank_).string());
}

void Members::look_at_folder() {
  const std::lock_guard lock(mutex_);
  if (leaving_) return;
  try {
    check_folder();
  } catch (Error& e) {
    log::report(e);
    end_job(world_, e.code());
  }
}

void Members::look_at_watched() {
  std::vector<int> others;
  {
    const std::lock_guard lock(mutex_);
    others = watched_;
  }
  for (const int other : others) {
    if (!failed(other)) continue;
    std::function<void(int)> then;
    {
      const std::lock_guard lock(mutex_);
      // watch() may have replaced the list meanwhile, and its callback with it.
      if (watched_ != others) return;
      watched_.clear();
      then = then_;
    }
    then(other);
    return;
  }
}

MemberState Members::state(int rank) const {
  MemberState s;
  std::ifstream in(file(rank));
  for (std::string line; std::getline(in, line);) {
    if (in.eof()) break;  // a line still being written
    std::istringstream words(line);
    std::string word, rest;
    std::int64_t number = -1, count = 0, stride = 1;
    words >> word;
    if (word == "take" || word == "drop") {
      words >> number >> count >> stride;
      for (std::int64_t i = 0; i < count; ++i)
        if (word == "take")
          s.taken.insert(number + i * stride);
        else
          s.taken.erase(number + i * stride);
    }
    if (word == "begin") words >> number;
    if (word == "begin" || (word == "take" && count == 1)) s.begun.insert(number);
    if (word == "fail" || word == "resolved") {
      words >> number;
      s.resolved.insert(number);
    }
    std::getline(words >> std::ws, rest);
    if (word == "fail") s.failures.push_back(rest);
    if (word == "host") s.host = rest;
    if (word == "end") s.summary = rest;
    if (word == "stop") s.stopped = true;
    if (word == "code") s.code = std::atoi(rest.c_str());
    if (word == "idle" || word == "take") s.idle = word == "idle";
  }
  return s;
}

void Members::note(std::string line, bool flush) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  // The others wait for what is noted here: a job that cannot note it must end.
  errno = ENOSPC;  // what a short write means
  WEFT_CHECK(::write(fd_, line.data(), line.size()) == static_cast<ssize_t>(line.size()),
             Exit::data, "is the disk full? the same command makes what is missing",
             "cannot write {}: {}", file(rank_).string(), std::strerror(errno));
  if (flush && flush_) fdatasync(fd_);
}

void Members::note_taken(std::int64_t place, std::int64_t count, std::int64_t stride) {
  note(fmt::format("take {} {} {}", place, count, stride));
}
void Members::note_dropped(std::int64_t place, std::int64_t count, std::int64_t stride) {
  note(fmt::format("drop {} {} {}", place, count, stride));
}
// Not flushed: for items of milliseconds the flush would take longer than the item.
void Members::note_begun(std::int64_t place) { note(fmt::format("begin {}", place), false); }
void Members::note_failed(std::int64_t item, const std::string& why) {
  note(fmt::format("fail {} {}", item, why));
}
void Members::note_resolved(std::int64_t item) { note(fmt::format("resolved {}", item)); }
void Members::note_idle() { note("idle"); }
void Members::note_stopped() { note("stop"); }
void Members::note_summary(const std::string& summary) { note("end " + summary); }
void Members::note_code(int code) { note(fmt::format("code {}", code)); }

bool Members::claim(const std::string& what) {
  // O_EXCL: the file system lets one rank alone create the file.
  const int fd = ::open((directory_ / what).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  WEFT_CHECK(fd >= 0 || errno == EEXIST, Exit::data, "is the disk full? see " + key_,
             "cannot write {}: {}", (directory_ / what).string(), std::strerror(errno));
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

void Members::watch(std::vector<int> others, std::function<void(int)> then) {
  const std::lock_guard lock(mutex_);
  watched_ = std::move(others);
  then_ = std::move(then);
}

std::vector<int> Members::neighbour() const {
  if (ranks_ == 1) return {};
  return {(rank_ + 1) % ranks_};
}

void Members::pause() const {
  std::this_thread::sleep_for(std::chrono::milliseconds(std::clamp(ranks_ * ranks_ / 4, 20, 5000)));
}

void Members::wait_for_summaries() {
  for (int r = 0; r < ranks_; ++r)
    while (r != rank_ && state(r).summary.empty() && !failed(r)) pause();
}

}  // namespace weft
