// What all ranks agree on before the text encoder runs: micro-batches of captions, memory, and
// which rank holds which layers. place_t5() is a function of sizes alone.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "models/t5/options.h"
#include "models/t5/placement.h"

namespace weft {

struct T5Part {
  int rank = 0;
  std::int64_t first = 0,
               last = 0;    // layers; the first part has the embedding too, the last the final norm
  std::size_t weights = 0;  // bytes
};

struct T5Placement {
  std::vector<T5Part> parts;  // in the order of the layers; empty if the encoder does not fit
  std::size_t missing = 0;    // bytes that the ranks lack together, if it does not fit
  std::int64_t even = 0;      // most layers of a rank if all had room enough
};

// memory [rank]: bytes that the encoder may take there; `work`: bytes beside weights that each rank
// with layers needs. The most layers of a rank are as few as the memory allows, since the slowest
// part sets the pace; the first part goes to the lowest rank with room for the embedding and a
// layer, the others follow in order of rank, and ranks without room, or without need, have none.
T5Placement place_t5(const T5Deck& config, std::span<const std::size_t> memory, std::size_t work);

// "0 to 11 on rank 0 (4.5 GiB), 12 to 23 on rank 1 (4.4 GiB)".
std::string describe(const T5Placement& placement);

struct TextBatch {
  std::vector<std::size_t> texts;  // by their places in the list
  std::int64_t tokens = 0, longest = 0;
};

// Captions of like length together, longest first, `captions` to a batch: the parts of the encoder
// work evenly, and the first batch takes the most memory.
std::vector<TextBatch> batch_captions(const std::vector<std::int64_t>& tokens,
                                      std::int64_t captions);

struct T5Job {
  std::vector<TextBatch> batches;
  std::int64_t captions = 0;  // to a batch
  T5Placement placement;
  std::vector<std::size_t> limits;  // [rank] bytes
  std::size_t arena = 0;            // bytes of each part's arena
  std::size_t messages =
      0;  // bytes of each part's messages, which count where the device is the host
};

// Arena bytes of any part, with room for the holes that later, shorter batches leave.
std::size_t t5_arena_bytes(const T5Deck& config, std::int64_t tokens, std::int64_t longest);

// Collective. `tokens` of each text, on all ranks. Uses micro-batches smaller than t5.micro_batch,
// with a warning, if those do not fit; Exit::usage if not even one caption at a time fits.
T5Job plan_t5(const T5Deck& config, const std::vector<std::int64_t>& tokens, MPI_Comm world);

}  // namespace weft
