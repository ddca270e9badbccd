// Which parts a rank takes at a time, and in which order: the plans that animate.plan names.
#pragma once

#include <string>
#include <vector>

#include "jobs/animate/parts.h"

namespace weft {

enum class ClipPlan { clips, frames, apart };
inline constexpr ClipPlan all_clip_plans[] = {ClipPlan::clips, ClipPlan::frames, ClipPlan::apart};
const char* name_of(ClipPlan plan);

// The parts `missing` as batches in the order of the queue; the costliest clips come first.
//   clips   all of a clip in one batch
//   frames  a piece a batch; the preparation belongs to the first
//   apart   the preparation too is a batch, in front of the pieces of the clip before
// A join stands `ranks` places behind its clip's last piece, so that it rarely has to wait.
std::vector<ItemBatch> lay_out(ClipPlan plan, const std::vector<ClipPart>& parts,
                               const std::vector<std::int64_t>& missing,
                               const std::vector<ClipCost>& costs, int ranks);

// Until the last of `ranks` equal ranks is done, in the unit of the costs: each takes the next
// batch when it is free, and waits for what its parts need.
double makespan(const std::vector<ItemBatch>& batches, const std::vector<ClipPart>& parts,
                const std::vector<ClipCost>& costs, int ranks);

struct ChosenPlan {
  ClipPlan plan = ClipPlan::clips;
  std::vector<ItemBatch> batches;
  std::vector<double> makespans;  // of all_clip_plans
  // "frames over ranks, 1.9x as quick as clips ...": for the log.
  std::string why;
};

// `wish`: animate.plan. Of equal plans (to 1 %) the first is taken, which waits least.
ChosenPlan choose_plan(const std::string& wish, const std::vector<ClipPart>& parts,
                       const std::vector<std::int64_t>& missing, const std::vector<ClipCost>& costs,
                       int ranks);

}  // namespace weft
