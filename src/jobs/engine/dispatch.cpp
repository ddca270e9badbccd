#include "jobs/engine/dispatch.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "core/mpi.h"

namespace weft {
namespace {

// To rank 0: a request for batches of a round. To and from rank 0: a request to stop; the last
// message.
enum Tag { tag_ask, tag_stop, tag_last };

// Seconds that the thread sleeps between two looks for messages: on rank 0 longer and longer while
// none come, elsewhere `between_requests`, for nothing but a request to stop can come. Requests
// from outside are looked for as often.
constexpr double shortest_sleep = 20e-6, longest_sleep = 1e-3, between_requests = 0.1;

}  // namespace

RankGroups::RankGroups(MPI_Comm world, int ranks_a_group) : size(ranks_a_group) {
  int ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  count = ranks / size;
  index = rank / size;
  first = rank % size == 0;
  if (size > 1) MPI_Comm_split(world, index, rank, &group);
}

RankGroups::~RankGroups() {
  if (std::uncaught_exceptions() == 0 && group != MPI_COMM_NULL) MPI_Comm_free(&group);
}

std::int64_t RankGroups::share(std::int64_t number) const {
  if (size > 1) MPI_Bcast(&number, 1, MPI_INT64_T, 0, group);
  return number;
}

std::int64_t batches_a_request(std::span<const double> left, std::int64_t first, int workers) {
  constexpr std::int64_t most = 16;
  const std::int64_t shares = 8 * static_cast<std::int64_t>(workers);
  const std::int64_t by_number = std::min(most, (std::ssize(left) - 1 - first) / shares);
  const double by_cost = left[first] / static_cast<double>(shares);
  std::int64_t n = 1;
  while (n < by_number && left[first] - left[first + n + 1] <= by_cost) ++n;
  return n;
}

Dispatcher::Dispatcher(MPI_Comm world, std::unique_ptr<Requests> requests,
                       std::function<void()> on_stop)
    : requests_(std::move(requests)), on_stop_(std::move(on_stop)) {
  int threads = MPI_THREAD_SINGLE;
  MPI_Query_thread(&threads);
  WEFT_CHECK(threads == MPI_THREAD_MULTIPLE, Exit::usage,
             "use an MPI that is built with MPI_THREAD_MULTIPLE",
             "this MPI does not allow calls from several threads");
  MPI_Comm_dup(world, &service_);
  MPI_Comm_dup(world, &answers_);
  MPI_Comm_rank(service_, &rank_);
  MPI_Comm_size(service_, &ranks_);
  thread_ = std::jthread([this](const std::stop_token& end) {
    try {
      serve(end);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      fault_ = std::current_exception();
      stop_ = true;
    }
  });
}

Dispatcher::~Dispatcher() {
  thread_ = std::jthread();
  // An error that unwinds the stack ends the job; the other ranks are elsewhere.
  if (std::uncaught_exceptions() > 0) return;
  MPI_Comm_free(&service_);
  MPI_Comm_free(&answers_);
}

// ---- The thread ----

void Dispatcher::serve(const std::stop_token& end) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any ended;
  double next_look = 0, sleep = shortest_sleep;
  while (!end.stop_requested()) {
    if (now_seconds() >= next_look) {
      look();
      next_look = now_seconds() + between_requests;
    }
    if (receive_one()) {
      sleep = shortest_sleep;
      continue;
    }
    sleep = rank_ == 0 ? std::min(2 * sleep, longest_sleep) : between_requests;
    ended.wait_for(lock, end, std::chrono::duration<double>(sleep), [] { return false; });
  }
}

void Dispatcher::look() {
  if (!requests_ || stop_ || (requests_->look(longest_, 0) & request::stop) == 0) return;
  stop();
  if (rank_ == 0)
    stop_others();
  else
    MPI_Send(nullptr, 0, MPI_INT64_T, 0, tag_stop, service_);
}

void Dispatcher::stop() {
  stop_ = true;  // first: no batch is begun after on_stop_
  if (on_stop_) on_stop_();
}

void Dispatcher::stop_others() {
  for (int r = 1; r < ranks_; ++r) MPI_Send(nullptr, 0, MPI_INT64_T, r, tag_stop, service_);
}

bool Dispatcher::receive_one() {
  int there = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, service_, &there, &status);
  // The last message of a rank is for conclude().
  if (there == 0 || status.MPI_TAG == tag_last) return false;
  const int from = status.MPI_SOURCE;
  std::int64_t round = 0;
  MPI_Recv(&round, 1, MPI_INT64_T, from, status.MPI_TAG, service_, MPI_STATUS_IGNORE);
  if (status.MPI_TAG == tag_ask) {
    const Range range = grant(round);
    MPI_Send(&range, sizeof range, MPI_BYTE, from, 0, answers_);
  } else if (!stop_) {
    stop();
    log::info("stopping: requested by a signal to rank {}", from);
    if (rank_ == 0) stop_others();
  }
  return true;
}

Dispatcher::Range Dispatcher::grant(std::int64_t round) {
  const std::lock_guard lock(mutex_);
  if (stop_ || round < round_ || next_ + 1 >= std::ssize(left_)) return {};
  const std::int64_t first = next_;
  next_ += first < together_ ? together_ : batches_a_request(left_, first, workers_);
  return {first, next_};
}

// ---- The rank's own thread ----

// Asleep. What went wrong in the dispatcher's thread emerges here: others might wait for it.
void Dispatcher::wait(MPI_Request request) const {
  const auto done = [&] {
    int complete = 0;
    MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
    const std::lock_guard lock(mutex_);
    if (fault_) std::rethrow_exception(fault_);
    return complete != 0;
  };
  wait_asleep(done, 0.002);
}

void Dispatcher::open(const std::vector<double>& costs, int workers, std::int64_t together) {
  ++own_round_;
  if (rank_ == 0) {
    // Before any rank can ask for the new round's. Nothing of the one before is left.
    const std::lock_guard lock(mutex_);
    left_.assign(costs.size() + 1, 0);
    for (std::size_t i = costs.size(); i-- > 0;) left_[i] = left_[i + 1] + costs[i];
    next_ = 0;
    together_ = together;
    workers_ = workers;
    round_ = own_round_;
  }
  MPI_Request all_here;
  MPI_Ibarrier(answers_, &all_here);
  wait(all_here);
}

std::int64_t Dispatcher::next() {
  if (stop_) {
    const std::lock_guard lock(mutex_);
    if (fault_) std::rethrow_exception(fault_);
    mine_ = {};  // what was granted and not begun is left to the next start
    return -1;
  }
  if (mine_.first == mine_.end && rank_ == 0) mine_ = grant(own_round_);
  if (mine_.first == mine_.end && rank_ != 0) {
    const double begin = now_seconds();
    MPI_Request come;
    MPI_Irecv(&mine_, sizeof mine_, MPI_BYTE, 0, 0, answers_, &come);
    MPI_Send(&own_round_, 1, MPI_INT64_T, 0, tag_ask, service_);
    wait(come);
    asked_total_ += now_seconds() - begin;
    ++asked_;
  }
  return mine_.first < mine_.end ? mine_.first++ : -1;
}

std::vector<std::string> Dispatcher::gather(const std::string& mine) {
  MPI_Request all_here;
  MPI_Ibarrier(answers_, &all_here);
  wait(all_here);
  return gather_texts(mine, answers_);
}

int Dispatcher::conclude(int code) {
  MPI_Request come;
  MPI_Ibcast(&code, 1, MPI_INT, 0, answers_, &come);
  wait(come);
  thread_ = std::jthread();
  // A request to stop may still be on its way: the last message of a peer comes after it.
  const int first = rank_ == 0 ? 1 : 0, end = rank_ == 0 ? ranks_ : 1;
  for (int r = first; r < end; ++r) MPI_Send(nullptr, 0, MPI_INT64_T, r, tag_last, service_);
  for (int r = first; r < end; ++r)
    for (MPI_Status status{}; status.MPI_TAG != tag_last;)
      MPI_Recv(nullptr, 0, MPI_INT64_T, r, MPI_ANY_TAG, service_, &status);
  return code;
}

}  // namespace weft
