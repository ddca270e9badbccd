// Watches a communicator's operations from a separate thread: an operation that fails or hangs
// becomes, on every rank, an error that names the late ranks.
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "parallel/hang_report.h"

namespace weft {

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
  // no step: then only operations are watched. "save" may take ten times the limit.
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
  std::thread thread_;
};

}  // namespace weft
