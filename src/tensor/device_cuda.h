// CUDA as the kernels and the NCCL communicator see it. Only core/device*, parallel/nccl* and
// kernels/ include this.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"
#include "tensor/device.h"

namespace weft {

// Throws Exit::hardware with the call, CUDA's own words and file:line. A fault of a kernel makes
// every later call fail, so all that fail after the first report the first.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line);
// For a library's call that has failed, or has nothing to offer: throws the same where the GPU is
// what failed. Allowed during a capture.
void throw_if_gpu_failed(const char* call, const char* file, int line);

cudaStream_t cuda_stream(Stream stream);
// The device's properties, read once.
const cudaDeviceProp& cuda_properties();

// Makes the runtime of this rank's GPU; a context exists on that device only. tensor/device.cpp
// calls these if they are linked.
VisibleGpus cuda_visible_gpus();
std::unique_ptr<DeviceRuntime> make_cuda_runtime(int index);

}  // namespace weft

#define CUDA_CHECK(call) \
  do { \
    const cudaError_t cuda_check_error = (call); \
    if (cuda_check_error != cudaSuccess) \
      ::weft::throw_cuda_error(cuda_check_error, #call, __FILE__, __LINE__); \
  } while (false)
