// The GPUs of this host and the processes that use them, for `weft doctor` and the choice of a
// rank's GPU. Nothing creates a context: NVML is opened at run time if the driver has it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// A process that holds a context on a GPU.
struct GpuProcess {
  int pid = 0;            // the host's; in a container we may not see that process
  std::string name;       // of its command, "" if it cannot be seen from here
  double memory_gib = 0;  // on that GPU; 0 if the driver does not say
};

struct GpuFacts {
  std::string uuid, name, driver;  // "GPU-...", "NVIDIA H200", "580.65.06"
  std::string bus;                 // PCI address as Linux writes it: "0000:17:00.0"
  int numa_node = -1;              // -1: unknown, or a host with one node
  double memory_gib = 0, used_gib = 0;
  int pcie_width = 0, pcie_width_most = 0;  // lanes now and at best; 0: unknown
  std::int64_t ecc_uncorrected = -1;  // memory errors since the driver was loaded; -1: unknown
  bool rows_failed = false;           // a bad memory row could not be replaced
  std::string slowdown;               // why the clocks are held down, "" if they are not
  bool mig = false;                   // cut into instances
  std::vector<GpuProcess> processes;
};

// Every GPU of this host that the driver shows, through NVML; CUDA_VISIBLE_DEVICES does not hide
// any. Empty without a driver; `why` then says so. May be called at any time.
std::vector<GpuFacts> inventory_gpus(std::string& why);

}  // namespace weft
