#include "tensor/device.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>

#include "core/error.h"

namespace weft {

// The CUDA side (device_cuda.cpp), null in programs that are not linked with it.
[[gnu::weak]] VisibleGpus cuda_visible_gpus();
[[gnu::weak]] std::unique_ptr<DeviceRuntime> make_cuda_runtime(int index);

namespace {

Device device;
DeviceRuntime* runtime = nullptr;
thread_local int cpu_scopes = 0;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace

bool built_with_cuda() { return &cuda_visible_gpus != nullptr; }

VisibleGpus visible_gpus() {
  if (!built_with_cuda()) return {{}, "this build of weft has no CUDA side"};
  return cuda_visible_gpus();
}

void use_gpu(int index) {
  WEFT_ASSERT(&make_cuda_runtime != nullptr);
  if (runtime != nullptr) {  // a second training in this process
    WEFT_ASSERT(device.index == index);
    return;
  }
  // Never destroyed: tensors may return memory until the process ends, and the driver frees the
  // rest.
  runtime = make_cuda_runtime(index).release();
  device = {DeviceKind::cuda, index};
}

Device this_device() { return cpu_scopes > 0 ? Device{} : device; }

CpuScope::CpuScope() { ++cpu_scopes; }
CpuScope::~CpuScope() { --cpu_scopes; }

DeviceRuntime& device_runtime() {
  WEFT_ASSERT(runtime != nullptr);
  return *runtime;
}

int set_threads(int requested, int ranks_on_host) {
  // What the user asks of every OpenMP program. Else a rank that the launcher has bound to its own
  // cores uses all of them; ranks that see the whole host share it.
  if (const char* asked = std::getenv("OMP_NUM_THREADS"); requested <= 0 && asked != nullptr)
    requested = std::atoi(asked);
  const int cores = usable_cores();
  const int online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  int threads = requested;
  if (threads <= 0) threads = cores < online ? cores : cores / std::max(1, ranks_on_host);
  threads = std::max(1, threads);
  omp_set_dynamic(0);
  omp_set_num_threads(threads);
  return threads;
}

void limit_spinning(char** argv) {
  for (const char* name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
    if (std::getenv(name) != nullptr) return;
  std::array<char, 4096> path{};  // /proc/self/exe itself would become the name that ps shows
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length <= 0) return;
  setenv("GOMP_SPINCOUNT", "10000", 0);
  execv(path.data(), argv);  // where that is refused, this process goes on
}

std::string describe_cpu() {
  std::string model = "unknown processor";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  const bool avx512 = __builtin_cpu_supports("x86-64-v4") > 0;
  return fmt::format("{}, {} of {} cores, {}", model, usable_cores(), sysconf(_SC_NPROCESSORS_ONLN),
                     avx512 ? "AVX-512" : "AVX2");
}

}  // namespace weft
