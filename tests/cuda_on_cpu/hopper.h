// Compute capability 9.0, where WEFT_EMULATION_CAPABILITY asks for it: mbarriers, bulk copies,
// wgmma.
#pragma once

#include <cstddef>

namespace emulation {

// False: the device is of compute capability 8.0.
bool is_hopper();
// Most shared memory a block can have.
inline std::size_t most_shared_memory() { return (is_hopper() ? 227 : 163) * std::size_t{1024}; }

// Perhaps does one of the bulk copies under way: called while threads wait.
void advance_bulk_copies();
// Nothing asynchronous may outlive its block.
void end_hopper_block();

}  // namespace emulation
