// What a generation took, rank by rank: for the end of the log and for OUT/generate_report.json.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace weft {

// Of one rank; numbers alone, so that it travels as it is.
struct GenerateShare {
  std::int64_t clips = 0, failed = 0;
  double busy = 0;      // seconds at work on clips
  double last_end = 0;  // seconds from the start of the queue until its last clip was made
  double encode = 0, sample = 0, decode = 0;  // parts of busy: references, steps, pictures
  double write = 0, write_wait = 0;  // the writing thread at work; clips that waited for it
  double arena_planned = 0, arena_peak = 0, arena_capacity = 0;  // bytes
  double weights = 0, resident = 0;  // bytes: of the models; of the process on its host
  double micro_batch = 0;            // frames that the VAE takes at once
  double stopped = 0;                // 1: asked to stop
};

// Seconds of the stages over the whole batch, as rank 0 saw them.
struct GenerateStages {
  double text = 0, load = 0, clips = 0;
};

struct GenerateReport {
  std::vector<GenerateShare> ranks;
  std::vector<std::string> failures;  // "NAME: why", of all ranks
  GenerateStages stages;
  std::vector<std::size_t> text_planned,
      text_taken;  // [rank], bytes of T5; empty where it did not run
  std::int64_t wanted = 0, finished_before = 0;
  int ranks_a_clip = 1;
  bool share_out = true;

  // Shares of the time until the last clip was made that each rank was at work.
  std::vector<double> busy_shares() const;
  std::int64_t made() const;
  void print() const;
  void write(const std::filesystem::path& directory) const;
};

// Collective: what every rank has to say, on rank 0 (elsewhere only the sums are right, failures are this rank's).
GenerateReport gather_report(const GenerateShare& mine, const std::vector<std::string>& failures,
                             MPI_Comm world);

}  // namespace weft
