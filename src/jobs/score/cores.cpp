#include "jobs/score/cores.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "core/host.h"
#include "core/log.h"
#include "parallel/broadcast.h"

namespace weft {
namespace {

// Behind the bytes of the cores: one for each rank, locked while it is at work, one while it waits
// for a core, and one for the first of those that wait.
constexpr long first_rank_byte = 1 << 16, first_waiting_byte = 1 << 20, queue_byte = 1 << 24;

constexpr std::chrono::milliseconds look_again(1);

std::string affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return "";
  return {reinterpret_cast<const char*>(&set), sizeof set};
}

struct flock lock_of(short type, long byte) {
  struct flock l {};
  l.l_type = type;
  l.l_whence = SEEK_SET;
  l.l_start = byte;
  l.l_len = 1;
  return l;
}

// A new file in memory, or -1. `name` gets its name.
int make_file(std::string& name) {
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    name = std::string(folder) + "/weft-cores-XXXXXX";
    const int fd = mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) return fd;
  }
  name.clear();
  return -1;
}

}  // namespace

int granted_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  // A control group that grants 1.5 cores feeds two threads three quarters of the time.
  if (const double quota = quota_cores(); quota > 0)
    cores = std::min(cores, static_cast<int>(quota + 0.5));
  return std::max(1, cores);
}

int core_share(int cores, int at_work, int place) {
  return std::max(1, cores / at_work + (place < cores % at_work ? 1 : 0));
}

HostCores::HostCores(int fixed, MPI_Comm world) : cores_(granted_cores()), fixed_(fixed) {
  MPI_Comm host, sharing;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  // Ranks with the same cores: the first of them gives the group its number.
  int ranks = 1, rank = 0;
  MPI_Comm_size(host, &ranks);
  MPI_Comm_rank(host, &rank);
  const std::string mine = affinity();
  std::vector<char> all(mine.size() * static_cast<std::size_t>(ranks));
  MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_BYTE, all.data(),
                static_cast<int>(mine.size()), MPI_BYTE, host);
  int group = 0;
  while (group < rank && std::memcmp(all.data() + static_cast<std::size_t>(group) * mine.size(),
                                     mine.data(), mine.size()) != 0)
    ++group;
  MPI_Comm_split(host, group, rank, &sharing);
  MPI_Comm_size(sharing, &ranks_);
  MPI_Comm_rank(sharing, &rank_);
  held_.resize(static_cast<std::size_t>(cores_));
  if (ranks_ > 1) {
    std::string name;
    if (rank_ == 0) fd_ = make_file(name);
    broadcast_sized(name, sharing);
    // Each rank its own description: locks are between descriptions.
    if (rank_ != 0 && !name.empty()) fd_ = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    int good = fd_ >= 0 && lock(first_rank_byte + rank_) ? 1 : 0;
    if (fd_ >= 0) unlock(first_rank_byte + rank_);
    MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, sharing);
    if (rank_ == 0 && !name.empty()) ::unlink(name.c_str());
    if (good == 0) {
      if (fd_ >= 0) ::close(fd_);
      fd_ = -1;
      if (rank_ == 0)
        log::warn("the ranks of this host cannot share a file in /dev/shm: each takes {} threads",
                  core_share(cores_, ranks_, 0));
    }
  }
  MPI_Comm_free(&sharing);
  MPI_Comm_free(&host);
}

HostCores::~HostCores() {
  if (fd_ >= 0) ::close(fd_);
}

bool HostCores::lock(long byte) {
  struct flock l = lock_of(F_WRLCK, byte);
  return fcntl(fd_, F_OFD_SETLK, &l) == 0;
}

void HostCores::unlock(long byte) {
  struct flock l = lock_of(F_UNLCK, byte);
  fcntl(fd_, F_OFD_SETLK, &l);
}

bool HostCores::locked_by_others(long byte) const {
  struct flock l = lock_of(F_WRLCK, byte);
  return fcntl(fd_, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

double HostCores::share() const {
  const double even = static_cast<double>(cores_) / ranks_;
  return fixed_ > 0 ? std::min(even, static_cast<double>(fixed_)) : even;
}

int HostCores::budget() {
  if (fixed_ > 0) return std::min(fixed_, cores_);
  if (fd_ < 0) return core_share(cores_, ranks_, rank_);
  int at_work = 1, place = 0;
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_ && locked_by_others(first_rank_byte + r)) {
      ++at_work;
      if (r < rank_) ++place;
    }
  return core_share(cores_, at_work, place);
}

int HostCores::turn() {
  constexpr int few = 4;
  return fixed_ > 0 || fd_ < 0 ? budget() : std::max(budget(), std::min(cores_, few));
}

bool HostCores::others_wait() const {
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_ && locked_by_others(first_waiting_byte + r)) return true;
  return false;
}

int HostCores::try_take(int most) {
  const std::lock_guard guard(mutex_);
  int got = 0;
  for (std::size_t i = 0; i < held_.size() && got < most; ++i) {
    // Each rank begins elsewhere, so that they do not all try the same.
    const std::size_t core = (i + static_cast<std::size_t>(rank_)) % held_.size();
    if (held_[core] || !lock(static_cast<long>(core))) continue;
    held_[core] = true;
    ++got;
  }
  return got;
}

// Ranks wait in a queue, asleep; the first of it looks for a core now and then.
int HostCores::take(int most, int least) {
  if (fd_ < 0) return std::clamp(most, 1, cores_);
  least = std::clamp(least, 1, cores_);
  int got = others_wait() ? 0 : try_take(most);
  if (got >= least) return got;
  give(got);
  {
    const std::lock_guard guard(mutex_);
    if (++waiting_ == 1) lock(first_waiting_byte + rank_);
  }
  struct flock queue = lock_of(F_WRLCK, queue_byte);
  while (fcntl(fd_, F_OFD_SETLKW, &queue) != 0 && errno == EINTR) {
  }
  // It keeps what it has found: those who have the rest wait for nothing.
  for (got = try_take(most); got < least; got += try_take(most - got))
    std::this_thread::sleep_for(look_again);
  const std::lock_guard guard(mutex_);
  if (--waiting_ == 0) unlock(first_waiting_byte + rank_);
  unlock(queue_byte);
  return got;
}

void HostCores::give(int count) {
  if (fd_ < 0) return;
  const std::lock_guard guard(mutex_);
  for (std::size_t core = held_.size(); core-- > 0 && count > 0;)
    if (held_[core]) {
      unlock(static_cast<long>(core));
      held_[core] = false;
      --count;
    }
}

void HostCores::set_at_work(bool at_work) {
  if (fd_ < 0) return;
  if (at_work)
    lock(first_rank_byte + rank_);
  else
    unlock(first_rank_byte + rank_);
}

}  // namespace weft
