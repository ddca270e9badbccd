// `weft generate`: prompts to clips.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// Collective. All prompts through the text encoder, split over the ranks, whose memory is then
// given back; then denoiser and codec on every rank (or group of parallel.sp ranks), to which rank
// 0 hands out clips, the longest first. Files, OUT/generated.jsonl and OUT/generate_report.json are
// written as clips get finished; clips that are finished are not made again. Returns the exit code:
// 0, 3 if clips failed (the others are there), 75 if asked to stop.
int generate(const Deck& deck, MPI_Comm world);
Command generate_command();

}  // namespace weft
