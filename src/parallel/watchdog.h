// Hangs: a watchdog on every rank that notices one, and the report of it, as seen by all ranks: its
// cause in one line, and a table with one line per rank.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tensor/dtype.h"

namespace weft {

// A collective, described alike on every rank.
struct Collective {
  const char* kind = "";  // "all-reduce", "reduce-scatter", "all-gather", "all-to-all": a literal
  DType dtype = DType::f32;
  std::uint64_t bytes = 0;  // of the whole operation, the same on every rank
};

// A lock-free ring: the caller's thread issues, another may begin and complete, a third reads.
class FlightRecord {
 public:
  // Holds one step's collectives of a large model; older entries are overwritten.
  static constexpr std::size_t length = 256;

  // A copy that can be sent to another rank.
  struct Entry {
    std::uint64_t number = 0, bytes = 0;
    std::array<char, 16> kind{};
    DType dtype = DType::f32;

    bool same_as(const Entry& other) const {
      return kind == other.kind && dtype == other.dtype && bytes == other.bytes;
    }
    std::string describe() const;  // "all-reduce (f32, 64.000 MiB)"
  };

  // Numbers count from 1; 0 restarts the count.
  void issued(std::uint64_t number, const Collective& what);
  void begun(std::uint64_t number) { begun_.store(number); }
  // By two threads: the one that issues ends some operations itself (Communicator::split).
  void completed(std::uint64_t number) {
    std::uint64_t last = completed_.load();
    while (last < number && !completed_.compare_exchange_weak(last, number)) {
    }
  }

  std::uint64_t last_issued() const { return issued_.load(); }
  std::uint64_t last_begun() const { return begun_.load(); }
  std::uint64_t last_completed() const { return completed_.load(); }
  // The entries still held, oldest first. Entries overwritten meanwhile are left out.
  std::vector<Entry> entries() const;

 private:
  struct Slot {
    std::atomic<std::uint64_t> number = 0;  // 0: being written
    std::atomic<std::uint64_t> bytes = 0;
    std::atomic<const char*> kind = "";
    std::atomic<DType> dtype = DType::f32;
  };
  std::array<Slot, length> slots_;
  std::atomic<std::uint64_t> issued_ = 0, begun_ = 0, completed_ = 0;
};

// One rank's progress, as its watchdog's thread reports it.
struct RankState {
  bool answers = false;
  bool stalled = false;   // in a step, and nothing moved for the timeout
  std::int64_t step = 0;  // from 0, where there is a phase; messages count from 1
  std::string phase;      // empty: in no step
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;
  std::vector<FlightRecord::Entry> records;
  bool on_storage = false;  // in a phase that reads or writes, and not stalled

  std::vector<char> to_bytes() const;
  static RankState from_bytes(std::span<const char> bytes);  // answers
};

struct RankName {
  int rank = 0;
  std::string host;
};

// "COMPLAINT; late: rank 3 on n14 (has not issued it)", then the table. If the ranks' records
// differ, that comes first. `complaint` comes from the rank that noticed the hang, without a full
// stop. States and names are in order of rank.
std::string hang_report(const std::string& complaint, std::span<const RankState> states,
                        std::span<const RankName> names);

// Watches a communicator's operations from a separate thread: an operation that fails or hangs
// becomes, on every rank, an error that names the late ranks.

class Watchdog {
 public:
  using Collective = weft::Collective;
  // The operation in progress on this rank: begun, not completed.
  struct Operation {
    std::uint64_t number = 0;  // the same on every rank, and growing
    std::string name;          // "all-reduce 12 (f32, 64.000 MiB)"
    double seconds = 0;        // since it could begin on this rank
  };
  // Called from the watchdog's thread. `look` returns the operation in progress, and throws if the
  // transport reports an error. `stop` ends the operations in progress, so that no thread of this
  // rank stays blocked.
  using Look = std::function<std::optional<Operation>()>;
  using Stop = std::function<void()>;

  // Collective: duplicates `world`. Timeout as in communicator.h.
  Watchdog(MPI_Comm world, double timeout_seconds, Look look, Stop stop);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // This rank's progress, sent to the ranks that ask. Numbers count from 1. Callable from any
  // thread; never blocks.
  void issued(std::uint64_t number, const Collective& what);
  void begun(std::uint64_t number);
  void completed(std::uint64_t number);
  // As Communicator::progress and set_timeout. A phase of null or "idle" means that this rank is in
  // no step: then only operations are watched. "data", "measuring", "save", "validation" and
  // "samples" may take ten times the limit, and ranks that wait for one in them are as patient.
  void progress(std::int64_t step, const char* phase);
  void set_timeout(double seconds);
  // Reports a fault that only the records of all ranks can explain, such as a message of another
  // collective: the ranks are asked as for a hang.
  void suspect(const std::string& what);
  // Records a failure and runs `stop`. The first failure counts.
  void fail(std::exception_ptr failure);
  bool failed() const { return failed_; }
  // Throws the failure, if there is one.
  void check();
  double timeout() const { return timeout_; }

 private:
  struct Message {
    std::vector<char> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  void run();
  void end_if_unheard();
  void serve();
  void receive(int source, int tag, std::vector<char> bytes);
  void send(int target, int tag, std::vector<char> bytes);
  bool serve_until(const std::function<bool()>& done, double seconds);
  double stalled_beyond(double share) const;
  RankState state() const;
  void report(const std::string& complaint);
  void collect(const std::string& complaint);
  bool waits_for_storage();

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  bool fixed_timeout_;  // by the environment
  std::atomic<double> timeout_;
  // For tests: seconds to wait for answers, where a stalled host would look like a rank that does
  // not answer.
  std::optional<double> fixed_grace_;
  Look look_;
  Stop stop_;
  std::vector<RankName> names_;
  FlightRecord record_;
  std::atomic<std::int64_t> step_ = 0;
  std::atomic<const char*> phase_ = nullptr;            // null: in no step
  std::atomic<double> phase_since_ = 0, moved_at_ = 0;  // moved: an operation began or ended
  std::atomic<bool> failed_ = false, seen_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::exception_ptr failure_;
  double failed_at_ = 0;
  std::string suspicion_;
  // Used by the watchdog's thread only.
  std::list<Message> sent_;
  std::vector<RankState> answers_;    // to this rank's last question
  std::optional<std::string> alarm_;  // another rank's complaint, sent to this one
  double quiet_until_ = 0;            // till then nothing is reported
  bool storage_told_ = false;
  std::thread thread_;
};

}  // namespace weft
