// Registers of the compiled kernels, as validation/results/kernels_resources.md records them.
#pragma once

#include <cstddef>

namespace emulation {

constexpr int registers_in_all = 65536;  // of a multiprocessor, and most of a block

// Of one thread: from the page that WEFT_EMULATION_RESOURCES names; 64 without one, and for kernels
// that are not on it.
int registers_of(const void* kernel);
// Of a block, in portions of 256 a warp.
int registers_of_block(const void* kernel, std::size_t threads);

}  // namespace emulation
