// `weft doctor [DECK]`: checks whether this machine can run the job, and says what to do if not.
// Facts and measurements of each rank travel to rank 0 as JSON, which judges them.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/command.h"
#include "config/deck.h"
#include "core/error.h"
#include "parallel/communicator.h"
#include "parallel/host_gpus.h"
#include "tensor/device.h"

namespace weft {

// Something that went wrong while the doctor examined a rank, as the Error reported it.
struct RankFault {
  int code = 0;
  std::string stage, what, hint;  // stage: "matrix product"
};

struct RankFacts {
  int rank = 0, host_rank = 0, host_ranks = 1, pid = 0;
  int core_sharers = 1;  // ranks on each core that this rank may run on
  std::string host;

  std::string cpu;           // "Intel(R) Xeon(R) ..."
  std::string instructions;  // of this rank's operations: "AVX-512 with bf16", "AVX2"
  std::vector<int> cores;    // that this rank may run on
  std::vector<int> numa;     // nodes of those cores
  int host_cores = 0;        // online
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
  // "product f32" -> elements that are not the known answer
  std::map<std::string, std::int64_t> wrong;
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

// The libraries that this program was compiled against and those that it runs with.

struct LibraryVersion {
  std::string name;   // "HDF5"
  std::string found;  // by this process; "" where it is not there
  std::string built;  // by its headers; "" where they do not tell
};

// Both may be called before MPI_Init. The CUDA libraries only in a program with the CUDA side.
LibraryVersion mpi_version();
std::vector<LibraryVersion> library_versions();

// For `weft --version`: version_line(), the libraries, this host's processor and GPUs, a line each.
// Nothing here creates a context on a GPU.
std::string version_text();

// What the doctor measures on every rank. Each part fills measured and wrong of `facts`; all ranks
// do the same part at the same time, as they will in a job.

// "memory copy GB/s": all threads of the rank, bytes read and written both counted.
void measure_memory(RankFacts& facts);

// "product f32 TFLOP/s" and, where the device has it, "product bf16 TFLOP/s": y = x w^T + b of
// small whole numbers whose sums are exact in any order, so `wrong` counts every element that is
// not the known one, to the bit.
void measure_products(RankFacts& facts);

// Fills `operations`: on a GPU a few operations of each kind compared with the CPU side, on a CPU a
// matrix product with a plain loop. Convolutions are left out where cuDNN is not there.
void check_operations(RankFacts& facts);

// "host to device GB/s", "device to host GB/s", "device copy GB/s" (read and written counted) by
// events, and in `wrong` "device memory" the words that came back changed. Only on a GPU.
void measure_device_copies(RankFacts& facts);

// "file read GB/s" of the clip store at `path`, or of a temporary file in the working directory
// where `path` is not a file; then also "file write GB/s". The kernel is asked to forget the pages
// first. Throws Exit::data.
void measure_files(const std::string& path, RankFacts& facts);

// "all-reduce 64 MiB GB/s" and "all-reduce 8 B us", over all ranks; `wrong` as above. Collective.
void measure_all_reduce(Communicator& comm, RankFacts& facts);

// Derives findings from the facts of all ranks, without examining the machine
// again.

struct Finding {
  enum class Level { ok, warn, fail };
  Level level = Level::ok;
  std::string what;        // with the ranks it is about
  std::string todo;        // "" for ok
  Exit code = Exit::done;  // of a failure: usage (to be mended) or hardware
};

// In the order in which a person would look: versions, environment, placement, memory, GPUs,
// results, speed.
std::vector<Finding> judge(const std::vector<RankFacts>& ranks);

// hardware if any finding says so, else usage if any failed, else done.
Exit verdict(const std::vector<Finding>& findings);

// "rank 3", "ranks 0-3,8".
std::string ranks_text(const std::vector<int>& ranks);

// Ranks by value, the value of most ranks first.
using Groups = std::vector<std::pair<std::string, std::vector<int>>>;
Groups group_by(const std::vector<RankFacts>& ranks,
                const std::function<std::string(const RankFacts&)>& value);

struct DoctorRequest {
  // Its data path is read and its device taken; empty: the working directory, any device.
  std::string deck;
  std::vector<std::string> overrides;
  std::string json;  // file for everything that was found; empty: none
};

// Collective. Looks at every rank (where it runs, what it was built from, its environment and
// limits), measures it (memory, copies, a matrix product with a known result, an all-reduce, file
// reads), runs a few operations that are compared with the CPU side, compares the ranks, and prints
// tables and one line a finding to stdout. Changes nothing but a temporary file where there is no
// clip store to read. Half a minute. Returns 0 if all is well or only warnings were found, 2 for
// what the user can mend, 6 for wrong results or a broken device. Throws Exit::usage for a deck
// that cannot be read, Exit::data if `json` cannot be written.
int doctor(const DoctorRequest& request, MPI_Comm world);
Command doctor_command();

}  // namespace weft
