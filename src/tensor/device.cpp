#include "tensor/device.h"

#include <dlfcn.h>
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
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

int set_threads(int requested, int core_sharers) {
  if (const char* asked = std::getenv("OMP_NUM_THREADS"); requested <= 0 && asked != nullptr)
    requested = std::atoi(asked);  // what the user asks of every OpenMP program
  const int threads = std::max(1, requested > 0 ? requested : usable_cores() / core_sharers);
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

// The part of NVML that weft calls, declared here so that weft builds without its header and starts
// without a driver. Layouts and values are those of the documented, versioned interface (NVML API
// reference), which never change for a given name.
namespace nvml {
using Device = struct nvmlDevice_st*;
struct Pci {
  char legacy_bus[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};
struct Memory {
  unsigned long long total, free, used;
};
struct Process {  // of nvmlDeviceGetComputeRunningProcesses_v3
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
constexpr int success = 0, not_enough = 7;
constexpr int uncorrected = 1, since_load = 0;
// Reasons for low clocks that say something about the machine; idle and user-set clocks do not.
constexpr unsigned long long hardware_slowdown = 0x8, thermal_software = 0x20,
                             thermal_hardware = 0x40, power_brake = 0x80;
}  // namespace nvml

class Nvml {
 public:
  explicit Nvml(std::string& why) : library_(dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL)) {
    if (library_ == nullptr) {
      why = "no NVIDIA driver here (libnvidia-ml.so.1 is not found)";
      return;
    }
    const int status = call<int()>("nvmlInit_v2");
    ready_ = status == nvml::success;
    if (!ready_) {
      const auto text = function<const char*(int)>("nvmlErrorString");
      why = fmt::format("the NVIDIA driver does not answer: {}",
                        text != nullptr ? text(status) : std::to_string(status).c_str());
    }
  }
  ~Nvml() {
    if (ready_) call<int()>("nvmlShutdown");
    if (library_ != nullptr) dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  bool ready() const { return ready_; }

  // Null if this driver does not have it.
  template <class Signature>
  Signature* function(const char* name) const {
    return reinterpret_cast<Signature*>(dlsym(library_, name));
  }
  // A status other than success means that this GPU or driver does not know.
  template <class Signature, class... A>
  int call(const char* name, A... arguments) const {
    const auto f = function<Signature>(name);
    return f != nullptr ? f(arguments...) : -1;
  }

 private:
  void* library_;
  bool ready_ = false;
};

std::string text_of(const Nvml& n, const char* name, nvml::Device d) {
  char text[96] = "";
  n.call<int(nvml::Device, char*, unsigned)>(name, d, text, static_cast<unsigned>(sizeof text));
  return text;
}

// NVML writes eight digits of PCI domain, Linux four.
std::string linux_bus(std::string bus) {
  if (bus.size() > 12 && bus.find(':') == 8) bus = bus.substr(4);
  std::transform(bus.begin(), bus.end(), bus.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return bus;
}

std::vector<GpuProcess> processes_of(const Nvml& n, nvml::Device d) {
  constexpr const char* name = "nvmlDeviceGetComputeRunningProcesses_v3";
  using Signature = int(nvml::Device, unsigned*, nvml::Process*);
  std::vector<nvml::Process> found(64);
  auto count = static_cast<unsigned>(found.size());
  int status = n.call<Signature>(name, d, &count, found.data());
  if (status == nvml::not_enough) {
    // Leave room for processes that start between the two calls.
    found.resize(count + 64);
    count = static_cast<unsigned>(found.size());
    status = n.call<Signature>(name, d, &count, found.data());
  }
  if (status != nvml::success) return {};
  std::vector<GpuProcess> out;
  for (unsigned i = 0; i < count; ++i) {
    GpuProcess p;
    p.pid = static_cast<int>(found[i].pid);
    if (found[i].used != ~0ull) p.memory_gib = gib(found[i].used);
    std::ifstream comm(fmt::format("/proc/{}/comm", p.pid));
    std::getline(comm, p.name);
    out.push_back(p);
  }
  return out;
}

GpuFacts facts_of(const Nvml& n, nvml::Device d) {
  using Two = int(nvml::Device, unsigned*);
  GpuFacts g;
  g.uuid = text_of(n, "nvmlDeviceGetUUID", d);
  g.name = text_of(n, "nvmlDeviceGetName", d);
  nvml::Pci pci{};
  if (n.call<int(nvml::Device, nvml::Pci*)>("nvmlDeviceGetPciInfo_v3", d, &pci) == nvml::success)
    g.bus = linux_bus(pci.bus_id);
  std::ifstream node(fmt::format("/sys/bus/pci/devices/{}/numa_node", g.bus));
  if (!(node >> g.numa_node)) g.numa_node = -1;
  nvml::Memory memory{};
  if (n.call<int(nvml::Device, nvml::Memory*)>("nvmlDeviceGetMemoryInfo", d, &memory) ==
      nvml::success) {
    g.memory_gib = gib(memory.total);
    g.used_gib = gib(memory.used);
  }
  unsigned now = 0, most = 0;
  if (n.call<Two>("nvmlDeviceGetCurrPcieLinkWidth", d, &now) == nvml::success)
    g.pcie_width = static_cast<int>(now);
  if (n.call<Two>("nvmlDeviceGetMaxPcieLinkWidth", d, &most) == nvml::success)
    g.pcie_width_most = static_cast<int>(most);
  unsigned long long errors = 0;
  if (n.call<int(nvml::Device, int, int, unsigned long long*)>("nvmlDeviceGetTotalEccErrors", d,
                                                               nvml::uncorrected, nvml::since_load,
                                                               &errors) == nvml::success)
    g.ecc_uncorrected = static_cast<std::int64_t>(errors);
  unsigned corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (n.call<int(nvml::Device, unsigned*, unsigned*, unsigned*, unsigned*)>(
          "nvmlDeviceGetRemappedRows", d, &corrected, &uncorrected, &pending, &failed) ==
      nvml::success)
    g.rows_failed = failed != 0;
  unsigned long long reasons = 0;
  if (n.call<int(nvml::Device, unsigned long long*)>("nvmlDeviceGetCurrentClocksThrottleReasons", d,
                                                     &reasons) == nvml::success) {
    if ((reasons & (nvml::thermal_software | nvml::thermal_hardware)) != 0)
      g.slowdown = "heat";
    else if ((reasons & nvml::power_brake) != 0)
      g.slowdown = "the power supply's brake";
    else if ((reasons & nvml::hardware_slowdown) != 0)
      g.slowdown = "a hardware slowdown";
  }
  unsigned mig = 0, mig_pending = 0;
  if (n.call<int(nvml::Device, unsigned*, unsigned*)>("nvmlDeviceGetMigMode", d, &mig,
                                                      &mig_pending) == nvml::success)
    g.mig = mig == 1;
  g.processes = processes_of(n, d);
  return g;
}

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

std::vector<GpuFacts> inventory_gpus(std::string& why) {
  const Nvml n(why);
  if (!n.ready()) return {};
  char driver[96] = "";
  n.call<int(char*, unsigned)>("nvmlSystemGetDriverVersion", driver,
                               static_cast<unsigned>(sizeof driver));
  unsigned count = 0;
  n.call<int(unsigned*)>("nvmlDeviceGetCount_v2", &count);
  std::vector<GpuFacts> gpus;
  for (unsigned i = 0; i < count; ++i) {
    nvml::Device d = nullptr;
    if (n.call<int(unsigned, nvml::Device*)>("nvmlDeviceGetHandleByIndex_v2", i, &d) !=
        nvml::success)
      continue;  // hidden by this job's control group
    gpus.push_back(facts_of(n, d));
    gpus.back().driver = driver;
  }
  if (gpus.empty()) why = "the NVIDIA driver shows no GPU";
  return gpus;
}

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
