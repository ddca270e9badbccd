#include "jobs/work_queue.h"

#include <chrono>
#include <exception>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

void check(int code, const char* call) {
  WEFT_CHECK(code == MPI_SUCCESS, Exit::hardware, "see MPI's own message above", "{} failed: {}",
             call, code);
}

// Whether all of `comm` share this host's memory.
bool one_host(MPI_Comm comm) {
  MPI_Comm host;
  MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int here = 0, all = 0;
  MPI_Comm_size(host, &here);
  MPI_Comm_size(comm, &all);
  MPI_Comm_free(&host);
  return here == all;
}

}  // namespace

WorkQueue::WorkQueue(MPI_Comm takers, std::int64_t items, std::function<bool()> owner_lost)
    : items_(items), owner_lost_(std::move(owner_lost)) {
  if (takers == MPI_COMM_NULL) return;
  check(MPI_Comm_dup(takers, &comm_), "MPI_Comm_dup");
  int rank = 0;
  MPI_Comm_rank(comm_, &rank);
  const MPI_Aint bytes = rank == 0 ? sizeof(std::int64_t) : 0;
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  const bool there = MPI_Win_allocate(bytes, sizeof(std::int64_t), MPI_INFO_NULL, comm_, &counter_,
                                      &window_) == MPI_SUCCESS;
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_ARE_FATAL);
  if (!there) {
    window_ = MPI_WIN_NULL;
    works_ = false;
    WEFT_CHECK(owner_lost_ != nullptr, Exit::usage,
               "Open MPI 4.1 has it within a host and over InfiniBand and the like (UCX, verbs)",
               "MPI has no one-sided memory between these hosts");
    if (rank == 0)
      log::info("queue     MPI has no one-sided memory between these hosts: by files instead");
    return;
  }
  if (rank == 0) *counter_ = 0;
  // The zero is there before anybody asks for it.
  check(MPI_Barrier(comm_), "MPI_Barrier");
  check(MPI_Win_lock_all(0, window_), "MPI_Win_lock_all");
  // Within a host the counter is shared memory. Over a network without remote atomics, MPI at its owner must come to
  // life for every request, while the owner computes for minutes.
  if (!one_host(comm_) && rank == 0)
    progress_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        int found = 0;
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &found, MPI_STATUS_IGNORE);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
}

WorkQueue::~WorkQueue() {
  if (comm_ == MPI_COMM_NULL) return;
  // An error on its way to main ends the job: nobody waits for the others then.
  if (std::uncaught_exceptions() > 0) return;
  if (window_ != MPI_WIN_NULL) MPI_Win_unlock_all(window_);
  // Collective: the counter lives until the last rank has asked for the last time, and so must what answers for it.
  MPI_Barrier(comm_);
  progress_ = std::jthread();
  if (window_ != MPI_WIN_NULL) MPI_Win_free(&window_);
  MPI_Comm_free(&comm_);
}

std::int64_t WorkQueue::add(std::int64_t count) {
  WEFT_ASSERT(comm_ != MPI_COMM_NULL);
  const std::lock_guard lock(mutex_);
  if (!works_) return items_;
  // Members: should the owner be gone, MPI keeps them for ever.
  added_ = count;
  MPI_Request request;
  check(MPI_Rget_accumulate(&added_, 1, MPI_INT64_T, &before_, 1, MPI_INT64_T, 0, 0, 1, MPI_INT64_T,
                            MPI_SUM, window_, &request),
        "MPI_Rget_accumulate");
  for (int done = 0, asked = 1;; ++asked) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return before_;
    if (asked % 1000 == 0 && owner_lost_ && owner_lost_()) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  works_ = false;
  return items_;
}

std::int64_t WorkQueue::next() {
  const std::int64_t taken = add(1);
  return taken < items_ ? taken : -1;
}

void WorkQueue::close() { add(items_); }

}  // namespace weft
