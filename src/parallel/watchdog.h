// Watches the operations of a communicator from a thread of its own: an operation that fails or hangs becomes an error that
// names the ranks that are late, on every rank.
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

namespace weft {

class Watchdog {
 public:
  // The operation that this rank is in: begun, not done.
  struct Operation {
    std::uint64_t number = 0;  // the same on every rank, and growing
    std::string name;          // "all-reduce 12 (f32, 64.000 MiB)"
    double seconds = 0;        // since it could begin on this rank
  };
  // Called from the watchdog's thread. `look` says what goes on, and throws where the transport reports an error.
  // `stop` ends what is under way, so that no thread of this rank stays blocked.
  using Look = std::function<std::optional<Operation>()>;
  using Stop = std::function<void()>;

  // Collective: duplicates `world`. Timeout as in communicator.h.
  Watchdog(MPI_Comm world, double timeout_seconds, Look look, Stop stop);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // The number of the last operation that this rank has issued, and of the last that has begun: told to the ranks that ask.
  void issued(std::uint64_t number) { issued_ = number; }
  void begun(std::uint64_t number) { begun_ = number; }
  // Takes note of a failure, and runs `stop`. The first failure counts.
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
  struct Answer {
    bool given = false;
    std::uint64_t issued = 0, begun = 0;
  };

  void run();
  void speak_up();
  void serve();
  void receive(int source, int tag, std::vector<char> bytes);
  void send(int target, int tag, std::vector<char> bytes);
  void report(const Operation& o);
  std::string late_ranks(std::uint64_t operation);
  void hang(const std::string& what);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  double timeout_;
  Look look_;
  Stop stop_;
  std::vector<std::string> hosts_;  // of all ranks, on rank 0
  std::atomic<std::uint64_t> issued_ = 0, begun_ = 0;
  std::atomic<bool> failed_ = false, seen_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::exception_ptr failure_;
  double failed_at_ = 0;
  // The thread's own.
  std::list<Message> sent_;
  std::vector<Answer> answers_;  // rank 0, to its last question
  bool spoken_ = false;
  std::optional<Operation> alarm_;  // rank 0: what another rank is stuck in
  std::thread thread_;
};

}  // namespace weft
