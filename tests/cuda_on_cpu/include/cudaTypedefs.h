// Types of the driver's functions, and how the runtime finds them.
#pragma once

#include "cuda.h"
#include "cuda_runtime.h"

using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType,
                                                       cuuint32_t, void*, const cuuint64_t*,
                                                       const cuuint64_t*, const cuuint32_t*,
                                                       const cuuint32_t*, CUtensorMapInterleave,
                                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                       CUtensorMapFloatOOBfill);

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
constexpr unsigned long long cudaEnableDefault = 0;

// Knows cuTensorMapEncodeTiled, for bf16 tensors of four dimensions with 128-byte swizzles.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
