#include "data/ingest/progress.h"

#include <chrono>
#include <exception>
#include <filesystem>
#include <string_view>
#include <thread>

#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "tensor/device.h"

namespace weft {
namespace {

constexpr int counts_tag = 17;
constexpr double message_seconds = 1, look_seconds = 0.2;

int size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return size;
}

}  // namespace

std::unique_ptr<FolderLock> lock_output(const Deck& deck, const std::string& output,
                                        const std::vector<std::string>& inputs, MPI_Comm comm) {
  if (log::rank() == 0) {
    const std::filesystem::path store = absolute_path(output);
    keep_files(deck, "ingest.output", inputs,
               [&](const std::filesystem::path& path) { return path == store; });
  }
  warn_of_replacing(output);
  auto lock = lock_store(output, "ingest.output");
  MPI_Barrier(comm);  // nobody touches files beside the store before rank 0 has it
  return lock;
}

IngestProgress::IngestProgress(MPI_Comm comm, const std::string& output, std::int64_t total,
                               const char* noun)
    : comm_(comm),
      rank_(log::rank()),
      size_(size_of(comm)),
      noun_(noun),
      total_(total),
      videos_(std::string_view(noun) != "image"),
      counts_(static_cast<std::size_t>(size_), Counts{}),
      last_(now_seconds()),
      progress_({output + ".status.json", "ingest", noun, "ingest", total, 0, rank_, size_}) {
  begin_part(noun_ + "s");
}

void IngestProgress::add(std::int64_t frames, std::int64_t clips, std::int64_t inputs) {
  Counts& mine = counts_[rank_];
  mine[0] += frames;
  mine[1] += clips;
  mine[2] += inputs;
  const double since = now_seconds() - last_;
  if (rank_ != 0) {
    if (since < message_seconds) return;
    // MPI sends four numbers eagerly, so this does not wait for rank 0.
    MPI_Send(mine.data(), 4, MPI_INT64_T, 0, counts_tag, comm_);
    last_ = now_seconds();
  } else if (since >= look_seconds) {
    receive();
    show();
  }
}

void IngestProgress::receive() {
  for (;;) {
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, counts_tag, comm_, &there, &status);
    if (there == 0) return;
    MPI_Recv(counts_[status.MPI_SOURCE].data(), 4, MPI_INT64_T, status.MPI_SOURCE, counts_tag,
             comm_, MPI_STATUS_IGNORE);
  }
}

std::int64_t IngestProgress::sum(std::size_t what) const {
  std::int64_t all = 0;
  for (const Counts& c : counts_) all += c[what];
  return all;
}

void IngestProgress::show() {
  last_ = now_seconds();
  Progress::Values values;
  if (videos_)
    values = {{"clips", static_cast<double>(sum(1))}, {"frames", static_cast<double>(sum(0))}};
  progress_.advance(sum(2), static_cast<double>(sum(2)), static_cast<double>(total_), values);
}

void IngestProgress::finish() {
  counts_[rank_][3] = 1;
  if (rank_ != 0) {
    MPI_Send(counts_[rank_].data(), 4, MPI_INT64_T, 0, counts_tag, comm_);
    return;
  }
  for (;;) {
    receive();
    if (sum(3) == size_) break;
    if (now_seconds() - last_ >= look_seconds) show();
    // Sleep: a busy wait would take cores on which other ranks decode.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  show();
  begin_part("end");
}

int IngestProgress::end(std::int64_t lost, bool strict, const std::string& broken) {
  const bool failed = strict && lost > 0;
  const int code = failed ? static_cast<int>(Exit::data) : 0;
  const std::string error = failed ? broken + ", and ingest.strict is set" : "";
  if (rank_ != 0) return code;
  if (failed) log::error("{}", error);
  JobWork work;
  work.unit = noun_;
  work.items = static_cast<double>(sum(2));
  for (const auto& [part, seconds] : wall_parts())
    if (part == noun_ + "s") work.seconds = seconds;
  work.threads = threads_of_rank();
  work.hosts.resize(size_);
  progress_.set_work(std::move(work));
  progress_.end(code, sum(2), error);
  return code;
}

int on_first_rank(MPI_Comm comm, const std::function<void()>& work) {
  int code = 0;
  std::exception_ptr failure;
  if (log::rank() == 0) {
    try {
      work();
    } catch (const Error& e) {
      failure = std::current_exception();
      code = static_cast<int>(e.code());
    }
  }
  MPI_Bcast(&code, 1, MPI_INT, 0, comm);
  if (failure) std::rethrow_exception(failure);
  return code;
}

}  // namespace weft
