// This program's version and its host: name, the memory and processor time that this process may
// use, kinds of file systems; how sizes are written. Control groups of both versions (a container,
// a Slurm job) count, from the process's own up to the root of the tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace weft {

// As gethostname() has it; "?" if it has none.
std::string host_name();

struct HostMemory {
  std::size_t total = 0;      // bytes of the host, or of the tightest control group
  std::size_t available = 0;  // bytes that can still be taken without swapping
};

// `root` stands for / in the paths of /proc and /sys: tests bring their own tree.
HostMemory host_memory(const std::filesystem::path& root = "/");

// Processor time that the tightest control group grants, in cores; 0: no limit.
double quota_cores(const std::filesystem::path& root = "/");

// Resident set of this process in bytes, from /proc/self/statm.
std::size_t resident_bytes();

struct FileSystem {
  std::string name;      // "ext4", "Lustre"; "type 0x..." of one that is not known
  bool network = false;  // served by other hosts
};
// By the f_type of statfs(2).
FileSystem file_system_of_type(std::uint32_t f_type);

template <class Number>
double gib(Number bytes) {
  return static_cast<double>(bytes) / (1ull << 30);
}
inline std::size_t bytes_of_gib(double gib) { return static_cast<std::size_t>(gib * (1ull << 30)); }

// "1.50 GiB", or "20.00 MiB" where that is less than one GiB.
std::string size_text(double bytes);

// "weft 0.1.0 (commit abc1234, g++ 12.2.0)": kept with every run and checkpoint.
std::string version_line();

}  // namespace weft
