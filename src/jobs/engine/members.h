// Liveness and reports of a job's ranks: one file a rank, DIR/N, which the rank keeps locked while
// it lives and to which it appends a line for each of its actions. The kernel releases the lock
// when the process ends, in whatever way (a network file system when the node is gone), so no
// timeout is needed. Works beside MPI, which cannot go on without a rank: everything here uses
// files only.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace weft {

// What a member's file says.
struct MemberState {
  std::set<std::int64_t> taken;       // places of the queue, in hand and done
  std::set<std::int64_t> begun;       // those of them that it has worked on
  std::set<std::int64_t> resolved;    // items that it failed at, or found resolved by a failed rank
  std::vector<std::string> failures;  // "NAME: why"
  std::string host, summary;          // where it runs; its last report, empty before
  bool idle = false;                  // found nothing to take, and has nothing in hand
  bool stopped = false;               // was asked to stop
  std::optional<int> code;            // the job's exit code, from the coordinator
};

class Members {
 public:
  // Collective. Makes DIR anew. Exit::data, with `key` of the deck in the hint, if ranks cannot
  // write there or do not share it. Warns if locks of other ranks are not visible: a failed rank
  // then goes unnoticed.
  Members(std::filesystem::path directory, const std::string& key, MPI_Comm world);
  // Collective, and removes DIR. During stack unwinding it only notes that this rank has left, so
  // that it does not count as failed.
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  const std::filesystem::path& directory() const { return directory_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // Whether that rank's process ended without running the destructor. Once true, stays true.
  // Thread-safe.
  bool failed(int rank);
  MemberState state(int rank) const;

  // One line each in this rank's file, which all nodes see on return. Thread-safe.
  // `count` places: place, place + stride, ... A single one counts as begun at once; of several,
  // each is noted when it is begun.
  void note_taken(std::int64_t place, std::int64_t count = 1, std::int64_t stride = 1);
  void note_dropped(std::int64_t place, std::int64_t count = 1, std::int64_t stride = 1);
  void note_begun(std::int64_t place);
  void note_failed(std::int64_t item, const std::string& why);
  void note_resolved(std::int64_t item);
  void note_idle();
  void note_stopped();
  void note_summary(const std::string& summary);
  void note_code(int code);
  // True for exactly one of the ranks that claim `what`, a file name.
  bool claim(const std::string& what);

  // From now on a thread checks every second whether one of `others` has failed, and then calls
  // `then` once. Empty: stops watching.
  void watch(std::vector<int> others, std::function<void(int rank)> then);
  // The next rank of a ring: if each watches it, no failure goes unseen.
  std::vector<int> neighbour() const;
  // Sleeps between two checks of the others: longer with more ranks, as they share a file system.
  void pause() const;
  // Waits until every rank has noted its summary or has failed.
  void wait_for_summaries();

 private:
  std::filesystem::path file(int rank) const;
  bool locked(int rank) const;
  void note(std::string line, bool flush = true);
  void look_at_watched();

  std::filesystem::path directory_;
  std::string key_;
  MPI_Comm world_;
  int rank_ = 0, ranks_ = 1, fd_ = -1;
  bool locks_visible_ = false, flush_ = true;
  std::mutex mutex_;  // of what follows
  std::set<int> failed_;
  std::vector<int> watched_;
  std::function<void(int)> then_;
  std::jthread thread_;
};

}  // namespace weft
