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
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "core/parts.h"
#include "core/trace.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"
#include "parallel/watchdog.h"
#include "tensor/device_cuda.h"

namespace weft {
namespace {

// Throws Exit::hardware with NCCL's own words, or CUDA's where the GPU has failed. `comm` may be
// null.
void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line) {
  if (result == ncclSuccess) return;
  throw_if_gpu_failed(call, __FILE__, line);
  const char* last = ncclGetLastError(comm);
  throw Error(
      Exit::hardware,
      fmt::format("NCCL: {} in {}{}{}", ncclGetErrorString(result), call,
                  last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
      "run again with NCCL_DEBUG=INFO; weft doctor checks GPUs and network", __FILE__, line);
}
#define NCCL_CHECK(call) check_nccl((call), nullptr, #call, __LINE__)

// bf16 elements to send, and as many to receive.
constexpr std::int64_t scratch_elements = std::int64_t{1} << 24;

ncclDataType_t nccl_type(DType t) {
  switch (t) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i64:
      return ncclInt64;
    case DType::i32:
      return ncclInt32;
    case DType::f16:  // two bytes, never summed
      return ncclBfloat16;
    case DType::u8:
    case DType::boolean:
      return ncclUint8;
  }
  return ncclUint8;
}

std::byte* at(const Tensor& t, std::int64_t first) {
  return static_cast<std::byte*>(t.raw()) + first * static_cast<std::int64_t>(size_of(t.dtype()));
}

cudaStream_t stream() { return cuda_stream(Stream::communication); }

// Runs the sends and receives between its construction and end() together. The destructor closes
// the group also when a call in it failed.
class Group {
 public:
  Group() { NCCL_CHECK(ncclGroupStart()); }
  ~Group() {
    if (open_) (void)ncclGroupEnd();
  }
  void end() {
    open_ = false;
    NCCL_CHECK(ncclGroupEnd());
  }

 private:
  bool open_ = true;
};

Tensor piece(const Tensor& t, Part where) { return t.slice(where.begin, where.end); }

// The collectives as NCCL calls on the communication stream.
//
// With bf16 every rank sends each other rank its contribution to that rank's part, and the owner
// sums them in f32 in the order of ranks. All ranks are treated as equally distant: where several
// nodes of many GPUs share few network cards, this sends more between nodes than NCCL's own f32
// sums, which add inside a node first.
//
// All calls come from the thread that issues; they return as soon as the work is queued. Parts,
// types and counts: communicator.h. Device memory for bf16 is allocated at first use and kept.
class NcclCollectives {
 public:
  NcclCollectives(int rank, int size) : rank_(rank), size_(size) {}
  ~NcclCollectives();
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;
  void use(ncclComm_t comm) { comm_ = comm; }

  void all_reduce(const Tensor& t, CommDtype comm_dtype);
  void reduce_scatter(const Tensor& t, CommDtype comm_dtype);
  void all_gather(const Tensor& t);
  void all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                  const Tensor& to, const std::vector<std::int64_t>& to_counts);

 private:
  Part part(const Tensor& t, int rank) const { return part_of(0, t.numel(), rank, size_); }
  bool equal_parts(const Tensor& t) const { return t.numel() % (part_unit * size_) == 0; }
  void sum_as_bf16(const Tensor& t, bool for_all);

  int rank_, size_;
  ncclComm_t comm_ = nullptr;
  void* scratch_ = nullptr;
};

NcclCollectives::~NcclCollectives() {
  if (scratch_ != nullptr) device_runtime().free(scratch_);
}

void NcclCollectives::all_reduce(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16 && t.dtype() == DType::f32)
    sum_as_bf16(t, true);
  else
    NCCL_CHECK(ncclAllReduce(t.raw(), t.raw(), static_cast<std::size_t>(t.numel()),
                             nccl_type(t.dtype()), ncclSum, comm_, stream()));
}

void NcclCollectives::reduce_scatter(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16) return sum_as_bf16(t, false);
  if (equal_parts(t)) {
    // ncclReduceScatter takes equal parts only; uneven ones take one reduction per owner, below.
    NCCL_CHECK(ncclReduceScatter(t.raw(), at(t, part(t, rank_).begin),
                                 static_cast<std::size_t>(t.numel() / size_), ncclFloat32, ncclSum,
                                 comm_, stream()));
    return;
  }
  Group group;
  for (int r = 0; r < size_; ++r) {
    const Part p = part(t, r);
    if (p.size() > 0)
      NCCL_CHECK(ncclReduce(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                            ncclFloat32, ncclSum, r, comm_, stream()));
  }
  group.end();
}

void NcclCollectives::all_gather(const Tensor& t) {
  if (t.numel() == 0) return;
  if (equal_parts(t)) {
    // ncclAllGather takes equal parts only; uneven ones take one broadcast per owner, below.
    NCCL_CHECK(ncclAllGather(at(t, part(t, rank_).begin), t.raw(),
                             static_cast<std::size_t>(t.numel() / size_), nccl_type(t.dtype()),
                             comm_, stream()));
    return;
  }
  Group group;
  for (int r = 0; r < size_; ++r) {
    const Part p = part(t, r);
    if (p.size() > 0)
      NCCL_CHECK(ncclBroadcast(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                               nccl_type(t.dtype()), r, comm_, stream()));
  }
  group.end();
}

void NcclCollectives::all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                                 const Tensor& to, const std::vector<std::int64_t>& to_counts) {
  Group group;
  std::int64_t out = 0, in = 0;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t sent = from_counts[r];
    const std::int64_t awaited = to_counts[r];
    const auto bytes = static_cast<std::size_t>(sent) * size_of(from.dtype());
    if (r == rank_ && sent > 0)
      device_runtime().copy(at(to, in), at(from, out), bytes, Stream::communication);
    if (r != rank_ && sent > 0)
      NCCL_CHECK(ncclSend(at(from, out), static_cast<std::size_t>(sent), nccl_type(from.dtype()), r,
                          comm_, stream()));
    if (r != rank_ && awaited > 0)
      NCCL_CHECK(ncclRecv(at(to, in), static_cast<std::size_t>(awaited), nccl_type(to.dtype()), r,
                          comm_, stream()));
    out += sent;
    in += awaited;
  }
  group.end();
}

// Handles one piece of every part at a time, so that the scratch memory is bounded: a piece is
// rounded, exchanged, and summed by its owner. For an all-reduce the sum is rounded once more and
// goes back the same way.
void NcclCollectives::sum_as_bf16(const Tensor& t, bool for_all) {
  if (size_ == 1) return;
  if (scratch_ == nullptr)
    scratch_ = device_runtime().allocate(2 * scratch_elements * sizeof(bf16), false);
  auto* out = static_cast<bf16*>(scratch_);
  bf16* in = out + scratch_elements;
  const auto rows = [&](bf16* p, std::int64_t first, std::int64_t count, std::int64_t of) {
    return Tensor::borrow(p + first * of, {count, of}, DType::bf16, DeviceKind::cuda);
  };
  const std::int64_t length = scratch_elements / size_ / part_unit * part_unit;
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int r) {
      const Part p = part(t, r);
      return Part{std::min(p.begin + first, p.end), std::min(p.begin + first + length, p.end)};
    };
    const Part mine = where(rank_);
    // Row r of `out` goes to rank r; the rows of `in` are the terms of this rank's sum, its own
    // among them.
    for (int r = 0; r < size_; ++r) {
      const Part p = where(r);
      if (p.size() == 0) continue;
      Tensor row =
          r == rank_ ? rows(in, r, 1, mine.size())
                     : Tensor::borrow(out + r * length, {p.size()}, DType::bf16, DeviceKind::cuda);
      ops::convert_on_stream(piece(t, p), row, Stream::communication);
    }
    Group exchange;
    for (int r = 0; r < size_; ++r) {
      const Part p = where(r);
      if (r != rank_ && p.size() > 0)
        NCCL_CHECK(ncclSend(out + r * length, static_cast<std::size_t>(p.size()), ncclBfloat16, r,
                            comm_, stream()));
      if (r != rank_ && mine.size() > 0)
        NCCL_CHECK(ncclRecv(in + r * mine.size(), static_cast<std::size_t>(mine.size()),
                            ncclBfloat16, r, comm_, stream()));
    }
    exchange.end();
    Tensor sum = piece(t, mine);
    if (mine.size() > 0)
      ops::sum_parts(rows(in, 0, size_, mine.size()), sum, Stream::communication);
    if (!for_all) continue;
    // Every rank sends as much as the longest piece has; the tail behind a shorter one is never
    // read.
    std::int64_t most = 0;
    for (int r = 0; r < size_; ++r) most = std::max(most, where(r).size());
    Tensor rounded = Tensor::borrow(out, {mine.size()}, DType::bf16, DeviceKind::cuda);
    if (mine.size() > 0) ops::convert_on_stream(sum, rounded, Stream::communication);
    NCCL_CHECK(
        ncclAllGather(out, in, static_cast<std::size_t>(most), ncclBfloat16, comm_, stream()));
    for (int r = 0; r < size_; ++r) {
      Tensor to = piece(t, where(r));
      if (to.numel() > 0)
        ops::convert_on_stream(
            Tensor::borrow(in + r * most, {to.numel()}, DType::bf16, DeviceKind::cuda), to,
            Stream::communication);
    }
  }
}

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
    ncclCommDestroy(comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
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

  void progress(std::int64_t step, const char* phase) override { watchdog_->progress(step, phase); }
  void set_timeout(double seconds) override { watchdog_->set_timeout(seconds); }

  using Communicator::all_reduce_sum;
  Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32 || t.dtype() == DType::f64);
    const DType travels =
        t.dtype() == DType::f32 && comm_dtype == CommDtype::bf16 ? DType::bf16 : t.dtype();
    return issue("all-reduce", travels, t, {}, [&] { collectives_->all_reduce(t, comm_dtype); });
  }
  Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32);
    return issue("reduce-scatter", comm_dtype == CommDtype::bf16 ? DType::bf16 : DType::f32, t, {},
                 [&] { collectives_->reduce_scatter(t, comm_dtype); });
  }
  Ticket all_gather(Tensor t) override {
    return issue("all-gather", t.dtype(), t, {}, [&] { collectives_->all_gather(t); });
  }
  Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                    std::span<const std::int64_t> to_counts) override {
    WEFT_ASSERT(from.dtype() == to.dtype() && from.device() == DeviceKind::cuda);
    const auto fit = [&](std::span<const std::int64_t> counts, const Tensor& t) {
      return counts.size() == static_cast<std::size_t>(size_) &&
             std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == t.numel();
    };
    WEFT_ASSERT(fit(from_counts, from) && fit(to_counts, to));
    return issue("all-to-all", to.dtype(), to, from, [&] {
      collectives_->all_to_all(from, {from_counts.begin(), from_counts.end()}, to,
                               {to_counts.begin(), to_counts.end()});
    });
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
    const char* kind = "";
    std::string name;
    DeviceEvent begin, done;  // begin: its data is ready and the operations before it are done
    Tensor to, from;          // their memory stays until it is done
    double began = 0;
    bool finished = false;
  };

  // Puts the work that `call` queues between two events of the communication stream.
  template <class Call>
  Ticket issue(const char* kind, DType comm_dtype, const Tensor& to, const Tensor& from,
               Call&& call) {
    WEFT_ASSERT(to.device() == DeviceKind::cuda);
    check();
    if (fault::ordered(fault::Kind::skip, ++asked_)) return 0;
    DeviceRuntime& device = device_runtime();
    Operation o;
    o.number = ++number_;
    o.kind = kind;
    const std::size_t bytes = static_cast<std::size_t>(to.numel()) * size_of(comm_dtype);
    o.name = fmt::format("{} {} ({}, {:.3f} MiB)", kind, o.number, name_of(comm_dtype),
                         static_cast<double>(bytes) / (1 << 20));
    // What an all-to-all moves differs from rank to rank.
    watchdog_->issued(o.number, {kind, comm_dtype, from.defined() ? 0 : bytes});
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
    calling_ = Watchdog::Operation{o.number, o.name, 0};
    called_at_ = now_seconds();
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    calling_.reset();
  }

  // Makes comm_ together with all ranks, or throws once the watchdog reports that a rank does not
  // come.
  void start(MPI_Comm world) {
    Operation o;
    o.number = 1;
    o.name = "the start of NCCL";
    enter(o);
    watchdog_->issued(1, {"start of NCCL", DType::u8, 0});
    watchdog_->begun(1);
    ncclUniqueId id{};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, world);
    const auto shared = std::make_shared<Start>();
    start_ = shared;
    std::thread([shared, id, rank = rank_, size = size_, gpu = gpu_] {
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
    collectives_.emplace(rank_, size_);
    collectives_->use(comm_);
    watchdog_->issued(0, {});  // so that collectives are counted from 1
    watchdog_->begun(0);
  }

  // Called by the watchdog's thread: the operation in progress.
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
      if (o.began == 0 && device.finished(o.begin)) {
        o.began = now_seconds();
        watchdog_->begun(o.number);
      }
      if (!device.finished(o.done)) {
        if (o.began != 0) return Watchdog::Operation{o.number, o.name, now_seconds() - o.began};
        break;
      }
      const double seconds = device.seconds(o.begin, o.done);
      busy_ += seconds;
      o.finished = true;
      watchdog_->completed(o.number);
      if (trace::enabled) {
        // Only as exact as this thread's polling: the end is at most one of its periods late.
        const double now = now_seconds();
        trace::add({o.kind, trace::Lane::communication, now - seconds, now,
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
    if (const auto start = start_.lock()) {
      const std::lock_guard lock(start->mutex);
      start->given_up = !start->done;
      start->changed.notify_all();
    }
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex_);
      // Cleared under the lock, so that look() no longer uses it.
      comm = comm_;
      comm_ = nullptr;
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
  std::int64_t asked_ = 0;  // operations requested, including those that a fault skips
  std::optional<NcclCollectives> collectives_;
  // Shared with the watchdog's thread.
  mutable std::mutex mutex_;
  std::timed_mutex call_mutex_;  // held inside NCCL
  ncclComm_t comm_ = nullptr;
  std::weak_ptr<Start> start_;
  std::deque<Operation> operations_;
  std::optional<Watchdog::Operation> calling_;
  std::future<void> aborted_;
  double called_at_ = 0;
  double busy_ = 0;
  std::optional<Watchdog> watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm world, double timeout_seconds) {
  return std::make_unique<NcclCommunicator>(world, timeout_seconds);
}

}  // namespace weft
