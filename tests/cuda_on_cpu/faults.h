// What happens when the emulation finds a fault.
#pragma once

#include <string>

namespace emulation {

// The function at an address by this program's symbol table, without its parameters.
std::string name_of(const void* function);

// Makes illegal accesses end by die() with a description. Once an OS thread.
void catch_faults();

// Names what `p` is near among device allocations, or is empty.
std::string describe_device_address(const void* p);

}  // namespace emulation
