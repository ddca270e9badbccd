// The NCCL side of the communicator. Operations go to a stream of high priority, behind an event of the compute stream; a
// ticket is an event of that stream, for which the compute stream waits. The host waits for nothing.
//
// NCCL's communicator is a blocking one, made by a thread of its own that can be given up: a non-blocking one would start a
// thread for each operation, and could not be recorded in a graph by the thread that calls it. What blocks inside NCCL, a
// first connection to a rank that never comes, is ended by ncclCommAbort.
#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/clock.h"
#include "core/device_cuda.h"
#include "core/error.h"
#include "parallel/communicator.h"
#include "parallel/watchdog.h"

namespace weft {
namespace {

void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line) {
  if (result == ncclSuccess) return;
  const char* last = ncclGetLastError(comm);
  throw Error(
      Exit::hardware,
      fmt::format("NCCL: {} in {}{}{}", ncclGetErrorString(result), call,
                  last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
      "run again with NCCL_DEBUG=INFO; weft doctor checks GPUs and network", __FILE__, line);
}
#define NCCL_CHECK(call) check_nccl((call), nullptr, #call, __LINE__)

// What the thread that makes the communicator shares with the one that waits for it; it may outlive both.
struct Start {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, given_up = false;
  ncclComm_t comm = nullptr;
  std::exception_ptr failure;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(MPI_Comm world, double timeout_seconds) {
    int provided = 0;
    MPI_Query_thread(&provided);
    WEFT_CHECK(provided == MPI_THREAD_MULTIPLE, Exit::usage,
               "use an MPI that was built with thread support",
               "this MPI provides thread level {}, weft needs MPI_THREAD_MULTIPLE", provided);
    WEFT_ASSERT(on_cuda());
    MPI_Comm_rank(world, &rank_);
    MPI_Comm_size(world, &size_);
    watchdog_.emplace(
        world, timeout_seconds, [this] { return look(); }, [this] { abort(); });
    try {
      start(world);
    } catch (...) {
      watchdog_.reset();  // its thread must not look at what is being taken apart
      throw;
    }
  }

  ~NcclCommunicator() override {
    // With operations outstanding this rank is on its way out with an error, and the others may never join them.
    const bool healthy = !watchdog_->failed() && std::uncaught_exceptions() == 0;
    if (!healthy) watchdog_->fail(std::make_exception_ptr(Error(Exit::hang, "given up")));
    watchdog_.reset();
    if (!healthy) return;
    if (!operations_.empty()) device_runtime().synchronize(operations_.back().done);
    ncclCommDestroy(comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool capturable() const override { return true; }
  void check() override { watchdog_->check(); }
  double busy_seconds() const override {
    const std::lock_guard lock(mutex_);
    return busy_;
  }
  std::string describe() const override {
    int v = 0;
    NCCL_CHECK(ncclGetVersion(&v));
    return fmt::format("NCCL {}.{}.{}", v / 10000, v % 10000 / 100, v % 100);
  }

  using Communicator::all_reduce_sum;
  Ticket all_reduce_sum(Tensor t) override {
    WEFT_ASSERT(t.device() == DeviceKind::cuda);
    WEFT_ASSERT(t.dtype() == DType::f32 || t.dtype() == DType::f64);
    check();
    DeviceRuntime& device = device_runtime();
    const bool recording = being_recorded();
    Operation o;
    o.number = number_;
    if (!recording) {
      o.number = ++number_;
      watchdog_->issued(o.number);
    }
    o.name = fmt::format("all-reduce {} of step {} ({}, {:.3f} MiB)", o.number % step_numbers,
                         o.number / step_numbers + 1, name_of(t.dtype()),
                         static_cast<double>(t.bytes()) / (1 << 20));
    device.wait(Stream::communication, device.record(Stream::compute));
    if (!recording) o.begin = device.record(Stream::communication);
    enter(o);
    const ncclResult_t result = [&] {
      const std::lock_guard calling(call_mutex_);
      if (watchdog_->failed()) return ncclSuccess;  // check() below says so
      return ncclAllReduce(t.raw(), t.raw(), static_cast<std::size_t>(t.numel()),
                           t.dtype() == DType::f32 ? ncclFloat32 : ncclFloat64, ncclSum, comm_,
                           cuda_stream(Stream::communication));
    }();
    leave();
    check();
    check_nccl(result, comm_, "ncclAllReduce", __LINE__);
    o.done = device.record(Stream::communication);
    o.tensor = std::move(t);
    o.ticket = ++tickets_;
    const Ticket ticket = o.ticket;
    if (recording)
      recorded_[ticket] = o.done;
    else
      push(std::move(o));
    return ticket;
  }

  double wait(Ticket ticket) override {
    check();
    WEFT_ASSERT(ticket <= tickets_);
    DeviceEvent done;
    if (const auto it = recorded_.find(ticket); it != recorded_.end()) {
      done = it->second;
    } else {
      const std::lock_guard lock(mutex_);
      for (const Operation& o : operations_)
        if (o.ticket == ticket) done = o.done;
    }
    // One that is known to be finished needs no order any more.
    if (done) device_runtime().wait(Stream::compute, done);
    return 0;
  }

  // Operations inside a graph are issued by nobody: the operations of a step count as its part, and its end brings all ranks
  // to the same number.
  void replayed() override {
    check();
    recorded_.clear();
    Operation o;
    o.number = number_ = (number_ / step_numbers + 1) * step_numbers;
    o.name = fmt::format("the work of step {} with its all-reduces", o.number / step_numbers);
    watchdog_->issued(o.number);
    o.done = device_runtime().record(Stream::compute);
    push(std::move(o));
  }

 private:
  static constexpr std::uint64_t step_numbers = std::uint64_t{1} << 20;

  struct Operation {
    Ticket ticket = 0;  // 0: a step's recorded work
    std::uint64_t number = 0;
    std::string name;
    DeviceEvent begin,
        done;  // begin: its data is ready and the operations before it are done; null: when those are done
    Tensor tensor;  // its memory stays until it is done
    double began = 0;
    bool finished = false;
  };

  static bool being_recorded() {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(cuda_stream(Stream::compute), &status));
    return status != cudaStreamCaptureStatusNone;
  }

  // The caller's thread takes finished operations away: their tensors may be of an arena, which belongs to its thread.
  void push(Operation o) {
    const std::lock_guard lock(mutex_);
    while (!operations_.empty() && operations_.front().finished) operations_.pop_front();
    operations_.push_back(std::move(o));
  }

  // While this rank is inside a call of NCCL, which may block at its first use of a connection.
  void enter(const Operation& o) {
    const std::lock_guard lock(mutex_);
    calling_ = Watchdog::Operation{o.number, o.name, 0};
    called_at_ = now_seconds();
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    calling_.reset();
  }

  // Makes comm_, all ranks together, or throws once the watchdog says that somebody does not come.
  void start(MPI_Comm world) {
    Operation o;
    o.number = 1;
    o.name = "the start of NCCL";
    enter(o);
    watchdog_->issued(1);
    watchdog_->begun(1);
    ncclUniqueId id{};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, world);
    const auto shared = std::make_shared<Start>();
    start_ = shared;
    std::thread([shared, id, rank = rank_, size = size_, gpu = this_device().index] {
      ncclComm_t comm = nullptr;
      std::exception_ptr failure;
      try {
        CUDA_CHECK(cudaSetDevice(gpu));
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 1;
        NCCL_CHECK(ncclCommInitRankConfig(&comm, size, id, rank, &config));
      } catch (...) {
        failure = std::current_exception();
      }
      const std::lock_guard lock(shared->mutex);
      if (shared->given_up) return;
      shared->done = true;
      shared->comm = comm;
      shared->failure = failure;
      shared->changed.notify_all();
    }).detach();
    {
      std::unique_lock lock(shared->mutex);
      shared->changed.wait(lock, [&] { return shared->done || shared->given_up; });
    }
    check();
    if (shared->failure) std::rethrow_exception(shared->failure);
    {
      const std::lock_guard lock(mutex_);
      comm_ = shared->comm;
    }
    leave();
    watchdog_->issued(0);  // and all-reduces are counted from 1
    watchdog_->begun(0);
  }

  // From the watchdog's thread: what goes on. Events are asked only of work that really runs, never of what is recorded.
  std::optional<Watchdog::Operation> look() {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) {
      ncclResult_t state = ncclSuccess;
      NCCL_CHECK(ncclCommGetAsyncError(comm_, &state));
      if (state != ncclInProgress) check_nccl(state, comm_, "an operation under way", __LINE__);
    }
    DeviceRuntime& device = device_runtime();
    for (Operation& o : operations_) {
      if (o.finished) continue;
      if (o.began == 0 && (!o.begin || device.finished(o.begin))) {
        o.began = now_seconds();
        watchdog_->begun(o.number);
      }
      if (!device.finished(o.done)) {
        if (o.began != 0) return Watchdog::Operation{o.number, o.name, now_seconds() - o.began};
        break;
      }
      if (o.begin) busy_ += device.seconds(o.begin, o.done);
      o.finished = true;
    }
    if (!calling_) return std::nullopt;
    Watchdog::Operation o = *calling_;
    o.seconds = now_seconds() - called_at_;
    return o;
  }

  // Ends what is under way. A thread that is inside NCCL is given a moment to come out by itself; if it does not, the abort
  // is what brings it out.
  void abort() {
    if (const auto start = start_.lock()) {
      const std::lock_guard lock(start->mutex);
      start->given_up = !start->done;
      start->changed.notify_all();
    }
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex_);
      comm = comm_;
      comm_ = nullptr;
    }
    if (comm == nullptr) return;
    std::unique_lock calling(call_mutex_, std::defer_lock);
    (void)calling.try_lock_for(std::chrono::seconds(1));
    ncclCommAbort(comm);
  }

  int rank_ = 0, size_ = 1;
  // The caller's thread alone.
  std::uint64_t number_ = 0;
  Ticket tickets_ = 0;
  std::map<Ticket, DeviceEvent> recorded_;  // of the recording that goes on
  // Shared with the watchdog's thread.
  mutable std::mutex mutex_;
  std::timed_mutex call_mutex_;  // held inside NCCL
  ncclComm_t comm_ = nullptr;
  std::weak_ptr<Start> start_;
  std::deque<Operation> operations_;
  std::optional<Watchdog::Operation> calling_;
  double called_at_ = 0;
  double busy_ = 0;
  std::optional<Watchdog> watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm world, double timeout_seconds) {
  return std::make_unique<NcclCommunicator>(world, timeout_seconds);
}

}  // namespace weft
