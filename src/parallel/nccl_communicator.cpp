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
#include "core/host.h"
#include "core/log.h"
#include "core/parts.h"
#include "core/trace.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"
#include "parallel/mpi.h"
#include "parallel/watchdog.h"
#include "tensor/device_cuda.h"

namespace weft {
namespace {

// Throws Exit::hardware with NCCL's own words. `comm` may be null.
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

// bf16 elements to send, and as many to receive.
constexpr std::int64_t scratch_elements = std::int64_t{1} << 24;

// Multiprocessors that an operation may take (NCCL: CTAs, of which each stays on one until the
// operation ends). By itself NCCL takes up to 32 of an H100's 132, and fewer do where computing
// goes on beside it: NVIDIA counts about 16 for all of NVLink's bandwidth, and a rank's network
// card needs less. What the environment says about CTAs or channels stays as it is.
struct Ctas {
  int config = NCCL_CONFIG_UNDEF_INT;  // for ncclConfig_t
  int most = 16;                       // to expect
};
Ctas ctas() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? 0 : std::max(0, std::atoi(text));
  };
  int limit = 0, least = 0;
  for (const char* name : {"NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"})
    if (const int n = value(name); n > 0) limit = limit == 0 ? n : std::min(limit, n);
  for (const char* name : {"NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"})
    least = std::max(least, value(name));
  Ctas c;
  if (limit > 0)
    c.most = limit;
  else
    c.config = c.most = std::max(c.most, least);
  return c;
}

// While collectives may run, kernels whose blocks stay leave them their multiprocessors: a block
// that finds none free begins when others have ended, and doubles its kernel's time. That is from
// an operation's issue to the wait for the last one, in the order of the host's calls, so that what
// is recorded as a graph does not depend on the clock. Results do not depend on it either.
class InFlight {
 public:
  ~InFlight() { set(false); }
  void set(bool on) {
    if (on == on_) return;
    on_ = on;
    static std::atomic<int> communicators = 0;
    set_multiprocessor_margin((communicators += on ? 1 : -1) > 0 ? ctas().most : 0);
  }

 private:
  bool on_ = false;
};

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
// The elements [first, first + length) of a part, as far as it has them.
Part piece_at(const Part& p, std::int64_t first, std::int64_t length) {
  return {std::min(p.begin + first, p.end), std::min(p.begin + first + length, p.end)};
}

// Which ranks are on which node: those with equal names, NCCL's own choice of them (NCCL_HOSTID) or
// the host's. [node][place in it]; nodes in order of their first rank.
struct Nodes {
  std::vector<std::vector<int>> ranks;
  int node = 0, place = 0;  // this rank's

  explicit Nodes(MPI_Comm world) {
    const char* id = std::getenv("NCCL_HOSTID");
    const std::string mine = id != nullptr ? id : host_name();
    std::vector<std::string> names;
    int rank = 0, me = 0;
    MPI_Comm_rank(world, &me);
    for (const std::string& name : texts_of_ranks(mine, world)) {
      const auto at = static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
      if (at == names.size()) {
        names.push_back(name);
        ranks.emplace_back();
      }
      if (rank == me) {
        node = static_cast<int>(at);
        place = static_cast<int>(ranks[at].size());
      }
      ranks[at].push_back(rank++);
    }
  }
  // Several nodes of several ranks each.
  bool two_levels() const { return ranks.size() > 1 && even() && ranks.front().size() > 1; }
  bool even() const {
    return std::ranges::all_of(ranks,
                               [&](const auto& r) { return r.size() == ranks.front().size(); });
  }
};

// The collectives as NCCL calls on the communication stream.
//
// With bf16 every rank sends each other rank its contribution to that rank's part, and the owner
// sums them in f32 in the order of ranks. Over several nodes that would send n - m times a bf16
// number through the cards of a node of m ranks of n, where NCCL's own f32 sums, which add inside a
// node first, send one f32 number. So there NCCL sums inside each node in f32, and between nodes
// the ranks of equal place exchange the nodes' sums in bf16: half of what f32 sends.
//
// All calls come from the thread that issues; they return as soon as the work is queued. Parts,
// types and counts: communicator.h. Device memory for bf16 is allocated at first use and kept, as
// are the communicators inside a node and between nodes.
class NcclCollectives {
 public:
  // Splits `comm`: ranks of one color, in the order of `key`. Returns once all ranks have called
  // it.
  using Split = std::function<ncclComm_t(int color, int key)>;
  NcclCollectives(int rank, int size, Nodes nodes, ncclComm_t comm, Split split)
      : rank_(rank),
        size_(size),
        nodes_(std::move(nodes)),
        comm_(comm),
        split_(std::move(split)),
        everyone_(static_cast<std::size_t>(size)) {
    std::iota(everyone_.begin(), everyone_.end(), 0);
  }
  ~NcclCollectives();
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;
  // Ends the communicators that it made: before `comm`, and only where that has not failed.
  void end();

  void all_reduce(const Tensor& t, CommDtype comm_dtype);
  void reduce_scatter(const Tensor& t, CommDtype comm_dtype);
  void all_gather(const Tensor& t);
  void all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                  const Tensor& to, const std::vector<std::int64_t>& to_counts);

 private:
  Part part(const Tensor& t, int rank) const { return part_of(0, t.numel(), rank, size_); }
  bool equal_parts(const Tensor& t) const { return t.numel() % (part_unit * size_) == 0; }
  void sum_as_bf16(const Tensor& t);
  void warn_of_unequal_nodes() const;
  void sum_inside_nodes(const Tensor& t);
  void exchange_and_sum(const Tensor& t, ncclComm_t among, const std::vector<int>& ranks, int me);
  void gather_as_bf16(const Tensor& t);
  // Of bf16 numbers, to send and to receive: scratch_elements each.
  bf16* scratch();

  int rank_, size_;
  Nodes nodes_;
  ncclComm_t comm_;
  Split split_;
  std::vector<int> everyone_;                        // 0, 1, ..., size - 1
  ncclComm_t inside_ = nullptr, between_ = nullptr;  // the node's ranks; one of each node
  void* scratch_ = nullptr;
  bool warned_ = false;
};

NcclCollectives::~NcclCollectives() {
  if (scratch_ != nullptr) device_runtime().free(scratch_);
}

void NcclCollectives::end() {
  for (ncclComm_t* made : {&between_, &inside_})
    if (*made != nullptr) ncclCommDestroy(std::exchange(*made, nullptr));
}

void NcclCollectives::all_reduce(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16 && t.dtype() == DType::f32) {
    if (size_ == 1) return;
    sum_as_bf16(t);
    gather_as_bf16(t);
    return;
  }
  NCCL_CHECK(ncclAllReduce(t.raw(), t.raw(), static_cast<std::size_t>(t.numel()),
                           nccl_type(t.dtype()), ncclSum, comm_, stream()));
}

void NcclCollectives::reduce_scatter(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16) return sum_as_bf16(t);
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

bf16* NcclCollectives::scratch() {
  if (scratch_ == nullptr)
    scratch_ = device_runtime().allocate(2 * scratch_elements * sizeof(bf16), false);
  return static_cast<bf16*>(scratch_);
}

// Afterwards this rank's part holds the sum.
void NcclCollectives::sum_as_bf16(const Tensor& t) {
  if (size_ == 1) return;
  if (!nodes_.two_levels()) {
    if (!nodes_.even() && rank_ == 0 && !std::exchange(warned_, true)) warn_of_unequal_nodes();
    return exchange_and_sum(t, comm_, everyone_, rank_);
  }
  if (between_ == nullptr) {
    inside_ = split_(nodes_.node, nodes_.place);
    between_ = split_(nodes_.place, nodes_.node);
  }
  sum_inside_nodes(t);
  std::vector<int> of_place;  // one rank of each node
  for (const std::vector<int>& node : nodes_.ranks)
    of_place.push_back(node[static_cast<std::size_t>(nodes_.place)]);
  exchange_and_sum(t, between_, of_place, nodes_.node);
}

void NcclCollectives::warn_of_unequal_nodes() const {
  std::size_t most = 0;
  for (const std::vector<int>& node : nodes_.ranks) most = std::max(most, node.size());
  const double n = size_, m = static_cast<double>(most);
  log::warn(
      "the {} nodes have unequal numbers of ranks, so gradients in bf16 are not summed inside each "
      "node first: every step the network cards of a node with {} take in {:.1f} bytes a gradient, "
      "against 4 with parallel.wire = \"f32\". Set that, or start as many ranks on every node",
      nodes_.ranks.size(), counted(most, "rank"), 2 * m * (n - m) / n);
}

// Sums inside this node, in f32: on its rank of each place, the parts of all ranks of that place.
void NcclCollectives::sum_inside_nodes(const Tensor& t) {
  Group group;
  for (const std::vector<int>& node : nodes_.ranks) {
    const int first = node.front(), ranks = static_cast<int>(node.size());
    if (equal_parts(t) && node.back() - first == ranks - 1) {
      const Part mine = part(t, node[static_cast<std::size_t>(nodes_.place)]);
      NCCL_CHECK(ncclReduceScatter(at(t, part(t, first).begin), at(t, mine.begin),
                                   static_cast<std::size_t>(mine.size()), ncclFloat32, ncclSum,
                                   inside_, stream()));
      continue;
    }
    for (int place = 0; place < ranks; ++place) {
      const Part p = part(t, node[static_cast<std::size_t>(place)]);
      if (p.size() > 0)
        NCCL_CHECK(ncclReduce(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                              ncclFloat32, ncclSum, place, inside_, stream()));
    }
  }
  group.end();
}

// Sums the parts of `ranks` over them, each on its rank. `among` is their communicator, in which
// this rank is `me`.
//
// Handles one piece of every part at a time, so that the scratch memory is bounded: a piece is
// rounded, exchanged, and summed by its owner.
void NcclCollectives::exchange_and_sum(const Tensor& t, ncclComm_t among,
                                       const std::vector<int>& ranks, int me) {
  bf16* const out = scratch();
  bf16* const in = out + scratch_elements;
  const auto rows = [&](bf16* p, std::int64_t first, std::int64_t count, std::int64_t of) {
    return Tensor::borrow(p + first * of, {count, of}, DType::bf16, DeviceKind::cuda);
  };
  const int n = static_cast<int>(ranks.size());
  const std::int64_t length = scratch_elements / n / part_unit * part_unit;
  std::int64_t longest = 0;
  for (const int r : ranks) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int i) { return piece_at(part(t, ranks[i]), first, length); };
    const Part mine = where(me);
    // Row i of `out` goes to the i-th rank; the rows of `in` are the terms of this rank's sum, its
    // own among them.
    for (int i = 0; i < n; ++i) {
      const Part p = where(i);
      if (p.size() == 0) continue;
      Tensor row =
          i == me ? rows(in, i, 1, mine.size())
                  : Tensor::borrow(out + i * length, {p.size()}, DType::bf16, DeviceKind::cuda);
      ops::convert_on_stream(piece(t, p), row, Stream::communication);
    }
    Group exchange;
    for (int i = 0; i < n; ++i) {
      const Part p = where(i);
      if (i != me && p.size() > 0)
        NCCL_CHECK(ncclSend(out + i * length, static_cast<std::size_t>(p.size()), ncclBfloat16, i,
                            among, stream()));
      if (i != me && mine.size() > 0)
        NCCL_CHECK(ncclRecv(in + i * mine.size(), static_cast<std::size_t>(mine.size()),
                            ncclBfloat16, i, among, stream()));
    }
    exchange.end();
    Tensor sum = piece(t, mine);
    if (mine.size() > 0) ops::sum_parts(rows(in, 0, n, mine.size()), sum, Stream::communication);
  }
}

// Rounds every rank's part and copies it to all ranks, again by pieces.
void NcclCollectives::gather_as_bf16(const Tensor& t) {
  bf16* const out = scratch();
  bf16* const in = out + scratch_elements;
  const std::int64_t length = scratch_elements / size_ / part_unit * part_unit;
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int r) { return piece_at(part(t, r), first, length); };
    // Every rank sends as much as the longest piece has; the tail behind a shorter one is never
    // read.
    std::int64_t most = 0;
    for (int r = 0; r < size_; ++r) most = std::max(most, where(r).size());
    const Tensor mine = piece(t, where(rank_));
    Tensor rounded = Tensor::borrow(out, {mine.numel()}, DType::bf16, DeviceKind::cuda);
    if (mine.numel() > 0) ops::convert_on_stream(mine, rounded, Stream::communication);
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
  // It is aborted, and with it what was registered is gone. From any thread.
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
      cudaGetLastError();  // else the next call would report it again
      return nullptr;
    }
    device_runtime().zero(p, bytes, Stream::compute);
    void* handle = nullptr;
    if (usable() && ncclCommRegister(comm_, p, bytes, &handle) != ncclSuccess) {
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
      collectives_.emplace(rank_, size_, Nodes(world), made, [this](int color, int key) {
        return made_together([parent = comm_, color, key](ncclComm_t* part) {
          return ncclCommSplit(parent, color, key, part, nullptr);
        });
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
    if (!operations_.empty()) device_runtime().synchronize(operations_.back().done);
    operations_.clear();
    collectives_->end();
    memory_->end();
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

  // An operation like others, so that the watchdog names a rank that never comes.
  std::unique_ptr<Communicator> split(MPI_Comm part, double timeout_seconds) override {
    check();
    Operation o;
    o.number = ++number_;
    o.name = fmt::format("split {}", o.number);
    enter(o);
    watchdog_->issued(o.number, {"split", DType::u8, 0});
    watchdog_->begun(o.number);
    int color = rank_, key = 0;
    MPI_Bcast(&color, 1, MPI_INT, 0, part);
    MPI_Comm_rank(part, &key);
    const ncclComm_t made = made_together([parent = comm_, color, key](ncclComm_t* comm) {
      return ncclCommSplit(parent, color, key, comm, nullptr);
    });
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
    if (ticket == number_) in_flight_.set(false);
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
    if (size_ > 1) in_flight_.set(true);
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

  // NCCL's communicator of all ranks.
  ncclComm_t start(MPI_Comm world) {
    Operation o;
    o.number = 1;
    o.name = "the start of NCCL";
    enter(o);
    watchdog_->issued(1, {"start of NCCL", DType::u8, 0});
    watchdog_->begun(1);
    ncclUniqueId id{};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, world);
    const ncclComm_t made = made_together([id, rank = rank_, size = size_](ncclComm_t* comm) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;
      config.maxCTAs = ctas().config;
      config.splitShare = 1;
      return ncclCommInitRankConfig(comm, size, id, rank, &config);
    });
    leave();
    watchdog_->issued(0, {});  // so that collectives are counted from 1
    watchdog_->begun(0);
    return made;
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
  std::int64_t asked_ = 0;  // operations requested, including those that a fault skips
  std::optional<NcclCollectives> collectives_;
  InFlight in_flight_;
  // Shared with the watchdog's thread.
  mutable std::mutex mutex_;
  std::timed_mutex call_mutex_;  // held inside NCCL
  ncclComm_t comm_ = nullptr;
  std::shared_ptr<RegisteredMemory> memory_;
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
