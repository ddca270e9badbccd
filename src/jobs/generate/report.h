// What a generation took, rank by rank: for the end of the log and for OUT/generate_report.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "jobs/rank_roll.h"

namespace weft {

// Of one rank.
struct GenerateShare {
  std::int64_t clips = 0, failed = 0;
  double busy = 0;      // seconds at work on clips
  double last_end = 0;  // seconds from the start of the queue until its last clip was made
  double encode = 0, sample = 0, decode = 0;  // parts of busy: references, steps, pictures
  double write = 0, write_wait = 0;  // the writing thread at work; clips that waited for it
  double arena_planned = 0, arena_peak = 0, arena_capacity = 0;  // bytes
  double frames_planned = 0, frames_peak = 0;   // bytes of clips' frames in host memory
  double weights = 0, resident = 0;             // bytes: of the models; of the process on its host
  double micro_batch = 0;                       // frames that the VAE takes at once
  double stopped = 0;                           // 1: asked to stop
  std::map<std::string, std::int64_t> batches;  // clips sampled together: how often
};

// Seconds of the stages of the whole job, as rank 0 saw them.
struct GenerateStages {
  double text = 0, load = 0, clips = 0;
};

// Of a place in the order that a lost rank took: how many of its clips that one has finished, and the names of those that it
// has neither finished nor failed at.
struct TakenClips {
  std::int64_t finished = 0;
  std::vector<std::string> in_hand;
};

// A rank whose process went away.
struct LostRank {
  int rank = 0;
  std::string host;
  std::vector<std::string> in_hand;  // names of clips; whoever was free made them
};

struct GenerateReport {
  std::vector<GenerateShare> ranks;   // of those that are lost: clips and failures alone
  std::vector<std::string> failures;  // "NAME: why", of all ranks
  std::vector<LostRank> lost;
  int speaker = -1;  // the first rank that is not lost
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

// A rank's last word for its file on the roll: its share and what failed there.
std::string last_word(const GenerateShare& mine, const std::vector<std::string>& failures);
// What all ranks have had to say when they are at their end. Lost ones are entered with what `taken` knows. Alike on every rank,
// but for what lost ones have finished: the speaker gathers their manifests, and only it is sure to find them.
GenerateReport read_report(const RankRoll& roll,
                           const std::function<TakenClips(int rank, std::int64_t place)>& taken);

}  // namespace weft
