// Rank 0 hands out the batches of a job, until all are done or a stop is requested.
//
// Rank 0 hands out batches in order to whoever asks: a request is one message and so is its answer.
// While much is left it grants several batches, at the end single ones, so that requests are few
// and all ranks end together. A thread of each rank, asleep between two looks, answers for rank 0,
// and passes a request to stop that reached one rank on to all. Ranks that wait for others are
// asleep.
//
// A rank that dies ends the job: its launcher ends the others (mpirun does, srun with --wait as in
// the job scripts), and the same command makes what is missing.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "train/stop.h"

namespace weft {

// Ranks that make items together: `size` neighbours a group.
struct RankGroups {
  int rank = 0, count = 1, index = 0, size = 1;
  MPI_Comm group = MPI_COMM_NULL;  // null for groups of one
  bool first = true;               // of its group: it asks for batches for all

  // Collective; so is the destructor, except during stack unwinding.
  RankGroups(MPI_Comm world, int size);
  ~RankGroups();
  RankGroups(const RankGroups&) = delete;
  RankGroups& operator=(const RankGroups&) = delete;

  // The first rank's number on all of its group.
  std::int64_t share(std::int64_t number) const;
};

// How many batches one request is granted, from `first` on: at most an eighth of an even share of
// what remains, both by cost and by number, and at most 16: costs may be missing, or all alike
// where times are not. One at least. left [batches + 1]: the cost of a batch and all after it.
std::int64_t batches_a_request(std::span<const double> left, std::int64_t first, int workers);

class Dispatcher {
 public:
  // Collective. `requests` tells when this rank is asked to stop; null: requests to stop are
  // ignored. `on_stop` runs in the dispatcher's thread once this rank knows that the job is to
  // stop.
  explicit Dispatcher(MPI_Comm world, std::unique_ptr<Requests> requests = nullptr,
                      std::function<void()> on_stop = {});
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Whether any rank was asked to stop, as far as this one knows. Never taken back. Thread-safe.
  bool stop_requested() const { return stop_; }

  // Collective, once every rank has made its batches of the round before: begins a round, in which
  // next() gives the batches, of these costs, to `workers` ranks. The first `together` of them go
  // to one rank.
  void open(const std::vector<double>& costs, int workers, std::int64_t together = 0);
  // The next batch of this rank; -1: none is left, or the job is to stop.
  std::int64_t next();
  // Seconds that a batch has taken: the longest is what a stop has to wait for.
  void took(double seconds) { longest_ = std::max(longest_.load(), seconds); }

  // This rank's requests so far, and the seconds that it waited for their answers.
  std::int64_t requests() const { return asked_; }
  double request_seconds() const { return asked_total_; }

  // The end, in two halves, each once a job; ranks that wait are asleep. gather() returns every
  // rank's `mine` on rank 0, in rank order, and nothing elsewhere. conclude() returns rank 0's
  // `code` on all ranks.
  std::vector<std::string> gather(const std::string& mine);
  int conclude(int code);

 private:
  struct Range {
    std::int64_t first = 0, end = 0;
  };
  void serve(const std::stop_token& end);
  void look();
  void stop();
  void stop_others();
  bool receive_one();
  Range grant(std::int64_t round);
  void wait(MPI_Request request) const;

  // The thread receives from `service_`; answers to requests come on `answers_`.
  MPI_Comm service_ = MPI_COMM_NULL, answers_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1;
  std::unique_ptr<Requests> requests_;
  std::function<void()> on_stop_;
  std::atomic<bool> stop_ = false;
  std::atomic<double> longest_ = 0;  // seconds of a batch

  Range mine_;  // granted to this rank, not begun
  std::int64_t own_round_ = 0, asked_ = 0;
  double asked_total_ = 0;

  mutable std::mutex mutex_;  // of what follows
  std::int64_t round_ = 0, next_ = 0, together_ = 0;
  std::vector<double> left_;  // as batches_a_request() takes it
  int workers_ = 1;
  std::exception_ptr fault_;  // of the thread
  std::jthread thread_;
};

}  // namespace weft
