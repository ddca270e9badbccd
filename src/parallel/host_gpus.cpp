#include "parallel/host_gpus.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <fstream>

#include "core/error.h"
#include "core/host.h"

namespace weft {
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

}  // namespace weft
