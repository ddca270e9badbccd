// What a rank may still take of its device's memory, measured now.
#pragma once

#include <mpi.h>

#include <cstddef>

namespace weft {

// Collective. Bytes for this rank: of its GPU's free memory, or of what its host has available (its control group's limit
// counts), shared out evenly among the ranks that use the same; a 16th stays free for what is not ours to count.
std::size_t free_memory(MPI_Comm world);

}  // namespace weft
