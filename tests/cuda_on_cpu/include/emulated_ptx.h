// The functions of kernels/ptx.cuh by the meaning that the PTX ISA documents; that header describes
// each.
#pragma once

#include <cstdint>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace emulation {

// One lane's part in a matrix product or load.
void mma_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b);
void ldmatrix(std::uint32_t* r, const void* row, int matrices, bool transposed);
void cp_async(void* shared, const void* global, int bytes, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);
std::uint8_t to_e4m3(float x);  // matmul.h

}  // namespace emulation

namespace weft::kernels {

inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulation::mma_16x8x16(d, a, b);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  emulation::ldmatrix(r, row, 4, false);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  emulation::ldmatrix(r, row, 4, true);
}
inline void ldmatrix_x2(std::uint32_t (&r)[2], const void* row) {
  emulation::ldmatrix(r, row, 2, false);
}
inline void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* row) {
  emulation::ldmatrix(r, row, 2, true);
}
inline void cp_async_16(void* shared, const void* global, bool valid) {
  emulation::cp_async(shared, global, 16, valid);
}
inline void cp_async_commit() { emulation::cp_async_commit(); }
template <int pending>
inline void cp_async_wait() {
  emulation::cp_async_wait(pending);
}
inline float exp2_approx(float x) {
  // Flushes subnormals, as .ftz does.
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline float rcp_approx(float x) {
  const float y = 1.0f / x;
  return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}
inline std::uint16_t e4m3_pair(float low, float high) {
  return static_cast<std::uint16_t>(emulation::to_e4m3(low) | emulation::to_e4m3(high) << 8);
}

}  // namespace weft::kernels
