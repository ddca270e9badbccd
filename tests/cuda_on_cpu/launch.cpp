// Kernel launches and their limits.
#include <algorithm>
#include <map>

#include "device.h"
#include "emulation.h"
#include "fibers.h"
#include "resources.h"
#include "streams.h"

using emulation::Device;
using emulation::fail;

namespace {

constexpr std::size_t plain_shared = 48 * 1024;

std::map<const void*, std::size_t> shared_limits;  // raised by cudaFuncSetAttribute
unsigned long long runs = 0;

std::size_t shared_limit(const void* kernel) {
  const auto found = shared_limits.find(kernel);
  return found == shared_limits.end() ? plain_shared : found->second;
}

}  // namespace

namespace emulation {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> body) {
  BEGIN_CALL("cudaLaunchKernelEx");
  const dim3 g = config.gridDim, b = config.blockDim;
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.x == 0 || b.y == 0 || b.z == 0 || g.x > 0x7fffffffu ||
      g.y > 65535 || g.z > 65535 || b.x > 1024 || b.y > 1024 || b.z > 64 ||
      std::size_t{b.x} * b.y * b.z > 1024)
    return fail(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > shared_limit(kernel)) return fail(cudaErrorInvalidValue);
  if (config.numAttrs != 0) return fail(cudaErrorNotSupported);
  if (registers_of_block(kernel, std::size_t{b.x} * b.y * b.z) > registers_in_all)
    return fail(cudaErrorLaunchOutOfResources);
  return enqueue(
      config.stream,
      simple("a kernel", [k = Kernel{kernel, std::move(body), g, b, config.dynamicSmemBytes}] {
        remember_kernel(k.address);
        if (kernel_faults()) return;
        run_kernel(k);
        ++runs;
      }));
}

unsigned long long kernels_run() {
  const Device device;
  return runs;
}

}  // namespace emulation

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  BEGIN_CALL(__func__);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > emulation::capability().shared_memory)
    return fail(cudaErrorInvalidValue);
  shared_limits[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* kernel) {
  BEGIN_CALL(__func__);
  *a = {};
  a->maxThreadsPerBlock = 1024;
  a->numRegs = emulation::registers_of(kernel);
  a->ptxVersion = a->binaryVersion = 80;
  a->maxDynamicSharedSizeBytes = static_cast<int>(shared_limit(kernel));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int block_size, std::size_t shared) {
  if (block_size <= 0 || block_size > 1024) return fail(cudaErrorInvalidValue);
  const emulation::Capability& c = emulation::capability();
  const std::size_t by_shared = (c.shared_memory + 1024) / (shared + 1024);
  *blocks =
      std::min({c.threads / block_size, static_cast<int>(by_shared),
                emulation::registers_in_all /
                    emulation::registers_of_block(kernel, static_cast<std::size_t>(block_size))});
  return cudaSuccess;
}
