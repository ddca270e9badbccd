// What weft takes from the driver's header: tensor maps (kernels/attention/flash_sm90.cu).
// cudaTypedefs.h has the function's type.
#pragma once

#include <cstddef>
#include <cstdint>

using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;

// Opaque there; here what was asked for. Dimension 0 is the fastest.
struct CUtensorMap_st {
  std::byte* base;
  cuuint64_t size[4], stride[3];  // elements, bytes
  cuuint32_t box[4];
};
using CUtensorMap = CUtensorMap_st;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
