// What the settings say of the device (README.md).
#pragma once

#include <cstddef>

namespace emulation {

// What differs between compute capabilities, as the tables of the CUDA C++ programming guide have
// it.
struct Capability {
  int major, minor;
  std::size_t shared_memory;  // most bytes a block can have
  int threads;                // of a multiprocessor
};
// WEFT_EMULATION_CAPABILITY; ends the process if that is none of those.
const Capability& capability();

}  // namespace emulation
