// What the doctor knows about one rank, plain data that travels to rank 0 as JSON, and how it finds
// out.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tensor/device_inventory.h"

namespace weft {

// Something that went wrong while the doctor examined a rank, as the Error reported it.
struct RankFault {
  int code = 0;
  std::string stage, what, hint;  // stage: "matrix product"
};

struct RankFacts {
  int rank = 0, host_rank = 0, host_ranks = 1, pid = 0;
  std::string host;

  std::string cpu;  // "Intel(R) Xeon(R) ..."
  std::string
      instructions;  // "AVX-512 with bf16", "AVX-512" or "AVX2": what this rank's operations use
  std::vector<int> cores;  // that this rank may run on
  std::vector<int> numa;   // nodes of those cores
  int host_cores = 0;      // online
  int host_numa_nodes = 1;
  int threads = 1;         // that weft computes with here
  double quota_cores = 0;  // processor time that the control group grants; 0: no limit
  double memory_gib = 0;   // of the host, or of the control group if that is less
  double available_gib = 0;
  double shared_memory_gib = 0;                // size of /dev/shm, 0: there is none
  std::string huge_pages;                      // "madvise"; "" if the kernel has none
  std::map<std::string, std::int64_t> limits;  // "locked memory", "stack", "open files"; -1: none
  bool has_fabric = false;                     // InfiniBand or alike

  std::map<std::string, std::string> versions;     // "HDF5" -> "1.10.8"
  std::map<std::string, std::string> environment;  // the variables that matter

  std::string device;               // "CPU" or the runtime's description of the GPU
  std::string gpu;                  // UUID of the GPU that this rank took, "" on the CPU
  std::string no_gpu;               // why it took none
  bool shares_gpu = false;          // device.share asks for it
  std::vector<GpuFacts> host_gpus;  // all GPUs of the host, taken while every rank holds its own

  std::map<std::string, double> measured;  // "memory copy GB/s" -> 11.2
  std::map<std::string, std::int64_t>
      wrong;  // "product f32" -> elements that are not the known answer
  // "layer norm" -> values that are further from the CPU side's than rounding explains
  std::map<std::string, std::int64_t> operations;
  std::string file;          // what was read: "clips.h5", "a temporary file in ."
  std::string file_system;   // "ext4", "Lustre"
  std::string communicator;  // "MPI", "NCCL 2.28.3"
  std::vector<RankFault> faults;
};

// Everything up to `environment`: no device is touched. Collective over `world` (ranks of a host).
RankFacts rank_facts(MPI_Comm world);

// Facts of every rank in order of rank, on rank 0; empty elsewhere. Collective.
std::vector<RankFacts> gather_facts(const RankFacts& mine, MPI_Comm world);

void to_json(nlohmann::json& j, const RankFacts& f);
void from_json(const nlohmann::json& j, RankFacts& f);

}  // namespace weft
