// What `weft generate` does about ranks that are lost: their processes gone, killed by the system for want of memory or with
// their node. The launcher must bear it (docs/generate.md), or it ends the whole job.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "infer/generate_job.h"
#include "infer/generate_report.h"
#include "infer/manifest.h"
#include "infer/rank_roll.h"

namespace weft {

// The clips that are to be made, by their places in the order, and which of them lost ranks have finished.
class OrderedClips {
 public:
  OrderedClips(std::filesystem::path output, const GenerateJob& job,
               const std::vector<std::int64_t>& order)
      : output_(std::move(output)), job_(job), order_(order) {}
  std::int64_t count() const { return static_cast<std::int64_t>(order_.size()); }
  const ClipItem& item(std::int64_t place) const;
  // By a lost rank's part of the manifest, read once: it does not change any more.
  bool finished(int lost_rank, std::int64_t place);

 private:
  std::filesystem::path output_;
  const GenerateJob& job_;
  const std::vector<std::int64_t>& order_;
  std::map<int, std::map<std::string, FinishedClip>> parts_;
};

// A rank was lost while all work together: ends the job with Exit::hang.
void end_for_lost(const RankRoll& roll, int rank, MPI_Comm world);
// A rank was lost that this one makes clips with: this one ends too, and what they had in hand is left to other groups.
void leave_group(const RankRoll& roll, int rank);
// Ends this rank without MPI, which would wait for those that are lost. The one that `speaks` for all passes the code on.
[[noreturn]] void leave_job(int code, bool speaks, MPI_Comm world);
// Whether the launcher takes exit codes from ranks that end by themselves. mpirun that bears losses takes them from
// MPI_Abort alone.
bool exit_codes_pass();
// Adds to the failures clips that no rank has made, though none was asked to stop: left when it was too late, or two ranks
// were lost over them.
void count_left(GenerateReport& report, const RankRoll& roll, OrderedClips& clips);

}  // namespace weft
