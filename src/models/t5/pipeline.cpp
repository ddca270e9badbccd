#include "models/t5/pipeline.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "core/error.h"

namespace weft {
namespace {

// Short beside a layer's work, long beside the cost of polling MPI: the core is needed for
// computing.
constexpr auto nap = std::chrono::microseconds(200);

}  // namespace

MessageProgress::MessageProgress(MPI_Comm comm) {
  int provided = 0;
  MPI_Query_thread(&provided);
  if (provided != MPI_THREAD_MULTIPLE) return;
  thread_ = std::thread([this, comm] {
    constexpr int nobody = 99;  // no message has this tag: probing only lets MPI make progress
    while (!stop_) {
      int flag = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, nobody, comm, &flag, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(nap);
    }
  });
}

MessageProgress::~MessageProgress() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

RowStream::RowStream(MPI_Comm comm, int peer, int tag, std::vector<std::int64_t> rows,
                     std::size_t row_bytes)
    : comm_(comm), peer_(peer), tag_(tag), rows_(std::move(rows)), row_bytes_(row_bytes) {
  // Counts rows: a count of bytes may not fit MPI's int.
  MPI_Type_contiguous(static_cast<int>(row_bytes), MPI_BYTE, &row_);
  MPI_Type_commit(&row_);
  const std::int64_t most = rows_.empty() ? 0 : *std::max_element(rows_.begin(), rows_.end());
  for (auto& b : buffers_) b.resize(static_cast<std::size_t>(most) * row_bytes);
}

RowStream::~RowStream() {
  // During stack unwinding messages may still be in flight, and nothing waits for them: leak their
  // buffers.
  if (std::uncaught_exceptions() > 0) {
    for (auto& b : buffers_) new std::vector<std::byte>(std::move(b));
    return;
  }
  for (MPI_Request& r : requests_)
    if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
  MPI_Type_free(&row_);
}

std::span<std::byte> RowStream::buffer(std::size_t i) {
  return std::span(buffers_[i % 2]).first(static_cast<std::size_t>(rows_.at(i)) * row_bytes_);
}

bool RowStream::test(std::size_t slot) {
  MPI_Request& request = requests_[slot];
  if (request == MPI_REQUEST_NULL) return true;
  int done = 0;
  MPI_Status status;
  MPI_Test(&request, &done, &status);
  if (done) MPI_Get_count(&status, row_, &came_[slot]);
  return done != 0;
}

void RowStream::wait(std::size_t slot, const std::function<void()>& meanwhile) {
  while (!test(slot)) {
    if (meanwhile) meanwhile();
    std::this_thread::sleep_for(nap);
  }
}

std::span<std::byte> RowStream::next_buffer(const std::function<void()>& meanwhile) {
  wait(begun_ % 2, meanwhile);
  return buffer(begun_);
}

void RowStream::send() {
  MPI_Isend(buffer(begun_).data(), static_cast<int>(rows_[begun_]), row_, peer_, tag_, comm_,
            &requests_[begun_ % 2]);
  ++begun_;
}

void RowStream::send_end(const std::function<void()>& meanwhile) {
  wait(begun_ % 2, meanwhile);
  MPI_Isend(nullptr, 0, row_, peer_, tag_, comm_, &requests_[begun_ % 2]);
}

void RowStream::drain(const std::function<void()>& meanwhile) {
  for (std::size_t slot : {0, 1}) wait(slot, meanwhile);
}

void RowStream::begin() {
  if (begun_ == rows_.size() || ended_) return;
  WEFT_ASSERT(begun_ < taken_ + 2);
  MPI_Irecv(buffer(begun_).data(), static_cast<int>(rows_[begun_]), row_, peer_, tag_, comm_,
            &requests_[begun_ % 2]);
  ++begun_;
}

bool RowStream::has_come() { return taken_ != begun_ && test(taken_ % 2); }

std::span<const std::byte> RowStream::take(const std::function<void()>& meanwhile) {
  const std::size_t slot = taken_ % 2;
  wait(slot, meanwhile);
  if (came_[slot] > 0) return buffer(taken_++);
  // The end of the stream: nothing will arrive in the other buffer, so cancel its receive.
  ended_ = true;
  MPI_Request& other = requests_[1 - slot];
  if (other == MPI_REQUEST_NULL) return {};
  MPI_Cancel(&other);
  MPI_Wait(&other, MPI_STATUS_IGNORE);
  return {};
}

}  // namespace weft
