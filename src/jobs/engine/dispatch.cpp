#include "jobs/engine/dispatch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <string_view>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "core/mpi.h"

namespace weft {
namespace {

// To rank 0: a request for batches (Ask), a request to stop, a rank's report, its last message.
// From rank 0: a request to stop, the exit code, which is its last message.
enum Tag { tag_ask, tag_stop, tag_report, tag_last, tag_code };

// Seconds that the thread sleeps between two looks for messages: on rank 0 longer and longer while
// none come, elsewhere `between_requests`, for nothing but a request to stop can come before the
// end. Requests from outside are looked for as often.
constexpr double shortest_sleep = 20e-6, longest_sleep = 1e-3, between_requests = 0.1;

template <class T>
T value_of(const std::string& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

void send(MPI_Comm comm, int target, int tag, std::string_view bytes) {
  MPI_Send(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, target, tag, comm);
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

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

std::int64_t batches_a_request(double request_seconds, double batch_seconds, std::int64_t remaining,
                               int workers) {
  const double wanted = batch_seconds > 0 ? std::ceil(200 * request_seconds / batch_seconds) : 1;
  const auto most = static_cast<double>(remaining / (4 * static_cast<std::int64_t>(workers)));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(wanted, most)));
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
  reports_.resize(ranks_);
  reports_missing_ = ranks_;
  thread_ = std::jthread([this](const std::stop_token& end) {
    try {
      serve(end);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      fault_ = std::current_exception();
      stop_ = true;  // next() passes the fault on
      changed_.notify_all();
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
    sleep = rank_ == 0 || reported_ ? std::min(2 * sleep, longest_sleep) : between_requests;
    ended.wait_for(lock, end, std::chrono::duration<double>(sleep), [] { return false; });
  }
}

void Dispatcher::look() {
  if (!requests_ || stop_ || (requests_->look(longest_, 0) & request::stop) == 0) return;
  stop();
  if (rank_ == 0)
    stop_others();
  else
    send(service_, 0, tag_stop, {});
}

void Dispatcher::stop() {
  stop_ = true;  // first: no batch is begun after on_stop_
  if (on_stop_) on_stop_();
}

void Dispatcher::stop_others() {
  for (int r = 1; r < ranks_; ++r) send(service_, r, tag_stop, {});
}

bool Dispatcher::receive_one() {
  int there = 0, bytes = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, service_, &there, &status);
  if (there == 0) return false;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  std::string text(bytes, ' ');
  const int from = status.MPI_SOURCE;
  MPI_Recv(text.data(), bytes, MPI_BYTE, from, status.MPI_TAG, service_, MPI_STATUS_IGNORE);
  if (status.MPI_TAG == tag_ask) {
    answer(from, value_of<Ask>(text));
  } else if (status.MPI_TAG == tag_stop) {
    if (stop_) return true;
    stop();
    log::info("stopping: requested by a signal to rank {}", from);
    if (rank_ == 0) stop_others();
  } else {
    const std::lock_guard lock(mutex_);
    if (status.MPI_TAG == tag_report) {
      reports_[from] = std::move(text);
      --reports_missing_;
    } else if (status.MPI_TAG == tag_code) {
      code_ = value_of<int>(text);
    }
    changed_.notify_all();
  }
  return true;
}

void Dispatcher::answer(int rank, const Ask& ask) {
  std::unique_lock lock(mutex_);
  if (ask.round > round_) {
    early_.emplace_back(rank, ask);
    return;
  }
  lock.unlock();
  send(answers_, rank, 0, bytes_of(grant(ask)));
}

Dispatcher::Range Dispatcher::grant(const Ask& ask) {
  const std::lock_guard lock(mutex_);
  const std::int64_t remaining = all_.end - all_.first;
  if (stop_ || ask.round < round_ || remaining == 0) return {};
  const std::int64_t n =
      batches_a_request(ask.request_seconds, ask.batch_seconds, remaining, workers_);
  all_.first += n;
  return {all_.first - n, all_.first};
}

// ---- The rank's own thread ----

void Dispatcher::open(std::int64_t batches, int workers) {
  MPI_Request all_here;
  MPI_Ibarrier(answers_, &all_here);
  wait_asleep(all_here, 0.01);
  ++ask_.round;
  if (rank_ != 0) return;
  std::vector<std::pair<int, Ask>> early;
  {
    const std::lock_guard lock(mutex_);
    all_ = {0, batches};
    workers_ = workers;
    ++round_;
    early.swap(early_);
  }
  for (const auto& [rank, ask] : early) answer(rank, ask);
}

std::int64_t Dispatcher::next() {
  if (stop_) {
    const std::lock_guard lock(mutex_);
    if (fault_) std::rethrow_exception(fault_);
    mine_ = {};  // what was granted and not begun is left to the next start
    return -1;
  }
  if (mine_.first == mine_.end && rank_ == 0) mine_ = grant(ask_);
  if (mine_.first == mine_.end && rank_ != 0) {
    const double begin = now_seconds();
    MPI_Request come;
    MPI_Irecv(&mine_, sizeof mine_, MPI_BYTE, 0, 0, answers_, &come);
    send(service_, 0, tag_ask, bytes_of(ask_));
    wait_asleep(come);
    const double seconds = now_seconds() - begin;
    ask_.request_seconds = asked_ == 0 ? seconds : 0.75 * ask_.request_seconds + 0.25 * seconds;
    asked_total_ += seconds;
    ++asked_;
  }
  return mine_.first < mine_.end ? mine_.first++ : -1;
}

void Dispatcher::took(double seconds) {
  longest_ = std::max(longest_.load(), seconds);
  ask_.batch_seconds =
      ask_.batch_seconds == 0 ? seconds : 0.75 * ask_.batch_seconds + 0.25 * seconds;
}

std::vector<std::string> Dispatcher::gather(const std::string& mine) {
  reported_ = true;
  if (rank_ != 0) {
    send(service_, 0, tag_report, mine);
    return {};
  }
  std::unique_lock lock(mutex_);
  reports_[0] = mine;
  --reports_missing_;
  changed_.wait(lock, [&] { return reports_missing_ == 0 || fault_; });
  if (fault_) std::rethrow_exception(fault_);
  return reports_;
}

int Dispatcher::conclude(int code) {
  if (rank_ != 0) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return code_ >= 0 || fault_; });
    if (fault_) std::rethrow_exception(fault_);
    code = code_;
    lock.unlock();
    thread_ = std::jthread();
    send(service_, 0, tag_last, {});
    return code;
  }
  thread_ = std::jthread();
  for (int r = 1; r < ranks_; ++r) send(service_, r, tag_code, bytes_of(code));
  // A request to stop may still be on its way from any of them.
  for (int r = 1; r < ranks_; ++r)
    for (MPI_Status status{}; status.MPI_TAG != tag_last;)
      MPI_Recv(nullptr, 0, MPI_BYTE, r, MPI_ANY_TAG, service_, &status);
  return code;
}

}  // namespace weft
