// The part of the inventory that only a program with the CUDA side can tell.
#include <cublasLt.h>
#include <cuda_runtime.h>
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif
#ifdef WEFT_CUDNN
#include <cudnn.h>
#endif

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
