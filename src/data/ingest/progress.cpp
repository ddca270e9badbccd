#include "data/ingest/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "core/log.h"

namespace weft {
namespace {

constexpr int tag = 17;

}  // namespace

IngestProgress::IngestProgress(MPI_Comm comm, std::int64_t videos, const char* unit)
    : comm_(comm), total_videos_(videos), unit_(unit) {
  MPI_Comm_rank(comm, &rank_);
  MPI_Comm_size(comm, &size_);
  counts_.resize(static_cast<std::size_t>(size_), Counts{});
  terminal_ = rank_ == 0 && isatty(STDERR_FILENO) != 0;
}

void IngestProgress::add(std::int64_t frames, std::int64_t clips, std::int64_t videos) {
  Counts& mine = counts_[static_cast<std::size_t>(rank_)];
  mine[0] += frames;
  mine[1] += clips;
  mine[2] += videos;
  const double since = std::chrono::duration<double>(Clock::now() - last_).count();
  if (rank_ != 0) {
    if (since < 1) return;
    // MPI sends four numbers eagerly, so this does not wait for rank 0.
    MPI_Send(mine.data(), 4, MPI_INT64_T, 0, tag, comm_);
    last_ = Clock::now();
  } else if (since >= (terminal_ ? 0.2 : 10)) {
    receive();
    show(false);
    last_ = Clock::now();
  }
}

void IngestProgress::receive() {
  for (;;) {
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &there, &status);
    if (there == 0) return;
    MPI_Recv(counts_[static_cast<std::size_t>(status.MPI_SOURCE)].data(), 4, MPI_INT64_T,
             status.MPI_SOURCE, tag, comm_, MPI_STATUS_IGNORE);
  }
}

void IngestProgress::show(bool last) {
  Counts sum{};
  for (const Counts& c : counts_)
    for (std::size_t i = 0; i < 4; ++i) sum[i] += c[i];
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const auto rate = [&](std::int64_t n) {
    return static_cast<double>(n) / std::max(seconds, 1e-3);
  };
  const std::string text =
      unit_ == "videos"
          ? fmt::format("{} of {} videos, {} clips, {} frames, {:.0f} frames/s", sum[2],
                        total_videos_, sum[1], sum[0], rate(sum[0]))
          : fmt::format("{} of {} {}, {:.0f}/s", sum[2], total_videos_, unit_, rate(sum[2]));
  if (!terminal_) return log::write_info("ingest: " + text);
  constexpr int width = 24;
  const int filled = static_cast<int>(width * sum[2] / std::max<std::int64_t>(1, total_videos_));
  std::fprintf(stderr, "\r[%s%s] %s\x1b[K%s",
               std::string(static_cast<std::size_t>(filled), '#').c_str(),
               std::string(static_cast<std::size_t>(width - filled), '.').c_str(), text.c_str(),
               last ? "\n" : "");
  std::fflush(stderr);
}

void IngestProgress::finish() {
  counts_[static_cast<std::size_t>(rank_)][3] = 1;
  if (rank_ != 0) {
    MPI_Send(counts_[static_cast<std::size_t>(rank_)].data(), 4, MPI_INT64_T, 0, tag, comm_);
    return;
  }
  for (;;) {
    receive();
    int done = 0;
    for (const Counts& c : counts_) done += static_cast<int>(c[3]);
    const double since = std::chrono::duration<double>(Clock::now() - last_).count();
    if (done == size_) break;
    if (since >= (terminal_ ? 0.2 : 10)) {
      show(false);
      last_ = Clock::now();
    }
    // Sleep: a busy wait would take cores on which other ranks decode.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (terminal_) show(true);
}

}  // namespace weft
