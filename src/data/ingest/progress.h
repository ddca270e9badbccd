// The progress of all ranks, told by rank 0.
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/progress.h"

namespace weft {

// Ranks report to rank 0 at most once a second, in small messages for which no rank waits.
class IngestProgress {
 public:
  // Of the job that writes the store `output`, whose status goes into OUTPUT.status.json. `noun` is
  // what there are `total` of: videos, pictures, or labelled "image"s, which have no clips.
  IngestProgress(MPI_Comm comm, const std::string& output, std::int64_t total,
                 const char* noun = "video");

  // Adds to this rank's counts; shows or tells them when it is time.
  void add(std::int64_t frames, std::int64_t clips, std::int64_t inputs);
  // This rank is done. Rank 0 goes on showing the others' progress until all are.
  void finish();
  // The job ends with this exit code.
  void end(int code, const std::string& error = "");

 private:
  using Counts = std::array<std::int64_t, 4>;  // frames, clips, inputs, done

  void receive();
  void show();
  std::int64_t sum(std::size_t what) const;

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::int64_t total_;
  bool videos_;
  std::vector<Counts> counts_;  // by rank; on other ranks than 0 only their own is kept
  double last_;                 // message or look at the messages
  Progress progress_;
};

}  // namespace weft
