// The MPI side of the communicator: the queue of operations and the thread that serves it. What an
// operation does: mpi_collectives.h.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/trace.h"
#include "parallel/communicator.h"
#include "parallel/mpi_collectives.h"
#include "parallel/watchdog.h"

namespace weft {
namespace {

// The most bytes of a sum that wait() runs itself (awaited_at_once).
constexpr std::size_t most_bytes_at_once = std::size_t{64} << 10;

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
    if (size_ > 1) collectives_.emplace(comm_, stop_);
    // A single rank can hang too, while it reads data or saves.
    watchdog_.emplace(
        world, timeout_seconds, [this] { return look(); }, [this] { stop(); });
    if (size_ == 1) return;
    thread_ = std::thread([this] { serve(); });
  }

  ~MpiCommunicator() override {
    // Outstanding operations mean that this rank is terminating with an error: the other ranks may
    // never join them, so they are abandoned, and main ends all ranks.
    bool orderly = false;
    {
      const std::lock_guard lock(mutex_);
      orderly = issued_ == completed_;
    }
    if (thread_.joinable()) {
      stop();
      thread_.join();
      orderly = orderly && !watchdog_->failed() && std::uncaught_exceptions() == 0;
      // Its thread calls look() and stop() of this object, so it ends before the members go.
      watchdog_.reset();
    }
    if (orderly) MPI_Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void check() override { watchdog_->check(); }
  std::string describe() const override {
    if (size_ == 1) return "one rank, nothing to reduce";
    return on_cuda() ? "MPI, staged through the host" : "MPI";
  }
  void progress(std::int64_t step, Phase phase) override {
    release_held();
    watchdog_->progress(step, phase);
  }
  void set_timeout(double seconds) override { watchdog_->set_timeout(seconds); }

  using Communicator::all_reduce_sum;
  Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32 || t.dtype() == DType::f64);
    const DType travels =
        t.dtype() == DType::f32 && comm_dtype == CommDtype::bf16 ? DType::bf16 : t.dtype();
    return issue({.kind = CollectiveKind::all_reduce, .comm_dtype = travels, .to = std::move(t)});
  }
  Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype) override {
    WEFT_ASSERT(t.dtype() == DType::f32);
    return issue({.kind = CollectiveKind::reduce_scatter,
                  .comm_dtype = comm_dtype == CommDtype::bf16 ? DType::bf16 : DType::f32,
                  .to = std::move(t)});
  }
  Ticket all_gather(Tensor t) override {
    const DType travels = t.dtype();
    return issue({.kind = CollectiveKind::all_gather, .comm_dtype = travels, .to = std::move(t)});
  }
  Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                    std::span<const std::int64_t> to_counts) override {
    WEFT_ASSERT(from.dtype() == to.dtype() && from.device() == to.device());
    const auto fit = [&](std::span<const std::int64_t> counts, const Tensor& t) {
      return counts.size() == static_cast<std::size_t>(size_) &&
             std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == t.numel();
    };
    WEFT_ASSERT(fit(from_counts, from) && fit(to_counts, to));
    if (size_ == 1) copy_alone(from, to);
    const DType travels = to.dtype();
    return issue({.kind = CollectiveKind::all_to_all,
                  .comm_dtype = travels,
                  .to = std::move(to),
                  .from = std::move(from),
                  .to_counts = {to_counts.begin(), to_counts.end()},
                  .from_counts = {from_counts.begin(), from_counts.end()}});
  }

  double wait(Ticket ticket) override {
    if (size_ == 1) return 0;
    const double start = now_seconds();
    {
      std::unique_lock lock(mutex_);
      WEFT_ASSERT(ticket <= issued_);  // otherwise it would never complete
      if (completed_ < ticket) {
        const trace::Scope scope("wait for communication", trace::Lane::wait,
                                 static_cast<std::int64_t>(ticket), "collective");
        if (std::exchange(held_, false)) {
          if (ticket == completed_ + 1) {
            MpiOperation o = take();
            lock.unlock();
            work(std::move(o), true);
            lock.lock();
          } else {
            wake_.notify_all();
          }
        }
        done_.wait(lock, [&] { return completed_ >= ticket || stop_; });
      }
      if (!stop_) retired_.clear();
    }
    check();
    return now_seconds() - start;
  }

 private:
  Ticket issue(MpiOperation o) {
    if (size_ == 1) return 0;
    check();
    if (fault::at(fault::Place::collective, static_cast<std::int64_t>(issued_ + 1))) return 0;
    if (o.to.device() == DeviceKind::cuda) o.written = device_runtime().record(Stream::compute);
    const Collective record = o.record();
    Ticket ticket;
    {
      std::lock_guard lock(mutex_);
      retired_.clear();
      ticket = ++issued_;
      watchdog_->issued(ticket, record);  // before the thread can begin it
      held_ = completed_ + 1 == ticket && awaited_at_once(o);
      queue_.push_back(std::move(o));
      if (held_) return ticket;
    }
    wake_.notify_all();
    return ticket;
  }

  // The progress thread takes what wait() has not asked for.
  void release_held() {
    {
      const std::lock_guard lock(mutex_);
      if (!std::exchange(held_, false)) return;
    }
    wake_.notify_all();
  }

  static void copy_alone(const Tensor& from, const Tensor& to) {
    if (from.bytes() == 0) return;
    if (from.device() == DeviceKind::cuda)
      device_runtime().copy(to.raw(), from.raw(), from.bytes(), Stream::compute);
    else
      std::memcpy(to.raw(), from.raw(), from.bytes());
  }

  // The operation in progress, for the watchdog. Whatever the caller does, its calls are the latest
  // at which the progress thread gets a sum that was left to wait().
  std::optional<Watchdog::Operation> look() {
    release_held();
    const std::lock_guard lock(mutex_);
    if (began_ == 0) return std::nullopt;
    return Watchdog::Operation{completed_ + 1, now_seconds() - began_};
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);  // else a thread misses the wake-up before its sleep
      stop_ = true;
    }
    wake_.notify_all();
    done_.notify_all();
  }

  // The progress thread: runs the operations one at a time, in order of issue.
  void serve() {
    for (;;) {
      MpiOperation o;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || (!queue_.empty() && !held_); });
        if (stop_) return;
        o = take();
      }
      if (!work(std::move(o), false)) return;
    }
  }

  // A caller waits for small sums right after issuing them (statistics of batch norm, the norm of
  // the gradient): nothing can hide them. Where nothing else is under way, wait() runs such a sum
  // on the caller's thread, which spares two switches between threads; if the caller does something
  // else first, the progress thread gets it.
  bool awaited_at_once(const MpiOperation& o) const {
    return o.kind == CollectiveKind::all_reduce && o.to.device() == DeviceKind::cpu &&
           o.to.bytes() <= most_bytes_at_once;
  }

  MpiOperation take() {
    MpiOperation o = std::move(queue_.front());
    queue_.pop_front();
    return o;
  }

  // Runs an operation, on one thread at a time. False: no further one will follow.
  bool work(MpiOperation o, bool awaited) {
    bool done = false;
    try {
      done = run(o, awaited);
    } catch (const OtherCollective& e) {
      watchdog_->suspect(e.what());  // the records of all ranks tell who differs
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_.load(); });
    } catch (...) {
      watchdog_->fail(std::current_exception());
    }
    {
      const std::lock_guard lock(mutex_);
      retired_.push_back(std::move(o.to));
      if (o.from.defined()) retired_.push_back(std::move(o.from));
      if (!done) return false;
      began_ = 0;
      watchdog_->completed(++completed_);
    }
    done_.notify_all();
    return true;
  }

  bool run(const MpiOperation& o, bool awaited) {
    // Waiting for the compute before it is not communication: it is neither counted nor watched.
    if (!collectives_->ready(o)) return false;
    Ticket number;
    {
      std::lock_guard lock(mutex_);
      began_ = now_seconds();
      number = completed_ + 1;
    }
    watchdog_->begun(number);
    const trace::Scope scope(
        o.record().name(), trace::Lane::communication,
        static_cast<std::int64_t>(o.to.numel()) * static_cast<std::int64_t>(size_of(o.comm_dtype)),
        "bytes");
    return collectives_->run(number, o, awaited);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  mutable std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<MpiOperation> queue_;
  bool held_ = false;  // its only operation is left to wait()
  // Tensors of completed operations, and those that an abandoned operation may still write to. The
  // caller's thread releases them, since an arena belongs to its thread.
  std::vector<Tensor> retired_;
  Ticket issued_ = 0, completed_ = 0;
  double began_ = 0;  // start of the operation in progress, 0 if there is none
  std::atomic<bool> stop_ = false;
  std::optional<MpiCollectives> collectives_;
  std::thread thread_;
  std::optional<Watchdog> watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world, double timeout_seconds) {
  return std::make_unique<MpiCommunicator>(world, timeout_seconds);
}

}  // namespace weft
