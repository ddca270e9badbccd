// Hangs: a watchdog on every rank that notices one, and the report of it: who is late, in what and
// since when, in one line, and a table with one line per rank.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/phase.h"
#include "tensor/dtype.h"

namespace weft {

enum class CollectiveKind : std::uint32_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  split,
  start_of_nccl
};

// A collective, described alike on every rank.
struct Collective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  DType dtype = DType::f32;
  std::uint64_t bytes = 0;  // of the whole operation, the same on every rank; all-to-all: 0

  bool operator==(const Collective&) const = default;
  const char* name() const;      // "all-reduce"
  std::string describe() const;  // "all-reduce (f32, 64.000 MiB)"
  // The same with a number, which counts from 1: "all-reduce 12 (f32, 64.000 MiB)".
  std::string describe(std::uint64_t number) const;
};

// A text inside a message; what does not fit is cut off.
template <std::size_t length>
struct ShortText {
  std::array<char, length> chars{};

  ShortText() = default;
  ShortText(std::string_view text) { text.copy(chars.data(), length - 1); }
  std::string_view view() const { return chars.data(); }
  bool empty() const { return chars[0] == '\0'; }
};

// What a rank does, as its watchdog sends it.
struct RankState {
  int rank = 0;  // in MPI_COMM_WORLD, which users know
  ShortText<60> host;
  bool answers = false;     // its state is a recent one
  bool stalled = false;     // in a step, and nothing moved for the timeout
  bool on_storage = false;  // in a phase that reads or writes, and not stalled
  std::int64_t step = 0;    // from 0, where there is a phase; messages count from 1
  Phase phase = Phase::none;
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;  // collectives
  Collective pending;        // number completed + 1, where issued > completed
  ShortText<200> complaint;  // why the job hangs; empty: it does not, as far as this rank knows
};

// "COMPLAINT; late: rank 3 on n14 (has not issued it)", then the table. If the pending collective
// is not the same everywhere, that comes first. `complaint` is without a full stop. States are in
// order of rank.
std::string hang_report(const std::string& complaint, std::span<const RankState> states);

// Watches a communicator's operations from a separate thread: an operation that fails or hangs
// becomes, on every rank, an error that names the late ranks.
class Watchdog {
 public:
  // The operation in progress on this rank: begun, not completed.
  struct Operation {
    std::uint64_t number = 0;  // the same on every rank, and growing
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

  // This rank's progress. Numbers count from 1. Callable from any thread.
  void issued(std::uint64_t number, const Collective& what);
  void begun(std::uint64_t number);
  void completed(std::uint64_t number);
  void count_from_one();  // what was issued is done, and the next collective is number 1 again
  // As Communicator::progress and set_timeout. Ranks that wait for one on storage are as patient as
  // that one may be.
  void progress(std::int64_t step, Phase phase);
  void set_timeout(double seconds);
  // Reports a fault that only the states of all ranks can explain, such as a message of another
  // collective, as a hang, without waiting for the limit.
  void suspect(const std::string& what);
  // Records a failure and runs `stop`. The first failure counts.
  void fail(std::exception_ptr failure);
  bool failed() const { return failed_; }
  // Throws the failure, if there is one.
  void check();
  double timeout() const { return timeout_; }

 private:
  // From this rank to one that judges, one message at a time.
  struct Message {
    int target = 0;
    RankState state;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  void run();
  void watch();
  void receive();
  void send_state();
  void judge();
  bool waits_for_storage();
  void be_patient();
  RankState own_state();
  void report(const std::string& complaint);
  void end_if_unheard();
  double stalled_beyond(double share) const;
  void describe_state(const std::optional<Operation>& operation);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  bool fixed_timeout_;  // by the environment
  std::atomic<double> timeout_;
  // For tests: seconds to wait for states, where a stalled host would look like a rank that does
  // not answer.
  std::optional<double> fixed_grace_;
  Look look_;
  Stop stop_;
  std::atomic<bool> failed_ = false, seen_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  // Under the mutex.
  bool ending_ = false;
  std::exception_ptr failure_;
  double failed_at_ = 0;
  std::string suspicion_;
  RankState own_;
  std::deque<Collective> pending_;         // issued, not completed
  double phase_since_ = 0, moved_at_ = 0;  // moved: an operation began or ended
  // Used by the watchdog's thread only.
  std::vector<RankState> states_;  // where this rank judges: the last of every rank
  std::vector<double> heard_at_;
  std::vector<Message> messages_;
  double looked_at_ = 0, sent_at_ = 0;
  double complained_at_ = 0;  // since when some rank complains; 0: none does
  double quiet_until_ = 0;    // till then nothing is reported
  bool storage_told_ = false;
  std::thread thread_;
};

}  // namespace weft
