// The ways of computing (ops/ways.h) that a training takes on a GPU.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "config/deck.h"
#include "data/clip_source.h"
#include "train/memory_plan.h"

namespace weft {

// Collective. Sets them, and returns for people which they are, on rank 0. They are measured once a
// run, by rank 0, while all ranks run `try_each_bucket`: a micro-batch of each bucket. They are
// stored, so that a restart repeats the choices; other ranks, whose measurements would disturb and
// contradict each other, are told. Another run may choose differently, with other last bits: with
// parallel.deterministic nothing is measured.
std::string choose_ways(const Deck& deck, const ClipSource& source,
                        std::span<const std::int64_t> batch_sizes,
                        std::span<const StepMemory> memory, MPI_Comm world,
                        const std::function<void()>& try_each_bucket);

}  // namespace weft
