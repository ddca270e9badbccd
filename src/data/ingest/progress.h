// What the ingests of footage and of labelled images share: their output is theirs alone, rank 0
// reports the progress of all ranks, and all end together.
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/file.h"
#include "core/progress.h"

namespace weft {

// Keeps the output from other jobs while the result lives (on rank 0; null on others), and warns of
// what it replaces. Collective. `inputs` are all files that the job reads, on rank 0. Exit::usage
// where the output is one of them, Exit::data where another job writes it.
std::unique_ptr<FolderLock> lock_output(const Deck& deck, const std::string& output,
                                        const std::vector<std::string>& inputs, MPI_Comm comm);

// Ranks report to rank 0 at most once a second, in small messages for which no rank waits.
class IngestProgress {
 public:
  // Progress of the job that writes the store `output`, whose status goes into OUTPUT.status.json.
  // `noun` is what there are `total` of: videos, pictures, or labelled "image"s, which have no
  // clips.
  IngestProgress(MPI_Comm comm, const std::string& output, std::int64_t total,
                 const char* noun = "video");

  // Adds to this rank's counts; shows or tells them when it is time.
  void add(std::int64_t frames, std::int64_t clips, std::int64_t inputs);
  // This rank is done. Rank 0 goes on showing the others' progress until all are.
  void finish();
  // The job ends: `lost` of its items were broken, which is a fault if `strict`; `broken` says so.
  // Returns the exit code.
  int end(std::int64_t lost, bool strict, const std::string& broken);

 private:
  using Counts = std::array<std::int64_t, 4>;  // frames, clips, inputs, done

  void receive();
  void show();
  std::int64_t sum(std::size_t what) const;

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::string noun_;
  std::int64_t total_;
  bool videos_;
  std::vector<Counts> counts_;  // by rank; on other ranks than 0 only their own is kept
  double last_;                 // message or look at the messages
  Progress progress_;
};

// Runs `work` on rank 0 while the other ranks wait. Collective: all return 0, or the code of the
// Error that it threw, which rank 0 throws on.
int on_first_rank(MPI_Comm comm, const std::function<void()>& work);

}  // namespace weft
