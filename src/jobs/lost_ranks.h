// What `weft generate` does about ranks that are lost: their processes gone, killed by the system for want of memory or with
// their node. The launcher must bear it (docs/generate.md), or it ends the whole job.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "jobs/generate/clip_batches.h"
#include "jobs/generate/job.h"
#include "jobs/generate/report.h"
#include "jobs/manifest.h"
#include "jobs/rank_roll.h"

namespace weft {

// The batches that are to be made, by their places in the order, and what of them lost ranks have settled: finished, or
// failed at.
class OrderedClips {
 public:
  OrderedClips(std::filesystem::path output, const GenerateJob& job, RankRoll& roll)
      : output_(std::move(output)), job_(job), roll_(roll) {}
  void set_batches(std::vector<ClipBatch> batches) { batches_ = std::move(batches); }
  std::int64_t count() const { return std::ssize(batches_); }
  const ClipBatch& batch(std::int64_t place) const;
  const std::string& name(std::int64_t clip) const;
  // What a lost rank has done of a place that it took, by its part of the manifest and its file on the roll, read once: they do
  // not change any more.
  TakenClips taken(int lost_rank, std::int64_t place);
  bool settled(int lost_rank, std::int64_t place) {
    return taken(lost_rank, place).in_hand.empty();
  }
  // The clips of a place that no lost rank has settled.
  ClipBatch left(std::int64_t place);

 private:
  struct Word {
    std::map<std::string, FinishedClip> finished;
    std::set<std::int64_t> settled;
  };
  const Word& word_of(int lost_rank);
  bool finished(int lost_rank, std::int64_t clip);

  std::filesystem::path output_;
  const GenerateJob& job_;
  RankRoll& roll_;
  std::vector<ClipBatch> batches_;
  std::map<int, Word> words_;
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
