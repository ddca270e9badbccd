#include "jobs/rank_roll.h"

#include <fcntl.h>
#include <sys/file.h>
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
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

std::string host_name() {
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  return host.data();
}

}  // namespace

RankRoll::RankRoll(fs::path directory, MPI_Comm world)
    : directory_(std::move(directory)), world_(world) {
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &ranks_);
  std::error_code failed;
  if (rank_ == 0) {
    fs::remove_all(directory_, failed);
    fs::create_directories(directory_, failed);
  }
  MPI_Barrier(world_);
  fd_ = ::open(file(rank_).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  WEFT_CHECK(fd_ >= 0, Exit::data,
             "generate.output must be a directory that all ranks can write to",
             "cannot write {}: {}", file(rank_).string(), std::strerror(errno));
  note("host " + host_name());
  int good = flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 1 : 0;
  MPI_Barrier(world_);
  // Ranks go from node to node: somewhere in the ring one looks at another node's.
  for (const int other : neighbour()) {
    WEFT_CHECK(!state(other).host.empty(), Exit::data,
               "generate.output must be a directory that all ranks share",
               "cannot read {}, which rank {} has written", file(other).string(), other);
    if (!locked(other)) good = 0;
  }
  MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, world_);
  seen_by_all_ = good == 1;
  if (!seen_by_all_ && rank_ == 0)
    log::warn(
        "the file system of {} shows no locks of other ranks: a rank that is lost is not noticed",
        directory_.string());
  thread_ = std::jthread([this](const std::stop_token& end) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    while (!end.stop_requested()) {
      std::vector<int> others;
      {
        const std::lock_guard mine(mutex_);
        others = watched_;
      }
      for (const int other : others) {
        if (!lost(other)) continue;
        std::function<void(int)> then;
        {
          const std::lock_guard mine(mutex_);
          if (watched_ != others) break;
          watched_.clear();
          then = then_;
        }
        then(other);
        break;
      }
      ended.wait_for(lock, end, std::chrono::seconds(1), [] { return false; });
    }
  });
}

RankRoll::~RankRoll() {
  // An error on its way to main ends the job, with its own exit code: this rank is not lost.
  if (std::uncaught_exceptions() > 0) {
    note("left");
    return;
  }
  // The watch goes on until all are here; those that are through first say so.
  MPI_Barrier(world_);
  thread_ = std::jthread();
  note("left");
  ::close(fd_);
  std::error_code failed;
  if (rank_ == 0) fs::remove_all(directory_, failed);
}

fs::path RankRoll::file(int rank) const { return directory_ / std::to_string(rank); }

bool RankRoll::locked(int rank) const {
  const int fd = ::open(file(rank).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;  // not known: never take a rank for lost that may be there
  const bool got = flock(fd, LOCK_SH | LOCK_NB) == 0;
  const bool held = !got && errno == EWOULDBLOCK;
  ::close(fd);
  return held || (!got && seen_by_all_);
}

bool RankRoll::lost(int rank) {
  if (!seen_by_all_ || rank == rank_) return false;
  {
    const std::lock_guard lock(mutex_);
    if (lost_.contains(rank)) return true;
  }
  if (locked(rank)) return false;
  std::ifstream in(file(rank));
  std::string line, last;
  while (std::getline(in, line)) last = line;
  if (!in.is_open() || last == "left") return false;
  const std::lock_guard lock(mutex_);
  lost_.insert(rank);
  return true;
}

RollEntry RankRoll::state(int rank) const {
  RollEntry s;
  std::ifstream in(file(rank));
  for (std::string line; std::getline(in, line);) {
    if (in.eof()) break;  // half a line
    std::istringstream words(line);
    std::string word, rest;
    words >> word >> std::ws;
    std::int64_t number = -1;
    if (word == "take" || word == "drop" || word == "fail" || word == "settled")
      words >> number >> std::ws;
    std::getline(words, rest);
    if (word == "take") s.taken.push_back(number);
    if (word == "drop") std::erase(s.taken, number);
    if (word == "fail" || word == "settled") s.settled.insert(number);
    if (word == "fail") s.failures.push_back(rest);
    if (word == "host") s.host = rest;
    if (word == "end") s.end = rest;
    if (word == "stop") s.stopped = true;
    if (word == "told") s.told = true;
    if (word == "idle" || word == "take") s.idle = word == "idle";
  }
  return s;
}

void RankRoll::note(const std::string& line) {
  std::string text = line;
  std::replace(text.begin(), text.end(), '\n', ' ');
  text += '\n';
  if (::write(fd_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    log::warn("cannot write {}: {}", file(rank_).string(), std::strerror(errno));
  // Over NFS others see what has reached the server.
  fdatasync(fd_);
}

void RankRoll::note_taken(std::int64_t place) { note(fmt::format("take {}", place)); }
void RankRoll::note_dropped(std::int64_t place) { note(fmt::format("drop {}", place)); }
void RankRoll::note_failed(std::int64_t clip, const std::string& why) {
  note(fmt::format("fail {} {}", clip, why));
}
void RankRoll::note_settled(std::int64_t clip) { note(fmt::format("settled {}", clip)); }
void RankRoll::note_idle() { note("idle"); }
void RankRoll::note_stopped() { note("stop"); }
void RankRoll::note_told() { note("told"); }
void RankRoll::note_end(const std::string& last_word) { note("end " + last_word); }

bool RankRoll::claim(const std::string& what) {
  const int fd = ::open((directory_ / what).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  WEFT_CHECK(fd >= 0 || errno == EEXIST, Exit::data, "is the disk full? see generate.output",
             "cannot write {}: {}", (directory_ / what).string(), std::strerror(errno));
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

void RankRoll::watch(std::vector<int> others, std::function<void(int)> then) {
  const std::lock_guard lock(mutex_);
  watched_ = std::move(others);
  then_ = std::move(then);
}

std::vector<int> RankRoll::neighbour() const {
  if (ranks_ == 1) return {};
  return {(rank_ + 1) % ranks_};
}

void RankRoll::wait_for_ends() {
  for (int r = 0; r < ranks_; ++r)
    while (r != rank_ && state(r).end.empty() && !lost(r)) pause();
}

void RankRoll::pause() const {
  std::this_thread::sleep_for(std::chrono::milliseconds(std::clamp(ranks_ * ranks_ / 4, 20, 5000)));
}

std::vector<LeftPlace> left_places(const std::vector<RollEntry>& states,
                                   const std::vector<bool>& lost, std::int64_t items, bool queued,
                                   const std::function<bool(int, std::int64_t)>& settled) {
  // A lost rank may have taken one without saying so any more; where none is lost, the queue has given out all.
  const bool any = !queued || std::find(lost.begin(), lost.end(), true) != lost.end();
  std::vector<LeftPlace> places(static_cast<std::size_t>(items), {0, any});
  for (std::size_t r = 0; r < states.size(); ++r)
    for (const std::int64_t place : states[r].taken) {
      LeftPlace& p = places.at(static_cast<std::size_t>(place));
      if (lost[r] && !settled(static_cast<int>(r), place))
        ++p.losses;
      else
        p.open = false;
    }
  return places;
}

}  // namespace weft
