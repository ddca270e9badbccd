#include "commands/lost_ranks.h"

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

const ClipItem& OrderedClips::item(std::int64_t place) const {
  return job_.items[static_cast<std::size_t>(order_[static_cast<std::size_t>(place)])];
}

bool OrderedClips::finished(int lost_rank, std::int64_t place) {
  const auto [part, is_new] = parts_.try_emplace(lost_rank);
  if (is_new) part->second = ClipManifest::of_rank(output_, lost_rank);
  return is_finished(part->second, item(place).name, item(place).key, output_);
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
                  [&](int rank, std::int64_t place) { return clips.finished(rank, place); });
  for (std::int64_t p = 0; p < clips.count(); ++p)
    if (const LeftPlace& place = left[static_cast<std::size_t>(p)]; place.open)
      report.failures.push_back(fmt::format("{}: {} ranks were lost that had it in hand",
                                            clips.item(p).name, place.losses));
}

}  // namespace weft
