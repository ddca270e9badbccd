// Compute capability 9.0, where WEFT_EMULATION_CAPABILITY (device.h) asks for it: mbarriers, bulk
// copies, wgmma.
#pragma once

namespace emulation {

// Perhaps does one of the bulk copies under way: called while threads wait.
void advance_bulk_copies();
// Nothing asynchronous may outlive its block.
void end_hopper_block();
// Does what the kernel added to device memory and is not there yet.
void end_hopper_kernel();

}  // namespace emulation
