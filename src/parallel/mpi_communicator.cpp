// The MPI side of the communicator.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "parallel/communicator.h"

namespace weft {
namespace {

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm world) {
    int provided = 0;
    MPI_Query_thread(&provided);
    WEFT_CHECK(provided == MPI_THREAD_MULTIPLE, Exit::usage,
               "use an MPI that was built with thread support",
               "this MPI provides thread level {}, weft needs MPI_THREAD_MULTIPLE", provided);
    MPI_Comm_dup(world, &comm_);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    if (size_ > 1) thread_ = std::thread([this] { progress(); });
  }

  ~MpiCommunicator() override {
    // Operations still outstanding mean that this rank is on its way out with an error: the others may never join
    // them, so they are abandoned, and main ends all ranks.
    if (thread_.joinable()) {
      {
        std::lock_guard lock(
            mutex_);  // or the thread misses the call between its look and its sleep
        stop_ = true;
      }
      wake_.notify_all();
      thread_.join();
    }
    if (issued_ == completed_) MPI_Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  double busy_seconds() const override {
    std::lock_guard lock(mutex_);
    return busy_;
  }

  Ticket all_reduce_sum(Tensor t) override {
    return issue({t.data<float>(), t.numel(), MPI_FLOAT, t});
  }
  Ticket all_reduce_sum(std::span<double> values) override {
    return issue({values.data(), static_cast<std::int64_t>(values.size()), MPI_DOUBLE, {}});
  }

  double wait(Ticket ticket) override {
    if (size_ == 1) return 0;
    const double start = now_seconds();
    std::unique_lock lock(mutex_);
    WEFT_ASSERT(ticket <= issued_);  // nobody would ever complete it
    done_.wait(lock, [&] { return completed_ >= ticket; });
    return now_seconds() - start;
  }

 private:
  struct Operation {
    void* data;
    std::int64_t count;
    MPI_Datatype type;
    Tensor
        owner;  // a tensor's memory stays until its reduction is done, also while an error unwinds the caller
  };

  Ticket issue(Operation o) {
    if (size_ == 1) return 0;
    Ticket ticket;
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(o);
      ticket = ++issued_;
    }
    wake_.notify_all();
    return ticket;
  }

  // One operation in flight at a time: pieces of it overlap enough, and the order of sums stays the same.
  void progress() {
    for (;;) {
      Operation o;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (stop_) return;
        o = queue_.front();
        queue_.pop_front();
      }
      const double start = now_seconds();
      if (!run(o)) return;
      {
        std::lock_guard lock(mutex_);
        busy_ += now_seconds() - start;
        ++completed_;
      }
      done_.notify_all();
    }
  }

  // False if it was abandoned.
  bool run(const Operation& o) {
    constexpr std::int64_t piece = std::int64_t{1} << 28;  // MPI counts are int
    const std::int64_t width = o.type == MPI_FLOAT ? 4 : 8;
    for (std::int64_t first = 0; first < o.count; first += piece) {
      MPI_Request request;
      MPI_Iallreduce(MPI_IN_PLACE, static_cast<char*>(o.data) + first * width,
                     static_cast<int>(std::min(piece, o.count - first)), o.type, MPI_SUM, comm_,
                     &request);
      // Poll with growing sleeps: short waits cost little latency, long ones no processor time.
      auto pause = std::chrono::microseconds(5);
      for (int done = 0;;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) break;
        if (stop_) return false;
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, std::chrono::microseconds(200));
      }
    }
    return true;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::thread thread_;
  mutable std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Operation> queue_;
  Ticket issued_ = 0, completed_ = 0;
  double busy_ = 0;
  std::atomic<bool> stop_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world) {
  return std::make_unique<MpiCommunicator>(world);
}

}  // namespace weft
