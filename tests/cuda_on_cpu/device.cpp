// The device that is imitated, errors, versions.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "faults.h"
#include "memory.h"
#include "streams.h"

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

// Slices of one GPU: each a device of its own, at one PCI address.
bool slices() {
  const char* text = std::getenv("WEFT_EMULATION_MIG");
  return text != nullptr && std::strcmp(text, "1") == 0;
}
int bus_of(int device) { return slices() ? 1 : device + 1; }

int device_count() {
  const char* text = std::getenv("WEFT_EMULATION_DEVICES");
  return text == nullptr ? 1 : std::atoi(text);
}

// As CUDA writes it, 12040 for 12.4: the newest CUDA that the driver is for.
int driver_version() {
  const char* text = std::getenv("WEFT_EMULATION_DRIVER");
  int major = CUDART_VERSION / 1000, minor = CUDART_VERSION % 1000 / 10;
  if (text != nullptr) std::sscanf(text, "%d.%d", &major, &minor);
  return major * 1000 + minor * 10;
}

struct Named {
  cudaError_t error;
  const char *name, *text;
};
constexpr Named errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid launch configuration"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "driver too old for the runtime"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorNotReady, "cudaErrorNotReady", "work is still pending"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "not supported by this emulation"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "not permitted while a stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "an earlier error invalidated the capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "two captures would merge"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "the capture did not begin in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "captured work was not joined to the stream that began the capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "the capture would depend on work outside of it"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "the capture would depend on the default stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was recorded in a capture"},
};

const Named* find(cudaError_t error) {
  const auto* found = std::find_if(std::begin(errors), std::end(errors),
                                   [=](const Named& n) { return n.error == error; });
  return found == std::end(errors) ? nullptr : found;
}

}  // namespace

namespace emulation {

const Capability& capability() {
  constexpr std::size_t KiB = 1024;
  static constexpr Capability known[] = {{8, 0, 163 * KiB, 2048},  {8, 6, 99 * KiB, 1536},
                                         {8, 9, 99 * KiB, 1536},   {9, 0, 227 * KiB, 2048},
                                         {10, 0, 227 * KiB, 2048}, {12, 0, 99 * KiB, 1536}};
  static const Capability& found = [] -> const Capability& {
    const char* text = std::getenv("WEFT_EMULATION_CAPABILITY");
    if (text == nullptr) return known[0];
    int major = 0, minor = 0;
    std::sscanf(text, "%d.%d", &major, &minor);
    for (const Capability& c : known)
      if (c.major == major && c.minor == minor) return c;
    die("WEFT_EMULATION_CAPABILITY=%s: no such device", text);
  }();
  return found;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

// A rank owns one device. A call from a thread that has not chosen it would go to device 0, where
// it makes a context of some hundred MB.
void touch_device() {
  static std::atomic<int> own = -1;
  int none = -1;
  if (own.compare_exchange_strong(none, current_device)) {
    if (const char* path = std::getenv("WEFT_EMULATION_DEVICE_LOG"))
      if (std::FILE* log = std::fopen(path, "a")) {
        std::fprintf(log, "%d %d\n", static_cast<int>(getpid()), current_device);
        std::fclose(log);
      }
  } else if (own != current_device) {
    die("a call on device %d, and this process works on device %d", current_device, own.load());
  }
}

}  // namespace emulation

using emulation::fail;

cudaError_t cudaGetLastError() {
  return std::exchange(last_error,
                       emulation::gpu_is_lost() ? cudaErrorIllegalAddress : cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t e) {
  return find(e) ? find(e)->name : "unrecognized error";
}
const char* cudaGetErrorString(cudaError_t e) {
  return find(e) ? find(e)->text : "unrecognized error";
}
cudaError_t cudaDriverGetVersion(int* v) { return *v = driver_version(), cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (driver_version() < CUDART_VERSION / 1000 * 1000) return fail(cudaErrorInsufficientDriver);
  *count = device_count();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  *p = {};
  std::snprintf(p->name, sizeof p->name, "CUDA on the CPU");
  std::memcpy(p->uuid.bytes, "cuda-on-the-cpu", 15);
  p->uuid.bytes[15] = static_cast<char>(device);
  p->totalGlobalMem = emulation::device_bytes_in_total();
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerBlockOptin = emulation::capability().shared_memory;
  p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024;
  p->major = emulation::capability().major;
  p->minor = emulation::capability().minor;
  p->multiProcessorCount = 108;
  p->warpSize = 32;
  p->regsPerBlock = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = emulation::capability().threads;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 40 << 20;
  p->memoryBusWidth = 5120;
  p->pciBusID = bus_of(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess)
    return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrClockRate:
      *value = 1410000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrIntegrated:
      *value = 0;
      break;
    case cudaDevAttrComputeMode:
      *value = 0;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrPciDeviceId:
      *value = p.pciDeviceID;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 1215000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrPciDomainId:
      *value = p.pciDomainID;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", bus_of(device));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
