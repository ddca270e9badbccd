#include "tensor/device.h"

#include <dlfcn.h>
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "core/error.h"
#include "core/host.h"

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
  if (!built_with_cuda()) return {{}, {}, "this build of weft has no CUDA side", false};
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

namespace {
int rank_threads = 1;
}

int set_threads(int requested, int core_sharers) {
  if (const char* asked = std::getenv("OMP_NUM_THREADS"); requested <= 0 && asked != nullptr)
    requested = std::atoi(asked);  // what the user asks of every OpenMP program
  const int threads = std::max(1, requested > 0 ? requested : usable_cores() / core_sharers);
  omp_set_dynamic(0);
  omp_set_num_threads(threads);
  return rank_threads = threads;
}

int threads_of_rank() { return rank_threads; }

void limit_spinning(char** argv) {
  for (const char* name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
    if (std::getenv(name) != nullptr) return;
  std::array<char, 4096> path{};  // /proc/self/exe itself would become the name that ps shows
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length <= 0) return;
  setenv("GOMP_SPINCOUNT", "10000", 0);
  execv(path.data(), argv);  // where that is refused, this process goes on
}

namespace {

// The first value that /proc/cpuinfo has for `key`; "" if it has none.
std::string cpuinfo(std::string_view key) {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string::npos && colon + 2 <= line.size())
      return line.substr(colon + 2);
  }
  return "";
}

// On Arm the kernel knows numbers alone: of who designed a core, and of the core.
struct ArmCore {
  std::string_view designer, part, name;
};
// Graviton 2 and Altra are N1, Graviton 3 V1, Grace and Graviton 4 V2.
constexpr ArmCore arm_cores[] = {
    {"0x41", "0xd0c", "Arm Neoverse N1"}, {"0x41", "0xd40", "Arm Neoverse V1"},
    {"0x41", "0xd49", "Arm Neoverse N2"}, {"0x41", "0xd4f", "Arm Neoverse V2"},
    {"0x46", "0x001", "Fujitsu A64FX"},   {"0x48", "0xd01", "HiSilicon Kunpeng 920"},
};

std::string cpu_model() {
  if (const std::string name = cpuinfo("model name"); !name.empty()) return name;
  const std::string designer = cpuinfo("CPU implementer"), part = cpuinfo("CPU part");
  for (const ArmCore& core : arm_cores)
    if (core.designer == designer && core.part == part) return std::string(core.name);
  if (!part.empty()) return fmt::format("Arm core {} of designer {}", part, designer);
  return "unknown processor";
}

}  // namespace

std::string describe_cpu() {
#if defined(__x86_64__)
  const char* instructions = __builtin_cpu_supports("x86-64-v4") > 0 ? "AVX-512" : "AVX2";
#elif defined(__aarch64__)
  const char* instructions = "NEON";
#else
  const char* instructions = "generic";
#endif
  return fmt::format("{}, {} of {} cores, {}", cpu_model(), usable_cores(),
                     sysconf(_SC_NPROCESSORS_ONLN), instructions);
}

namespace {

// A function of a library that may be linked, loaded later, or absent. Opened libraries stay open.
template <class Signature>
Signature* optional_function(std::initializer_list<const char*> libraries, const char* name) {
  if (void* f = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Signature*>(f);
  for (const char* l : libraries)
    if (void* library = dlopen(l, RTLD_LAZY | RTLD_LOCAL))
      if (void* f = dlsym(library, name)) return reinterpret_cast<Signature*>(f);
  return nullptr;
}

}  // namespace

std::map<std::string, std::string> cuda_library_versions() {
  std::map<std::string, std::string> versions;
  if (&add_cuda_versions == nullptr) return versions;
  add_cuda_versions(versions);
  // cuBLASLt is linked, NCCL linked or left out, cuDNN loaded with the first convolution: here, so
  // that ranks with different versions are noticed before.
  if (const auto f = optional_function<std::size_t()>({}, "cublasLtGetVersion")) {
    const std::size_t v = f();
    versions["cuBLASLt"] = fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
  }
  int nccl = 0;
  if (const auto f = optional_function<int(int*)>({"libnccl.so.2"}, "ncclGetVersion");
      f != nullptr && f(&nccl) == 0)
    versions["NCCL"] = fmt::format("{}.{}.{}", nccl / 10000, nccl / 100 % 100, nccl % 100);
  if (const auto f = optional_function<std::size_t()>({"libcudnn.so.9"}, "cudnnGetVersion")) {
    const std::size_t v = f();
    versions["cuDNN"] = fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
  }
  return versions;
}

}  // namespace weft
