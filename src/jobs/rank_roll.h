// Which ranks of a job are there, and which batches of clips each has in hand: a file a rank, DIR/N, that its rank keeps
// locked for as long as it lives and to which it adds a line for all that it does. The kernel lifts the lock when the process
// is gone, however it went (a network file system does when its node is gone), so nobody judges by a clock. Stands beside
// MPI, which cannot go on with a rank that is gone: what is asked here is answered by files alone.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace weft {

// What a rank's file says.
struct RollEntry {
  std::vector<std::int64_t> taken;  // places in the job's order, those in hand and those finished
  std::set<std::int64_t>
      settled;  // clips that it failed at, or found settled by a rank that was lost
  std::vector<std::string> failures;
  std::string host, end;  // where it runs; its last word (note_end), empty before
  bool idle = false;      // has nothing in hand, and found nothing to take
  bool stopped = false;   // was asked to stop
  bool told = false;      // has spoken for all (note_told)
};

class RankRoll {
 public:
  // Collective. Makes DIR anew: Exit::data where ranks cannot write there, or do not share it. Where they do not see each
  // other's locks, a warning: a rank that is lost then is not noticed.
  RankRoll(std::filesystem::path directory, MPI_Comm world);
  // Collective, unless on the way of an exception, which is no loss to others either. Removes DIR.
  ~RankRoll();
  RankRoll(const RankRoll&) = delete;
  RankRoll& operator=(const RankRoll&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // Whether that rank's process has gone without having left by the destructor. Once lost is lost. Thread-safe.
  bool lost(int rank);
  RollEntry state(int rank) const;

  // A line each in this rank's file. Thread-safe.
  void note_taken(std::int64_t place);
  void note_dropped(std::int64_t place);  // somebody else has it
  void note_failed(std::int64_t clip, const std::string& why);
  void note_settled(std::int64_t clip);  // by a rank that was lost: not to be made here
  void note_idle();
  void note_stopped();
  void note_end(const std::string& last_word);  // no line breaks
  void note_told();                             // what is to be said for all is said and written
  // True for one rank alone of all that claim `what`, a file name. Exit::data where it cannot be written.
  bool claim(const std::string& what);

  // From now on a thread looks every second whether one of `others` is lost, and calls `then` with it, once. Empty: no more.
  void watch(std::vector<int> others, std::function<void(int rank)> then);
  // The next rank in a ring: if each watches it, no loss stays unseen.
  std::vector<int> neighbour() const;
  // Sleeps between two looks at the others: longer with more ranks, whose looks cost the file system they share.
  void pause() const;
  // Until every rank has noted its end or is lost.
  void wait_for_ends();

 private:
  std::filesystem::path file(int rank) const;
  bool locked(int rank) const;
  void note(const std::string& line);

  std::filesystem::path directory_;
  MPI_Comm world_;
  int rank_ = 0, ranks_ = 1, fd_ = -1;
  bool seen_by_all_ = false;  // locks
  std::mutex mutex_;          // of what follows
  std::set<int> lost_;
  std::vector<int> watched_;
  std::function<void(int)> then_;
  std::jthread thread_;
};

// How many ranks have been lost with that place in hand, and whether it is still to be made: by nobody who is there, nor
// settled. Two are enough: a clip may be what they were lost by.
struct LeftPlace {
  int losses = 0;
  bool open = false;
};
constexpr int most_losses = 2;
// The same for all places 0 ... items - 1, from all ranks' states. `queued`: a queue has given them all out. `settled`:
// whether a rank that is lost has finished or failed all clips of that place.
std::vector<LeftPlace> left_places(
    const std::vector<RollEntry>& states, const std::vector<bool>& lost, std::int64_t items,
    bool queued, const std::function<bool(int rank, std::int64_t place)>& settled);

}  // namespace weft
