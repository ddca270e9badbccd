// The host's side of what flash_sm90.cu and flash_sm90_backward.cu share: which problems they take,
// and the maps of their tensors.
#include "attention/flash_sm90_tiles.cuh"

#include <cudaTypedefs.h>

#include <cstdlib>
#include <string_view>

namespace weft::kernels {

CUtensorMap make_tensor_map(const FlashRows<const __nv_bfloat16>& rows, const FlashShape& shape,
                            int count, int box_rows) {
  // Looks the driver's function up through the runtime: the binary references no libcuda symbol and
  // starts without a driver.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
#else
    CUDA_CHECK(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    WEFT_CHECK(found == cudaDriverEntryPointSuccess, Exit::hardware,
               "use a driver for CUDA 12 or newer, or WEFT_ATTENTION=sm80",
               "the CUDA driver has no cuTensorMapEncodeTiled (query result {})",
               static_cast<int>(found));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map;
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  // From the fastest dimension on; each stride is a multiple of the one before it.
  const cuuint64_t dims[4] = {size(shape.D), size(shape.heads), size(count), size(shape.sequences)};
  const cuuint64_t strides[3] = {size(rows.head) * 2, size(rows.row) * 2, size(rows.outer) * 2};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(rows.base), dims,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEFT_CHECK(result == CUDA_SUCCESS, Exit::hardware,
             "this is a bug in weft; WEFT_ATTENTION=sm80 goes round it",
             "cuTensorMapEncodeTiled failed with {} for {} sequences of {} rows, {} heads of {}",
             static_cast<int>(result), shape.sequences, count, shape.heads, shape.D);
  return map;
}

CUtensorMap make_key_map(const FlashRows<const __nv_bfloat16>& rows, const FlashShape& shape,
                         int box_rows) {
  if (shape.key_offsets == nullptr) return make_tensor_map(rows, shape, shape.nk, box_rows);
  FlashRows<const __nv_bfloat16> all = rows;
  all.outer = rows.row * shape.nk;
  FlashShape one = shape;
  one.sequences = 1;
  return make_tensor_map(all, one, shape.nk, box_rows);
}

bool flash_sm90_takes(const FlashShape& shape) {
  static const bool allowed = [] {
    const char* choice = std::getenv("WEFT_ATTENTION");
    WEFT_CHECK(choice == nullptr || std::string_view(choice) == "sm80", Exit::usage,
               "set it to sm80, or leave it unset", "WEFT_ATTENTION={} names no attention kernels",
               choice);
#ifdef WEFT_WITHOUT_SM90A  // built without WEFT_CUDA_ARCHITECTURES=90a: on any GPU these kernels
                           // are empty
    return false;
#else
    return choice == nullptr && cuda_properties().major == 9 && cuda_properties().minor == 0;
#endif
  }();
  return allowed && shape.nk > 0 && shape.inner == 1 && shape.D >= 64 && shape.D % 8 == 0 &&
         (shape.last_bias == nullptr || shape.key_offsets != nullptr);
}

}  // namespace weft::kernels
