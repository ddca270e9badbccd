#include "tensor/device_cuda.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif
#ifdef WEFT_CUDNN
#include <cudnn.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"

namespace weft {
namespace {

constexpr std::size_t ring_bytes = 64u << 20;
constexpr std::size_t stage_bytes = 16u << 20;

std::array<cudaStream_t, 4> streams{};
cudaDeviceProp properties{};
int own_index = -1;  // this rank's GPU

// The first failed call of this process, or nothing. Where a kernel was at fault every later call
// returns the same code: only the first one is worth reporting.
struct FirstFailure {
  std::mutex mutex;
  std::optional<Error> error;
  cudaError_t code = cudaSuccess;

  // The first failure with this code, and whether this is it.
  std::pair<Error, bool> enter(cudaError_t e, const char* call, const char* file, int line) {
    const std::lock_guard lock(mutex);
    const bool first = e != code;
    code = e;
    if (first)
      error.emplace(Exit::hardware,
                    fmt::format("CUDA: {} ({}) at {}:{}, {}", cudaGetErrorString(e),
                                cudaGetErrorName(e), file, line, call),
                    "run weft doctor on this node; if it finds the GPU well, this is a bug in "
                    "weft, please report it with the log (a fault of a kernel shows in a later "
                    "call: compute-sanitizer names the kernel)",
                    file, line);
    return {*error, first};
  }
};
FirstFailure& first_failure() {
  static auto& one = *new FirstFailure;  // never destroyed: threads may outlive main
  return one;
}

// CUDA_CHECK for a result that has been looked at.
void check(cudaError_t error, const char* call, int line) {
  if (error != cudaSuccess) throw_cuda_error(error, call, __FILE__, line);
}

// For calls that may not throw. What fails here and nowhere else must not go unsaid.
void note_failure(cudaError_t error, const char* call, int line) noexcept {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  const auto [failure, first] = first_failure().enter(error, call, __FILE__, line);
  if (first) log::warn("{}", failure.what());
}

std::string uuid_text(const cudaUUID_t& uuid) {
  const auto* b = reinterpret_cast<const unsigned char*>(uuid.bytes);
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", b[i]);
  }
  return text;
}

// CUDA's table of compatibility within a major version.
constexpr int oldest_driver = CUDART_VERSION >= 13000 ? 580 : 525;

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

class CudaRuntime final : public DeviceRuntime {
 public:
  explicit CudaRuntime(int index) : index_(index) {
    own_index = index;
    enter();
    CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    int lowest = 0, highest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    for (const Stream s : {Stream::compute, Stream::communication, Stream::copy, Stream::second})
      CUDA_CHECK(cudaStreamCreateWithPriority(&streams[static_cast<std::size_t>(s)],
                                              cudaStreamNonBlocking,
                                              s == Stream::communication ? highest : lowest));
    ring_ = static_cast<std::byte*>(allocate_pinned(ring_bytes));
    stage_ = static_cast<std::byte*>(allocate_pinned(2 * stage_bytes));
  }

  void* allocate(std::size_t bytes, bool zeroed) override {
    enter();
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // else the next call would report it again
      std::size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      throw Error(Exit::memory,
                  fmt::format("GPU {} has no {:.2f} GiB left: {:.2f} of {:.2f} GiB are free",
                              index_, gib(bytes), gib(free), gib(total)),
                  "lower memory.arena_gib or train.batch_size, or see who else holds memory there "
                  "(weft doctor, nvidia-smi)",
                  __FILE__, __LINE__);
    }
    check(error, "cudaMalloc(&p, bytes)", __LINE__);
    if (zeroed) zero(p, bytes, Stream::compute);
    return p;
  }
  void free(void* p) noexcept override {
    cudaSetDevice(index_);  // as enter() does, which may throw
    note_failure(cudaFree(p), "cudaFree(p)", __LINE__);
  }
  void* allocate_pinned(std::size_t bytes) override {
    enter();
    void* p = nullptr;
    const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw Error(Exit::usage, fmt::format("cannot pin {:.3f} GiB of host memory", gib(bytes)),
                  "raise the limit of locked memory (ulimit -l) or the job's memory", __FILE__,
                  __LINE__);
    }
    check(error, "cudaHostAlloc(&p, bytes, cudaHostAllocDefault)", __LINE__);
    return p;
  }
  void free_pinned(void* p) noexcept override {
    cudaSetDevice(index_);
    note_failure(cudaFreeHost(p), "cudaFreeHost(p)", __LINE__);
  }
  std::size_t free_bytes() override {
    enter();
    std::size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  }

  void upload(void* to, const void* from, std::size_t bytes, Stream stream) override {
    enter();
    const std::lock_guard lock(ring_mutex_);
    WEFT_ASSERT(!capturing_);
    auto* target = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    for (std::size_t done = 0; done < bytes;) {
      // Quarters of the ring, so that the host fills one while the GPU copies others.
      const std::size_t piece = std::min(bytes - done, ring_bytes / 4);
      std::byte* pinned = take_from_ring(piece);
      std::memcpy(pinned, source + done, piece);
      CUDA_CHECK(cudaMemcpyAsync(target + done, pinned, piece, cudaMemcpyHostToDevice,
                                 cuda_stream(stream)));
      in_flight_.push_back({static_cast<std::size_t>(pinned - ring_), piece, record(stream)});
      done += piece;
    }
  }

  void download(void* to, const void* from, std::size_t bytes) override {
    enter();
    const std::lock_guard lock(stage_mutex_);
    // Two halves: the host empties one while the GPU fills the other.
    DeviceEvent filled[2];
    const auto piece = [&](std::size_t i) {
      return std::min(stage_bytes, bytes - i * stage_bytes);
    };
    const std::size_t pieces = (bytes + stage_bytes - 1) / stage_bytes;
    const auto fetch = [&](std::size_t i) {
      CUDA_CHECK(cudaMemcpyAsync(stage_ + i % 2 * stage_bytes,
                                 static_cast<const std::byte*>(from) + i * stage_bytes, piece(i),
                                 cudaMemcpyDeviceToHost, cuda_stream(Stream::compute)));
      filled[i % 2] = record(Stream::compute);
    };
    if (pieces > 0) fetch(0);
    for (std::size_t i = 0; i < pieces; ++i) {
      if (i + 1 < pieces) fetch(i + 1);
      synchronize(filled[i % 2]);
      std::memcpy(static_cast<std::byte*>(to) + i * stage_bytes, stage_ + i % 2 * stage_bytes,
                  piece(i));
    }
  }

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    enter();
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)));
  }
  void zero(void* p, std::size_t bytes, Stream stream) override {
    enter();
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, cuda_stream(stream)));
  }

  DeviceEvent record(Stream stream) override {
    enter();
    DeviceEvent event = take_event();
    CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event.get()), cuda_stream(stream)));
    return event;
  }
  void wait(Stream stream, const DeviceEvent& event) override {
    enter();
    CUDA_CHECK(cudaStreamWaitEvent(cuda_stream(stream), static_cast<cudaEvent_t>(event.get()), 0));
  }
  bool finished(const DeviceEvent& event) override {
    enter();
    const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // else a later check of the last error would find it
      return false;
    }
    check(state, "cudaEventQuery(event)", __LINE__);
    return true;
  }
  void synchronize(const DeviceEvent& event) override {
    enter();
    CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event.get())));
  }
  void synchronize() override {
    enter();
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  double seconds(const DeviceEvent& from, const DeviceEvent& to) override {
    enter();
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from.get()),
                                    static_cast<cudaEvent_t>(to.get())));
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void begin_capture() override {
    enter();
    // Thread-local capture: the communicator's watchdog may query its own events meanwhile.
    CUDA_CHECK(
        cudaStreamBeginCapture(cuda_stream(Stream::compute), cudaStreamCaptureModeThreadLocal));
    capturing_ = true;
  }
  DeviceGraph end_capture(const std::function<void()>& make_room) override {
    enter();
    capturing_ = false;
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamEndCapture(cuda_stream(Stream::compute), &graph));
    // The executable graph does not need its source.
    const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> source(graph, cudaGraphDestroy);
    cudaGraphExec_t exec = nullptr;
    cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
    if (error == cudaErrorMemoryAllocation && make_room) {
      cudaGetLastError();
      make_room();
      error = cudaGraphInstantiate(&exec, graph, 0);
    }
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw Error(
          Exit::memory,
          fmt::format("GPU {} has no memory left for a graph of kernels: {:.2f} GiB are free",
                      index_, gib(free_bytes())),
          "set device.graphs = false, or lower memory.arena_gib or train.batch_size", __FILE__,
          __LINE__);
    }
    check(error, "cudaGraphInstantiate(&exec, graph, 0)", __LINE__);
    return DeviceGraph(exec,
                       [](void* p) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(p)); });
  }
  void launch(const DeviceGraph& graph) override {
    enter();
    CUDA_CHECK(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.get()), cuda_stream(Stream::compute)));
  }

  std::string describe() override {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return fmt::format("{}, {:.1f} GiB, sm_{}{}, driver for CUDA {}", properties.name,
                       gib(properties.totalGlobalMem), properties.major, properties.minor,
                       cuda_version_text(driver));
  }

 private:
  struct InFlight {
    std::size_t begin, bytes;
    DeviceEvent copied;
  };

  // CUDA's current device is per thread: every calling thread gets this rank's GPU, never GPU 0.
  void enter() {
    static thread_local int current = -1;
    if (current == index_) return;
    CUDA_CHECK(cudaSetDevice(index_));
    current = index_;
  }

  // Events are reused: creating one takes microseconds, and a step needs hundreds.
  DeviceEvent take_event() {
    const std::lock_guard lock(event_mutex_);
    cudaEvent_t event = nullptr;
    if (idle_events_.empty()) {
      CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));
    } else {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
    return DeviceEvent(event, [this](void* p) {
      const std::lock_guard returning(event_mutex_);
      idle_events_.push_back(static_cast<cudaEvent_t>(p));
    });
  }

  // The next `bytes` of the ring, once the copies that read them have finished.
  std::byte* take_from_ring(std::size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    const auto retire = [this] {
      synchronize(in_flight_.front().copied);
      in_flight_.pop_front();
    };
    if (ring_at_ + bytes > ring_bytes) {
      // Retire the copies that the previous round left in the skipped end of the ring: they are the
      // oldest, and would hide this round's copies, which are in the way, from the check below.
      while (!in_flight_.empty() && in_flight_.front().begin >= ring_at_) retire();
      ring_at_ = 0;
    }
    const std::size_t begin = ring_at_, end = begin + bytes;
    while (!in_flight_.empty()) {
      const InFlight& oldest = in_flight_.front();
      if (oldest.begin >= end || oldest.begin + oldest.bytes <= begin) break;
      retire();
    }
    ring_at_ = end;
    return ring_ + begin;
  }

  int index_;
  std::byte *ring_ = nullptr, *stage_ = nullptr;
  std::size_t ring_at_ = 0;
  std::deque<InFlight> in_flight_;  // in order of issue
  std::vector<cudaEvent_t> idle_events_;
  std::mutex ring_mutex_, stage_mutex_, event_mutex_;
  bool capturing_ = false;
};

}  // namespace

void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line) {
  throw first_failure().enter(error, call, file, line).first;
}

void throw_if_gpu_failed(const char* call, const char* file, int line) {
  if (own_index < 0) return;
  cudaSetDevice(own_index);  // a thread of its own may stand on GPU 0
  // This call, unlike others, may come at any time.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(cuda_stream(Stream::compute), &status);
  if (error != cudaSuccess) throw_cuda_error(error, call, file, line);
}

cudaStream_t cuda_stream(Stream stream) { return streams[static_cast<std::size_t>(stream)]; }
const cudaDeviceProp& cuda_properties() { return properties; }

VisibleGpus cuda_visible_gpus() {
  VisibleGpus gpus;
  int count = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    // Without a driver the runtime calls it too old, and its version is 0.
    cudaDriverGetVersion(&driver);
    gpus.failed = driver > 0 && error != cudaErrorNoDevice;
    if (error != cudaErrorInsufficientDriver)
      gpus.why = fmt::format("no GPU can be used: {}", cudaGetErrorString(error));
    else if (driver == 0)
      gpus.why = "no NVIDIA driver here";
    else
      gpus.why = fmt::format(
          "the driver is for CUDA {} at most, this build of weft is for {} (driver {} or newer)",
          cuda_version_text(driver), cuda_version_text(CUDART_VERSION), oldest_driver);
    return gpus;
  }
  if (count == 0) gpus.why = "no GPU is visible";
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    CUDA_CHECK(cudaGetDeviceProperties(&p, i));
    gpus.uuids.push_back(uuid_text(p.uuid));
    gpus.buses.push_back(
        fmt::format("{:04x}:{:02x}:{:02x}.0", p.pciDomainID, p.pciBusID, p.pciDeviceID));
  }
  return gpus;
}

std::unique_ptr<DeviceRuntime> make_cuda_runtime(int index) {
  return std::make_unique<CudaRuntime>(index);
}

// The part of the inventory that only a program with the CUDA side can tell.
namespace {

std::string dotted(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

void add_cuda_versions(std::map<std::string, std::string>& versions) {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) versions["CUDA runtime"] = dotted(version);
  // 0 without a driver.
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0)
    versions["CUDA driver"] = dotted(version);
  cudaGetLastError();  // clear it: a failure here is no error of later calls
}

void add_cuda_headers(std::map<std::string, std::string>& versions) {
  versions["CUDA runtime"] = dotted(CUDART_VERSION);
#ifdef CUBLAS_VER_MAJOR
  versions["cuBLASLt"] =
      fmt::format("{}.{}.{}", CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR, CUBLAS_VER_PATCH);
#endif
#ifdef NCCL_VERSION_CODE
  versions["NCCL"] = fmt::format("{}.{}.{}", NCCL_VERSION_CODE / 10000,
                                 NCCL_VERSION_CODE / 100 % 100, NCCL_VERSION_CODE % 100);
#endif
#ifdef CUDNN_MAJOR
  versions["cuDNN"] = fmt::format("{}.{}.{}", CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL);
#endif
}

}  // namespace weft
