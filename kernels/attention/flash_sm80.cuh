// Fragments of mma.sync (ptx.cuh, mma_16x8x16) from tiles in shared memory, for flash_sm80*.cu.
//
// Bank conflicts: ldmatrix reads eight 16-byte rows at a time. A pitch of an odd number of 16-byte
// pieces puts eight consecutive rows on eight different groups of four banks, so every ldmatrix
// here takes its least number of cycles.
#pragma once

#include <cstring>

#include "attention/flash_common.cuh"

namespace weft::kernels {

using bf16_t = __nv_bfloat16;

constexpr int tile_pitch(int columns) { return (columns / 8 | 1) * 8; }

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}

// A [16,16] from rows [row, column] on of a row-major tile.
template <int PITCH>
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], const bf16_t* tile, int row,
                                       int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, tile + (row + lane % 16) * PITCH + column + lane / 16 * 8);
}
// Two neighbouring B [16,8], B = tile^T: tile rows are B's columns. b[0..1] is the first, b[2..3]
// the second.
template <int PITCH>
__device__ __forceinline__ void load_b(std::uint32_t (&b)[4], const bf16_t* tile, int row,
                                       int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(b, tile + (row + lane / 16 * 8 + lane % 8) * PITCH + column + lane / 8 % 2 * 8);
}
// Two neighbouring B [16,8] of the tile itself: tile rows are B's rows.
template <int PITCH>
__device__ __forceinline__ void load_b_trans(std::uint32_t (&b)[4], const bf16_t* tile, int row,
                                             int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(b, tile + (row + lane % 16) * PITCH + column + lane / 16 * 8);
}
template <int PITCH>
__device__ __forceinline__ void load_b_trans(std::uint32_t (&b)[2], const bf16_t* tile, int row,
                                             int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x2_trans(b, tile + (row + lane % 16) * PITCH + column);
}

__device__ __forceinline__ void mma_pair(float (&d0)[4], float (&d1)[4],
                                         const std::uint32_t (&a)[4], const std::uint32_t (&b)[4]) {
  const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
  mma_16x8x16(d0, a, b0);
  mma_16x8x16(d1, a, b1);
}

// scores [16, 8 N] = (rows of `a` from a_row on) x (all 8 N rows of `b`)^T over KD columns.
template <int KD, int N, int PITCH>
__device__ __forceinline__ void row_products(float (&scores)[N][4], const bf16_t* a, int a_row,
                                             const bf16_t* b) {
#pragma unroll
  for (int t = 0; t < N; ++t)
    for (int e = 0; e < 4; ++e) scores[t][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < KD; k += 16) {
    std::uint32_t fa[4];
    load_a<PITCH>(fa, a, a_row, k);
#pragma unroll
    for (int t = 0; t < N; t += 2) {
      std::uint32_t fb[4];
      load_b<PITCH>(fb, b, t * 8, k);
      mma_pair(scores[t], scores[t + 1], fa, fb);
    }
  }
}

// One column, or one row, of this warp's scores [16, 8 N] gets a bias; a row that is not among them
// changes nothing.
template <int N>
__device__ __forceinline__ void add_to_column(float (&scores)[N][4], int column, float bias) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (t * 8 + lane % 4 * 2 + e % 2 == column) scores[t][e] += bias;
}
template <int N>
__device__ __forceinline__ void add_to_row(float (&scores)[N][4], int row, float bias) {
  const int lane = threadIdx.x % 32;
  if (row < 0 || row >= 16 || lane / 4 != row % 8) return;
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e / 2 == row / 8) scores[t][e] += bias;
}

// sum [16, ND] += (p [16, 8 N], accumulators rounded to bf16) x (8 N rows of `b`).
template <int ND, int N, int PITCH>
__device__ __forceinline__ void weighted_rows(float (&sum)[ND / 8][4], const float (&p)[N][4],
                                              const bf16_t* b) {
#pragma unroll
  for (int t = 0; t < N; t += 2) {
    // The accumulators of two neighbouring products are laid out as one A operand.
    const std::uint32_t a[4] = {pack_bf16(p[t][0], p[t][1]), pack_bf16(p[t][2], p[t][3]),
                                pack_bf16(p[t + 1][0], p[t + 1][1]),
                                pack_bf16(p[t + 1][2], p[t + 1][3])};
#pragma unroll
    for (int n = 0; n + 1 < ND / 8; n += 2) {
      std::uint32_t fb[4];
      load_b_trans<PITCH>(fb, b, t * 8, n * 8);
      mma_pair(sum[n], sum[n + 1], a, fb);
    }
    if constexpr (ND / 8 % 2 == 1) {
      std::uint32_t fb[2];
      load_b_trans<PITCH>(fb, b, t * 8, ND - 8);
      mma_16x8x16(sum[ND / 8 - 1], a, fb);
    }
  }
}

// Rows group and group + 8 of this warp's 16, times `factor`, to rows [first ..] of `to`, those
// below n only.
template <int ND>
__device__ __forceinline__ void store_rows(const float (&x)[ND / 8][4], float factor0,
                                           float factor1, bf16_t* to, std::int64_t row, int first,
                                           int n, int D) {
  const int lane = threadIdx.x % 32, i = first + lane / 4;
#pragma unroll
  for (int t = 0; t < ND / 8; ++t) {
    const int c = t * 8 + lane % 4 * 2;
    if (c >= D) continue;
    if (i < n)
      *reinterpret_cast<std::uint32_t*>(to + i * row + c) =
          pack_bf16(x[t][0] * factor0, x[t][1] * factor0);
    if (i + 8 < n)
      *reinterpret_cast<std::uint32_t*>(to + (i + 8) * row + c) =
          pack_bf16(x[t][2] * factor1, x[t][3] * factor1);
  }
}

// Calls f.operator()<KD, ND>() with the smallest instance that holds D: K padded to a multiple of
// 16 in the products over D, N kept at 72 for D = 72 (of 80 + 72 lanes 72 + 72 do useful work).
template <class F>
void by_head_size(int D, F&& f) {
  if (D <= 32)
    f.template operator()<32, 32>();
  else if (D <= 64)
    f.template operator()<64, 64>();
  else if (D <= 72)
    f.template operator()<80, 72>();
  else
    f.template operator()<128, 128>();
}

}  // namespace weft::kernels
