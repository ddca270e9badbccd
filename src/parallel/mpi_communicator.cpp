// The MPI side of the communicator.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "parallel/communicator.h"
#include "parallel/watchdog.h"

namespace weft {
namespace {

constexpr std::int64_t host_piece = std::int64_t{1} << 28;  // elements: MPI counts are int
constexpr std::size_t stage_bytes = std::size_t{8} << 20;

// Calls f(first element, count) for pieces of at most `piece` elements.
template <class F>
bool for_pieces(std::int64_t count, std::int64_t piece, F&& f) {
  for (std::int64_t first = 0; first < count; first += piece)
    if (!f(first, std::min(piece, count - first))) return false;
  return true;
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm world, double timeout_seconds) {
    int provided = 0;
    MPI_Query_thread(&provided);
    WEFT_CHECK(provided == MPI_THREAD_MULTIPLE, Exit::usage,
               "use an MPI that was built with thread support",
               "this MPI provides thread level {}, weft needs MPI_THREAD_MULTIPLE", provided);
    MPI_Comm_dup(world, &comm_);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    if (size_ == 1) return;
    watchdog_.emplace(
        world, timeout_seconds, [this] { return look(); }, [this] { stop(); });
    thread_ = std::thread([this] { progress(); });
  }

  ~MpiCommunicator() override {
    // Operations still outstanding mean that this rank is on its way out with an error: the others may never join
    // them, so they are abandoned, and main ends all ranks.
    if (thread_.joinable()) {
      stop();
      thread_.join();
      watchdog_.reset();
    }
    for (void* p : stages_)
      if (p != nullptr) device_runtime().free_pinned(p);
    if (issued_ == completed_) MPI_Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  double busy_seconds() const override {
    std::lock_guard lock(mutex_);
    return busy_;
  }
  bool capturable() const override { return size_ == 1; }
  void check() override {
    if (watchdog_) watchdog_->check();
  }
  std::string describe() const override {
    if (size_ == 1) return "one rank, nothing to reduce";
    return on_cuda() ? "MPI, staged through the host" : "MPI";
  }

  using Communicator::all_reduce_sum;
  Ticket all_reduce_sum(Tensor t) override {
    WEFT_ASSERT(t.dtype() == DType::f32 || t.dtype() == DType::f64);
    if (size_ == 1) return 0;
    check();
    Operation o{t, {}};
    if (t.device() == DeviceKind::cuda) o.written = device_runtime().record(Stream::compute);
    Ticket ticket;
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(o));
      retired_.clear();
      ticket = ++issued_;
    }
    watchdog_->issued(ticket);
    wake_.notify_all();
    return ticket;
  }

  double wait(Ticket ticket) override {
    if (size_ == 1) return 0;
    const double start = now_seconds();
    {
      std::unique_lock lock(mutex_);
      WEFT_ASSERT(ticket <= issued_);  // nobody would ever complete it
      done_.wait(lock, [&] { return completed_ >= ticket || stop_; });
      if (!stop_) retired_.clear();
    }
    check();
    return now_seconds() - start;
  }

 private:
  struct Operation {
    Tensor tensor;  // its memory stays until it is done, also while an error unwinds the caller
    DeviceEvent written;
  };

  // For the watchdog: what is under way.
  std::optional<Watchdog::Operation> look() {
    std::lock_guard lock(mutex_);
    if (began_ == 0) return std::nullopt;
    return Watchdog::Operation{completed_ + 1, name_, now_seconds() - began_};
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);  // or a thread misses the call between its look and its sleep
      stop_ = true;
    }
    wake_.notify_all();
    done_.notify_all();
  }

  // One operation in flight at a time: pieces of it overlap enough, and the order of sums stays the same.
  void progress() {
    for (;;) {
      Operation o;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (stop_) return;
        o = std::move(queue_.front());
        queue_.pop_front();
      }
      bool done = false;
      try {
        done = run(o);
      } catch (...) {
        watchdog_->fail(std::current_exception());
      }
      {
        std::lock_guard lock(mutex_);
        retired_.push_back(std::move(o.tensor));
        if (!done) return;
        busy_ += now_seconds() - began_;
        began_ = 0;
        ++completed_;
      }
      done_.notify_all();
    }
  }

  // The five that follow are false if they were abandoned.

  bool run(const Operation& o) {
    // The compute before it is not communication: neither counted nor watched.
    if (o.written && !poll([&] { return device_runtime().finished(o.written); })) return false;
    {
      std::lock_guard lock(mutex_);
      began_ = now_seconds();
      name_ =
          fmt::format("all-reduce {} ({}, {:.3f} MiB)", completed_ + 1, name_of(o.tensor.dtype()),
                      static_cast<double>(o.tensor.bytes()) / (1 << 20));
      watchdog_->begun(completed_ + 1);
    }
    return o.written ? run_staged(o.tensor) : run_in_place(o.tensor);
  }

  // Polls with growing sleeps: short waits cost little latency, long ones no processor time.
  template <class F>
  bool poll(F&& done) {
    for (auto pause = std::chrono::microseconds(5); !done();
         pause = std::min(pause * 2, std::chrono::microseconds(200))) {
      if (stop_) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  bool sum(void* data, std::int64_t count, DType type) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, data, static_cast<int>(count),
                   type == DType::f32 ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM, comm_, &request);
    return poll([&] {
      int done = 0;
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      return done != 0;
    });
  }

  bool run_in_place(const Tensor& t) {
    auto* data = static_cast<std::byte*>(t.raw());
    const auto width = static_cast<std::int64_t>(size_of(t.dtype()));
    return for_pieces(t.numel(), host_piece, [&](std::int64_t first, std::int64_t count) {
      return sum(data + first * width, count, t.dtype());
    });
  }

  // Down, sum, up, with one piece on each way at a time. Three buffers, and one stream that copies in order: a buffer is
  // filled again only behind the copy that empties it.
  bool run_staged(const Tensor& t) {
    DeviceRuntime& device = device_runtime();
    for (void*& p : stages_)
      if (p == nullptr) p = device.allocate_pinned(stage_bytes);
    const auto width = static_cast<std::int64_t>(size_of(t.dtype()));
    const auto piece = static_cast<std::int64_t>(stage_bytes) / width;
    auto* data = static_cast<std::byte*>(t.raw());
    std::array<DeviceEvent, 3> filled;
    const auto fetch = [&](std::int64_t first) {
      if (first >= t.numel()) return;
      const auto slot = static_cast<std::size_t>(first / piece % 3);
      device.copy(stages_[slot], data + first * width,
                  static_cast<std::size_t>(std::min(piece, t.numel() - first) * width),
                  Stream::communication);
      filled[slot] = device.record(Stream::communication);
    };
    fetch(0);
    const bool whole = for_pieces(t.numel(), piece, [&](std::int64_t first, std::int64_t count) {
      const auto slot = static_cast<std::size_t>(first / piece % 3);
      fetch(first + piece);
      if (!poll([&] { return device.finished(filled[slot]); })) return false;
      if (!sum(stages_[slot], count, t.dtype())) return false;
      device.copy(data + first * width, stages_[slot], static_cast<std::size_t>(count * width),
                  Stream::communication);
      return true;
    });
    const DeviceEvent back = device.record(Stream::communication);
    return whole && poll([&] { return device.finished(back); });
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  mutable std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Operation> queue_;
  // Tensors that are done with, or that an abandoned operation may still write to. The caller's thread lets go of them:
  // an arena belongs to its thread.
  std::vector<Tensor> retired_;
  Ticket issued_ = 0, completed_ = 0;
  double busy_ = 0;
  double began_ = 0;  // of the operation under way, 0 between two
  std::string name_;
  std::array<void*, 3> stages_{};  // pinned, made when first used
  std::atomic<bool> stop_ = false;
  std::thread thread_;
  std::optional<Watchdog> watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world, double timeout_seconds) {
  return std::make_unique<MpiCommunicator>(world, timeout_seconds);
}

}  // namespace weft
