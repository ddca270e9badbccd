// Places the text encoder's layers on ranks by the memory that each has. A function of sizes alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "models/t5/options.h"

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

}  // namespace weft
