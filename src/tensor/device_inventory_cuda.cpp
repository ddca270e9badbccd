// The part of the inventory that only a program with the CUDA side can tell.
#include <cuda_runtime.h>

#include "core/error.h"
#include "tensor/device_inventory.h"

namespace weft {
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

}  // namespace weft
