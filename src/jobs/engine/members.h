// Liveness of a job's ranks, and what each has reported: one file a rank, DIR/N, which its rank
// keeps locked while it lives and appends a line to for all that it does. The kernel lifts the lock
// when the process is gone, however it ended (a network file system does when the node is gone), so
// no clock decides. Works beside MPI, which cannot go on without a rank: everything here is
// answered by files.
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
  std::set<std::int64_t> begun;       // of those the ones that it has worked on
  std::set<std::int64_t> resolved;    // items that it failed at, or found resolved by a failed rank
  std::vector<std::string> failures;  // "NAME: why"
  std::string host, summary;          // where it runs; its last report, empty before
  bool idle = false;                  // found nothing to take, and has nothing in hand
  bool stopped = false;               // was asked to stop
  std::optional<int> code;            // the job's exit code, from the coordinator
};

class Members {
 public:
  // Collective. Makes DIR anew. Exit::data, with `key` of the deck in the hint, where ranks cannot
  // write there or do not share it. Where locks of other ranks cannot be seen, a warning: a failed
  // rank goes unnoticed.
  Members(std::filesystem::path directory, const std::string& key, MPI_Comm world);
  // Collective, and removes DIR; not during stack unwinding, where others must not take this rank
  // for failed.
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  const std::filesystem::path& directory() const { return directory_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // Whether that rank's process is gone without having run the destructor. Never taken back.
  // Thread-safe.
  bool failed(int rank);
  MemberState state(int rank) const;

  // One line each in this rank's file, which all nodes see on return. Thread-safe. Exit::data where
  // it cannot be written.
  // Places place, place + stride, ..., `count` of them. One alone is begun at once, of several each
  // is noted as it is begun.
  void note_taken(std::int64_t place, std::int64_t count = 1, std::int64_t stride = 1);
  void note_dropped(std::int64_t place, std::int64_t count = 1, std::int64_t stride = 1);
  void note_begun(std::int64_t place);
  void note_failed(std::int64_t item, const std::string& why);
  void note_resolved(std::int64_t item);
  void note_idle();
  void note_stopped();
  void note_summary(const std::string& summary);
  void note_code(int code);
  // True for one rank alone of all that claim `what`, a file name.
  bool claim(const std::string& what);

  // From now on a thread looks every second whether one of `others` has failed, and calls `then`
  // once. Empty: no more.
  void watch(std::vector<int> others, std::function<void(int rank)> then);
  // The next rank of a ring: if each watches it, no failure goes unseen.
  std::vector<int> neighbour() const;
  // Sleeps between two looks at the others: longer with more ranks, which share a file system.
  void pause() const;
  // Exit::data if the folder was removed or renamed: nobody would hear of anybody. The thread that
  // watches looks too, and ends the job.
  void check_folder() const;
  // Until every rank has noted its summary or has failed.
  void wait_for_summaries();

 private:
  std::filesystem::path file(int rank) const;
  bool locked(int rank) const;
  void note(std::string line, bool flush = true);
  void note_left();
  void look_at_folder();
  void look_at_watched();

  std::filesystem::path directory_;
  std::string key_;
  MPI_Comm world_;
  int rank_ = 0, ranks_ = 1, fd_ = -1;
  bool locks_visible_ = false, flush_ = true;
  std::mutex mutex_;  // of what follows
  bool leaving_ = false;
  std::set<int> failed_;
  std::vector<int> watched_;
  std::function<void(int)> then_;
  std::jthread thread_;
};

}  // namespace weft
