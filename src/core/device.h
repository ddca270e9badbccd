// Which kind of processor a tensor lives on. A rank owns exactly one device.
#pragma once

#include <string>

namespace weft {

enum class DeviceKind { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // the GPU's number on this host; 0 for the CPU
};

// The device that deck key device.kind ("auto", "cpu", "cuda") asks for. Throws Exit::usage when
// "cuda" is asked of a build or a machine without it.
Device choose_device(const std::string& kind);

// Processor threads this rank may use: `requested` if positive, otherwise the usable cores of the
// host divided by the ranks on it, at least one. Also sets OpenMP's thread count.
int set_threads(int requested, int ranks_on_host);

// "Intel(R) Xeon(R) ..., 2 of 2 cores, AVX-512": for the start table.
std::string describe_cpu();

// Resident set of this process in bytes, from /proc/self/statm.
std::size_t resident_bytes();

}  // namespace weft
