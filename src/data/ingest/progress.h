// Shows the progress of all ranks on one line of rank 0's terminal (or a plain line every ten
// seconds).
#pragma once

#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// Ranks report to rank 0 at most once a second, in small messages for which no rank waits.
class IngestProgress {
 public:
  // `unit` is what there are so many of: "videos", or "images", which have no frames.
  IngestProgress(MPI_Comm comm, std::int64_t videos, const char* unit = "videos");

  // Adds to this rank's counts; shows or tells them when it is time.
  void add(std::int64_t frames, std::int64_t clips, std::int64_t videos);
  // This rank is done. Rank 0 goes on showing the others' progress until all are.
  void finish();

 private:
  using Counts = std::array<std::int64_t, 4>;  // frames, clips, videos, done
  using Clock = std::chrono::steady_clock;

  void receive();
  void show(bool last);

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::int64_t total_videos_;
  std::string unit_;
  std::vector<Counts> counts_;  // by rank; on other ranks than 0 only their own is kept
  bool terminal_ = false;
  Clock::time_point start_ = Clock::now(), last_ = Clock::now();
};

}  // namespace weft
