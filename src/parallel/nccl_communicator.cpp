// The NCCL communicator. Operations run on a stream of high priority, ordered after an event of the
// compute stream. A ticket is an event of that stream, and the compute stream waits for it. The
// host never waits.
//
// NCCL's own communicator is a blocking one, made by a separate thread that can be abandoned: a
// non-blocking one would start a thread for each operation. ncclCommAbort ends a call that blocks
// inside NCCL, such as a first connection to a rank that never comes.
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "core/trace.h"
#include "parallel/communicator.h"
#include "parallel/nccl_collectives.h"
#include "parallel/watchdog.h"
#include "tensor/device_cuda.h"

#if NCCL_VERSION_CODE < 21801
#error "weft needs NCCL 2.18.1 or newer (ncclCommSplit); configure without NCCL to do without"
#endif

namespace weft {
namespace {

// Multiprocessors that an operation may take (NCCL: CTAs, of which each stays on one until the
// operation ends), for ncclConfig_t. By itself NCCL takes up to 32 of an H100's 132, and fewer do
// where computing goes on beside it: NVIDIA counts about 16 for all of NVLink's bandwidth, and a
// rank's network card needs less. What the environment says about CTAs or channels stays as it is.
int most_ctas() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? 0 : std::max(0, std::atoi(text));
  };
  if (value("NCCL_MAX_CTAS") > 0 || value("NCCL_MAX_NCHANNELS") > 0) return NCCL_CONFIG_UNDEF_INT;
  return std::max({16, value("NCCL_MIN_CTAS"), value("NCCL_MIN_NCHANNELS")});
}

// Memory that is registered with a communicator: NCCL sends from it and into it without a copy
// through buffers of its own, and with NVLink's switches lets them add. Shared by the communicator
// and the tensors, of which either may end first; used by one thread, that of the communicator's
// caller.
class RegisteredMemory : public std::enable_shared_from_this<RegisteredMemory> {
 public:
  explicit RegisteredMemory(ncclComm_t comm) : comm_(comm) {}

  Tensor tensor(const Shape& shape, DType dtype) {
#if NCCL_VERSION_CODE >= 21900
    const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
    if (bytes > 0)
      if (void* p = allocate(bytes))
        return Tensor::adopt(
            std::shared_ptr<void>(p, [self = shared_from_this()](void* q) { self->free(q); }),
            shape, dtype, DeviceKind::cuda);
#endif
    return Tensor::persistent(shape, dtype);
  }
  // The communicator is about to end.
  void end() noexcept {
    for (const auto& [p, handle] : handles_) deregister(handle);
    handles_.clear();
    comm_ = nullptr;
  }
  // It is aborted, with what is registered. From any thread.
  void abort() { aborted_ = true; }

 private:
  bool usable() const { return comm_ != nullptr && !aborted_; }
  void deregister(void* handle) noexcept {
#if NCCL_VERSION_CODE >= 21900
    if (usable()) (void)ncclCommDeregister(comm_, handle);
#endif
  }
#if NCCL_VERSION_CODE >= 21900
  // Null where NCCL has none: the caller takes ordinary memory, or says how much there is.
  void* allocate(std::size_t bytes) {
    void* p = nullptr;
    if (ncclMemAlloc(&p, bytes) != ncclSuccess) {
      throw_if_gpu_failed("ncclMemAlloc", __FILE__, __LINE__);
      cudaGetLastError();  // else the next call would report it again
      return nullptr;
    }
    device_runtime().zero(p, bytes, Stream::compute);
    void* handle = nullptr;
    if (usable() && ncclCommRegister(comm_, p, bytes, &handle) != ncclSuccess) {
      throw_if_gpu_failed("ncclCommRegister", __FILE__, __LINE__);
      cudaGetLastError();
      if (!std::exchange(warned_, true))
        log::warn(
            "NCCL cannot register the memory of weights and gradients, and copies through its own "
            "buffers ({})",
            ncclGetLastError(comm_));
    }
    if (handle != nullptr) handles_[p] = handle;
    return p;
  }
  void free(void* p) noexcept {
    // The job ends with an error: what NCCL may still use is left to the end of the process.
    if (aborted_) return;
    cudaSetDevice(gpu_);
    // Unlike cudaFree, ncclMemFree does not wait for work that still uses the memory.
    cudaDeviceSynchronize();
    if (const auto at = handles_.find(p); at != handles_.end()) {
      deregister(at->second);
      handles_.erase(at);
    }
    (void)ncclMemFree(p);
  }
  bool warned_ = false;
#endif
  const int gpu_ = this_device().index;
  ncclComm_t comm_;  // null: it has ended
  std::atomic<bool> aborted_ = false;
  std::map<void*, void*> handles_;  // by address
};

// Shared by the thread that makes the communicator and the one that waits for it; may outlive both.
struct Start {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, given_up = false;
  ncclComm_t comm = nullptr;
  std::exception_ptr failure;
};

class NcclCommunicator final : public Communicator {
 public:
  // `made`: NCCL's communicator, split off another; else one is made.
  NcclCommunicator(MPI_Comm world, double timeout_seconds, ncclComm_t made = nullptr) {
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
      if (made == nullptr) made = start(world);
      {
        const std::lock_guard lock(mutex_);
        comm_ = made;
        memory_ = std::make_shared<RegisteredMemory>(made);
      }
      collectives_.emplace(rank_, size_, Nodes(world), made, [this, made](int color, int key) {
        ncclComm_t const part = split_off(made, color, key);
        const std::lock_guard lock(mutex_);
        parts_.push_back(part);
        return part;
      });
    } catch (...) {
      watchdog_.reset();  // its thread must not look at members being destroyed
      throw;
    }
  }

  ~NcclCommunicator() override {
    // With operations outstanding this rank is terminating with an error, and the other ranks may
    // never join them.
    const bool healthy = !watchdog_->failed() && std::uncaught_exceptions() == 0;
    if (!healthy) watchdog_->fail(std::make_exception_ptr(Error(Exit::hang, "given up")));
    watchdog_.reset();
    if (aborted_.valid()) (void)aborted_.wait_for(std::chrono::seconds(5));
    if (!healthy) return;
    try {
      if (!operations_.empty()) device_runtime().synchronize(operations_.back().done);
    } catch (const Error& e) {  // what ran last on the GPU has failed, and nobody waited for it
      log::warn("{}", e.what());
      return;
    }
    operations_.clear();
    collectives_->end();
    memory_->end();
    ncclCommDestroy(comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void check() override { watchdog_->check(); }
  std::string describe() const override {
    int v = 0;
    NCCL_CHECK(ncclGetVersion(&v));
    return fmt::format("NCCL {}.{}.{}", v / 10000, v % 10000 / 100, v % 100);
  }

  void progress(std::int64_t step, Phase phase) override { watchdog_->progress(step, phase); }
  void set_timeout(double seconds) override { watchdog_->set_timeout(seconds); }

  using Communicator::all_reduce_sum;
  Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32 || t.dtype() == DType::f64);
    const DType travels =
        t.dtype() == DType::f32 && comm_dtype == CommDtype::bf16 ? DType::bf16 : t.dtype();
    return issue(CollectiveKind::all_reduce, travels, t, {},
                 [&] { collectives_->all_reduce(t, comm_dtype); });
  }
  Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32);
    return issue(CollectiveKind::reduce_scatter,
                 comm_dtype == CommDtype::bf16 ? DType::bf16 : DType::f32, t, {},
                 [&] { collectives_->reduce_scatter(t, comm_dtype); });
  }
  Ticket all_gather(Tensor t) override {
    return issue(CollectiveKind::all_gather, t.dtype(), t, {},
                 [&] { collectives_->all_gather(t); });
  }
  Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                    std::span<const std::int64_t> to_counts) override {
    WEFT_ASSERT(from.dtype() == to.dtype() && from.device() == DeviceKind::cuda);
    const auto fit = [&](std::span<const std::int64_t> counts, const Tensor& t) {
      return counts.size() == static_cast<std::size_t>(size_) &&
             std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == t.numel();
    };
    WEFT_ASSERT(fit(from_counts, from) && fit(to_counts, to));
    return issue(CollectiveKind::all_to_all, to.dtype(), to, from, [&] {
      collectives_->all_to_all(from, {from_counts.begin(), from_counts.end()}, to,
                               {to_counts.begin(), to_counts.end()});
    });
  }

  // An operation like others, so that the watchdog names a rank that never comes.
  std::unique_ptr<Communicator> split(MPI_Comm part, double timeout_seconds) override {
    check();
    Operation o;
    o.number = ++number_;
    watchdog_->issued(o.number, {CollectiveKind::split, DType::u8, 0});
    enter(o);
    watchdog_->begun(o.number);
    int color = rank_, key = 0;
    MPI_Bcast(&color, 1, MPI_INT, 0, part);
    MPI_Comm_rank(part, &key);
    const ncclComm_t made = split_off(collectives_->comm(), color, key);
    leave();
    watchdog_->completed(o.number);
    return std::make_unique<NcclCommunicator>(part, timeout_seconds, made);
  }
  Tensor persistent(const Shape& shape, DType dtype) override {
    return memory_->tensor(shape, dtype);
  }

  double wait(Ticket ticket) override {
    check();
    WEFT_ASSERT(ticket <= number_);
    DeviceEvent done;
    {
      const std::lock_guard lock(mutex_);
      for (const Operation& o : operations_)
        if (o.number == ticket) done = o.done;
    }
    // An operation known to be finished needs no ordering.
    if (done) device_runtime().wait(Stream::compute, done);
    return 0;
  }

 private:
  struct Operation {
    std::uint64_t number = 0;
    const char* name = "";
    DeviceEvent begin, done;  // begin: its data is ready and the operations before it are done
    Tensor to, from;          // their memory stays until it is done
    double began = 0;
    bool finished = false;
  };

  // Puts the work that `call` queues between two events of the communication stream.
  template <class Call>
  Ticket issue(CollectiveKind kind, DType comm_dtype, const Tensor& to, const Tensor& from,
               Call&& call) {
    WEFT_ASSERT(to.device() == DeviceKind::cuda);
    check();
    if (fault::at(fault::Place::collective, static_cast<std::int64_t>(number_ + 1))) return 0;
    DeviceRuntime& device = device_runtime();
    Operation o;
    o.number = ++number_;
    const std::size_t bytes = static_cast<std::size_t>(to.numel()) * size_of(comm_dtype);
    // What an all-to-all moves differs from rank to rank.
    const Collective what{kind, comm_dtype, from.defined() ? 0 : bytes};
    o.name = what.name();
    watchdog_->issued(o.number, what);
    device.wait(Stream::communication, device.record(Stream::compute));
    o.begin = device.record(Stream::communication);
    enter(o);
    std::exception_ptr failure;
    {
      // abort() waits for this lock, so that a call can return before the communicator is
      // destroyed.
      const std::lock_guard calling(call_mutex_);
      try {
        if (!watchdog_->failed()) call();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    leave();
    check();  // after an abort, the watchdog's reason is the better one
    if (failure) std::rethrow_exception(failure);
    o.done = device.record(Stream::communication);
    o.to = to;
    o.from = from;
    push(std::move(o));
    return number_;
  }

  // The caller's thread removes finished operations: their tensors may come from an arena, which
  // belongs to its thread.
  void push(Operation o) {
    const std::lock_guard lock(mutex_);
    while (!operations_.empty() && operations_.front().finished) operations_.pop_front();
    operations_.push_back(std::move(o));
  }

  // Mark the time inside an NCCL call, which may block when it first uses a connection.
  void enter(const Operation& o) {
    const std::lock_guard lock(mutex_);
    calling_ = Watchdog::Operation{o.number, 0};
    called_at_ = now_seconds();
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    calling_.reset();
  }

  // NCCL's communicator of all ranks.
  ncclComm_t start(MPI_Comm world) {
    Operation o;
    o.number = 1;
    watchdog_->issued(1, {CollectiveKind::start_of_nccl, DType::u8, 0});
    enter(o);
    watchdog_->begun(1);
    ncclUniqueId id{};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, world);
    const ncclComm_t made = made_together([id, rank = rank_, size = size_](ncclComm_t* comm) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;
      config.maxCTAs = most_ctas();
      config.splitShare = 1;
      return ncclCommInitRankConfig(comm, size, id, rank, &config);
    });
    leave();
    watchdog_->count_from_one();
    return made;
  }

  // The configuration is that of the whole, and resources are shared with it.
  ncclComm_t split_off(ncclComm_t whole, int color, int key) {
    return made_together([whole, color, key](ncclComm_t* part) {
      return ncclCommSplit(whole, color, key, part, nullptr);
    });
  }

  // What `make` makes together with other ranks, in a thread that can be abandoned; or throws once
  // the watchdog reports that a rank does not come.
  ncclComm_t made_together(std::function<ncclResult_t(ncclComm_t*)> make) {
    // abort() leaves the thread alone with the communicator: nothing else may hang on it.
    if (!operations_.empty()) device_runtime().synchronize(operations_.back().done);
    const auto shared = std::make_shared<Start>();
    {
      const std::lock_guard lock(mutex_);
      start_ = shared;
    }
    check();  // the watchdog may have given up before it could see `shared`
    std::thread([shared, gpu = gpu_, make = std::move(make)] {
      ncclComm_t comm = nullptr;
      std::exception_ptr failure;
      try {
        CUDA_CHECK(cudaSetDevice(gpu));
        NCCL_CHECK(make(&comm));
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
    return shared->comm;
  }

  // Called by the watchdog's thread: the operation in progress.
  std::optional<Watchdog::Operation> look() {
    const std::lock_guard lock(mutex_);
    const auto ask = [](ncclComm_t comm) {
      ncclResult_t state = ncclSuccess;
      NCCL_CHECK(ncclCommGetAsyncError(comm, &state));
      if (state != ncclInProgress) check_nccl(state, comm, "an operation under way", __LINE__);
    };
    if (comm_ != nullptr) {
      ask(comm_);
      for (ncclComm_t const part : parts_) ask(part);
    }
    DeviceRuntime& device = device_runtime();
    for (Operation& o : operations_) {
      if (o.finished) continue;
      if (o.began == 0 && device.finished(o.begin)) {
        o.began = now_seconds();
        watchdog_->begun(o.number);
      }
      if (!device.finished(o.done)) {
        if (o.began != 0) return Watchdog::Operation{o.number, now_seconds() - o.began};
        break;
      }
      o.finished = true;
      watchdog_->completed(o.number);
      if (trace::enabled) {
        // Only as exact as this thread's polling: the end is at most one of its periods late.
        const double now = now_seconds();
        trace::add({o.name, trace::Lane::communication, now - device.seconds(o.begin, o.done), now,
                    static_cast<std::int64_t>(o.to.bytes()), "bytes"});
      }
    }
    if (!calling_) return std::nullopt;
    Watchdog::Operation o = *calling_;
    o.seconds = now_seconds() - called_at_;
    return o;
  }

  // Ends the operations in progress. A thread inside NCCL gets a second to return by itself; if it
  // does not, the abort makes it return. The abort has a thread of its own: it has been seen to
  // block, and the watchdog must still be able to end the job.
  void abort() {
    std::shared_ptr<Start> start;
    std::shared_ptr<RegisteredMemory> memory;
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex_);
      start = start_.lock();
      memory = memory_;
      // Cleared under the lock, so that look() no longer uses it.
      comm = comm_;
      comm_ = nullptr;
    }
    if (memory) memory->abort();
    if (start) {
      const std::lock_guard lock(start->mutex);
      start->given_up = !start->done;
      start->changed.notify_all();
      // The thread that makes a communicator out of this one still uses it.
      if (start->given_up) return;
    }
    if (comm == nullptr) return;
    std::unique_lock calling(call_mutex_, std::defer_lock);
    (void)calling.try_lock_for(std::chrono::seconds(1));
    std::promise<void> done;
    aborted_ = done.get_future();
    std::thread([comm, gpu = gpu_, reached = std::move(done)]() mutable {
      // A new thread stands on GPU 0; a call there would make a context on another rank's GPU.
      if (cudaSetDevice(gpu) == cudaSuccess) ncclCommAbort(comm);
      reached.set_value();
    }).detach();
    (void)aborted_.wait_for(std::chrono::seconds(1));
  }

  int rank_ = 0, size_ = 1;
  const int gpu_ = this_device().index;
  // Used by the caller's thread only.
  std::uint64_t number_ = 0;
  std::optional<NcclCollectives> collectives_;
  // Shared with the watchdog's thread.
  mutable std::mutex mutex_;
  std::timed_mutex call_mutex_;  // held inside NCCL
  ncclComm_t comm_ = nullptr;
  std::vector<ncclComm_t> parts_;  // split off it by the collectives, which end them
  std::shared_ptr<RegisteredMemory> memory_;
  std::weak_ptr<Start> start_;
  std::deque<Operation> operations_;
  std::optional<Watchdog::Operation> calling_;
  std::future<void> aborted_;
  double called_at_ = 0;
  std::optional<Watchdog> watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm world, double timeout_seconds) {
  return std::make_unique<NcclCommunicator>(world, timeout_seconds);
}

}  // namespace weft
