// What all ranks agree on before the text encoder runs: micro-batches of captions, memory, and the
// placement of layers.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "models/t5/options.h"
#include "models/t5/placement.h"

namespace weft {

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
