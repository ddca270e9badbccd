#include "jobs/lost_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "core/log.h"
#include "parallel/end_job.h"

namespace weft {

const ClipBatch& OrderedClips::batch(std::int64_t place) const {
  return batches_[static_cast<std::size_t>(place)];
}

const std::string& OrderedClips::name(std::int64_t clip) const {
  return job_.items[static_cast<std::size_t>(clip)].name;
}

const OrderedClips::Word& OrderedClips::word_of(int lost_rank) {
  const auto [word, is_new] = words_.try_emplace(lost_rank);
  if (is_new)
    word->second = {ClipManifest::of_rank(output_, lost_rank), roll_.state(lost_rank).settled};
  return word->second;
}

bool OrderedClips::finished(int lost_rank, std::int64_t clip) {
  const ClipItem& item = job_.items[static_cast<std::size_t>(clip)];
  return is_finished(word_of(lost_rank).finished, item.name, item.key, output_);
}

TakenClips OrderedClips::taken(int lost_rank, std::int64_t place) {
  TakenClips clips;
  for (const std::int64_t clip : batch(place))
    if (finished(lost_rank, clip))
      ++clips.finished;
    else if (!word_of(lost_rank).settled.contains(clip))
      clips.in_hand.push_back(name(clip));
  return clips;
}

ClipBatch OrderedClips::left(std::int64_t place) {
  ClipBatch clips = batch(place);
  for (int rank = 0; rank < roll_.ranks(); ++rank)
    if (roll_.lost(rank))
      std::erase_if(clips, [&](std::int64_t clip) {
        return finished(rank, clip) || word_of(rank).settled.contains(clip);
      });
  return clips;
}

void end_for_lost(const RankRoll& roll, int rank, MPI_Comm world) {
  log::error("ERROR: rank {} on {} is lost before the clips were begun", rank,
             roll.state(rank).host);
  log::error(
      "HINT: did it run out of memory? the log of its node tells; the same command goes on where "
      "this one was");
  end_job(world, Exit::hang);
}

void leave_group(const RankRoll& roll, int rank) {
  log::warn("rank {} on {} is lost: this rank, of the same group, ends too", rank,
            roll.state(rank).host);
  std::fflush(nullptr);
  // As that one did. mpirun, which has been told to bear it, takes an end without MPI_Finalize for worse.
  kill(getpid(), SIGKILL);
}

void leave_job(int code, bool speaks, MPI_Comm world) {
  std::fflush(nullptr);
  if (speaks && code != 0) end_job(world, static_cast<Exit>(code));
  _exit(0);
}

bool exit_codes_pass() {
  const char* set = std::getenv("OMPI_MCA_orte_abort_on_non_zero_status");
  return set == nullptr || (std::string_view(set) != "0" && std::string_view(set) != "false");
}

void count_left(GenerateReport& report, const RankRoll& roll, OrderedClips& clips) {
  std::vector<RollEntry> states;
  std::vector<bool> lost(static_cast<std::size_t>(roll.ranks()), false);
  for (const LostRank& l : report.lost) lost[static_cast<std::size_t>(l.rank)] = true;
  for (int r = 0; r < roll.ranks(); ++r) states.push_back(roll.state(r));
  if (std::any_of(states.begin(), states.end(), [](const RollEntry& s) { return s.stopped; }))
    return;
  const auto left =
      left_places(states, lost, clips.count(), true,
                  [&](int rank, std::int64_t place) { return clips.settled(rank, place); });
  for (std::int64_t p = 0; p < clips.count(); ++p)
    if (const LeftPlace& place = left[static_cast<std::size_t>(p)]; place.open)
      for (const std::int64_t clip : clips.left(p))
        report.failures.push_back(fmt::format("{}: {} ranks were lost that had it in hand",
                                              clips.name(clip), place.losses));
}

}  // namespace weft
