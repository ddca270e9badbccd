// The kind of processor a rank computes on, and what host code needs of it. A rank owns exactly one
// device. Nothing here names CUDA: device_cuda.cpp does, and is linked or left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace weft {

enum class DeviceKind { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // the GPU's number among those this rank can see; 0 for the CPU
};

// The GPUs that this process can see, CUDA_VISIBLE_DEVICES respected.
struct VisibleGpus {
  std::vector<std::string> uuids;  // "GPU-xxxxxxxx-..."
  // PCI addresses as Linux writes them, "0000:17:00.0": slices of one GPU (MIG) have the same.
  std::vector<std::string> buses;
  std::string why;      // there are none: no GPU, no driver, a build without CUDA
  bool failed = false;  // CUDA answers with an error other than that there is no GPU or no driver
};
// Creates no context.
VisibleGpus visible_gpus();
// Whether this program has the CUDA side at all.
bool built_with_cuda();
// Takes GPU `index` of those: one per process, before the first tensor. parallel/rank_device.h
// chooses which.
void use_gpu(int index);
// The CPU until use_gpu(), and within a CpuScope.
Device this_device();
inline bool on_cuda() { return this_device().kind == DeviceKind::cuda; }

// While one exists, this thread computes on the CPU, whatever the rank's device: to check one side
// against the other.
class CpuScope {
 public:
  CpuScope();
  ~CpuScope();
  CpuScope(const CpuScope&) = delete;
  CpuScope& operator=(const CpuScope&) = delete;
};

// Streams of a GPU: work within one runs in order; only events order work of different streams.
// `second` is for a part of one operation that runs concurrently with its rest (kernels/matmul);
// the operation joins it to `compute` before it returns.
enum class Stream { compute, communication, copy, second };
// A mark in a stream. Copies share it.
using DeviceEvent = std::shared_ptr<void>;
// A recorded sequence of device work that can be run again with the same addresses.
using DeviceGraph = std::shared_ptr<void>;

// The GPU of this rank. All calls come from threads that have no device work of their own
// elsewhere; none of them waits for the GPU unless noted. Failures throw Exit::hardware, or
// Exit::usage if memory is too small. After a fault of a kernel every call fails: each then reports
// the first that failed. Destructors free memory, so that alone never throws.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  // Device memory, 256-byte aligned.
  virtual void* allocate(std::size_t bytes, bool zeroed = true) = 0;
  virtual void free(void* p) noexcept = 0;
  virtual void* allocate_pinned(std::size_t bytes) = 0;  // host memory that copies asynchronously
  virtual void free_pinned(void* p) noexcept = 0;
  virtual std::size_t free_bytes() = 0;  // of device memory, now

  // Host to device on `stream` through the pinned ring: `from` may be reused at once. Waits only
  // when the ring is full.
  virtual void upload(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  // Device to host. Waits until all work of the compute stream so far and the copy are done.
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  // Between pinned host and device memory, or on the device; waits for nothing.
  virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void zero(void* p, std::size_t bytes, Stream stream) = 0;

  virtual DeviceEvent record(Stream stream) = 0;
  virtual void wait(Stream stream, const DeviceEvent& event) = 0;  // the stream waits, not the host
  virtual bool finished(const DeviceEvent& event) = 0;
  virtual void synchronize(const DeviceEvent& event) = 0;  // the host waits
  virtual void synchronize() = 0;                          // the host waits for everything
  virtual double seconds(const DeviceEvent& from, const DeviceEvent& to) = 0;  // both finished

  // Work of the compute stream, and of streams tied to it by events, between begin and end is
  // recorded, not run. Where no memory is left for the graph, `make_room` (if given) frees some.
  virtual void begin_capture() = 0;
  virtual DeviceGraph end_capture(const std::function<void()>& make_room) = 0;
  virtual void launch(const DeviceGraph& graph) = 0;  // on the compute stream

  virtual std::string describe() = 0;  // "NVIDIA H200, 139.8 GiB, sm_90, driver 13.0"
};

// The runtime of this rank's GPU. Calling it on a CPU rank is a bug.
DeviceRuntime& device_runtime();

// Processor threads of this rank: `requested` if positive, otherwise OMP_NUM_THREADS, or else the
// cores on which it may run divided by the ranks that share each (RankDevice::core_sharers), at
// least one. Also sets OpenMP's count.
int set_threads(int requested, int core_sharers);
int threads_of_rank();  // as it set them; 1 before

// For the start of main: a thread of OpenMP that waits shall spin briefly and then sleep. libgomp
// spins for milliseconds, which gains nothing on a quiet host and takes the core from the thread
// waited for on a busy one: steps took 1.4 to 2.2 times as long (validation/results/cpu.md, Threads
// that wait). It reads the limit before main, hence the program starts again, with GOMP_SPINCOUNT
// set. What the user has set stays.
void limit_spinning(char** argv);

// "Intel(R) Xeon(R) ..., 2 of 2 cores, AVX-512", "Arm Neoverse V2, 72 of 72 cores, NEON": for the
// start table.
std::string describe_cpu();

// Whether products and convolutions in f32 may round their factors to TF32 (10 bits of mantissa) on
// GPUs, so that tensor cores multiply them: deck key device.tf32. One setting per process, made
// before the first operation; sums stay in f32.

inline bool& tf32_setting() {
  static bool allowed = false;
  return allowed;
}
inline void allow_tf32(bool allowed) { tf32_setting() = allowed; }
inline bool tf32_allowed() { return tf32_setting(); }

// Versions of the CUDA libraries that this process has loaded or would load, by name: "CUDA
// runtime", "CUDA driver", "cuBLASLt", "NCCL", "cuDNN". Those that are not there are left out;
// empty in a program without the CUDA side.
std::map<std::string, std::string> cuda_library_versions();

// The CUDA side (device_cuda.cpp), null in programs that are not linked with it.
[[gnu::weak]] void add_cuda_versions(std::map<std::string, std::string>& versions);
// What its headers said when it was compiled, by the same names.
[[gnu::weak]] void add_cuda_headers(std::map<std::string, std::string>& versions);

}  // namespace weft
