// Pieces of the temporal attention kernels on tensor cores (temporal_mma.cu): bf16 tiles of 16
// frames of one head. A head's q, k, v ... lie in shared memory as matrices [16 tiles][stride], one
// row a frame, rows beyond T zero. The stride is an odd number of 16-byte pieces, so that eight
// rows of ldmatrix, and the eight rows times four pairs of a fragment, touch all 32 banks once. A
// lane's place in a fragment is (group, pair) = (lane / 4, lane % 4): it holds columns 8 c + 2 pair
// and the next of rows group and group + 8. That is a pair of the rotary embedding, and the four
// lanes of a group hold a whole row, so norm and rotation need no more than two shuffles a row.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "launch.cuh"
#include "ptx.cuh"

namespace weft::kernels::temporal {

using bf16_t = __nv_bfloat16;

constexpr float norm_epsilon = 1e-6f;
constexpr float log2_e = 1.44269504088896340736f;

template <int chunks>  // D / 8
struct Head {
  static constexpr int D = 8 * chunks;
  static constexpr int steps = (chunks + 1) / 2;  // of 16 along D
  static constexpr int stride = chunks % 2 == 1 ? D : D + 8;
  static constexpr int rope_stride = D / 2 + (chunks % 2 == 1 ? 0 : 4);  // of float2, the same rule
};

struct Shape {
  std::int64_t B;
  int T, S, H;
  int tiles;  // of 16 frames
  int heads;  // of a block: neighbours, so that a frame's piece of a block is one run of memory
  int warps_per_head;  // they share the tiles
  bool norm;
};

__device__ __forceinline__ float2 unpack(std::uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ std::uint32_t pack(float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  std::uint32_t bits;
  memcpy(&bits, &both, sizeof bits);
  return bits;
}

__device__ __forceinline__ std::uint32_t load_pair(const bf16_t* p) {
  return *reinterpret_cast<const std::uint32_t*>(p);
}
__device__ __forceinline__ void store_pair(bf16_t* p, std::uint32_t x) {
  *reinterpret_cast<std::uint32_t*>(p) = x;
}

// Sum over the four lanes that hold a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(full_mask, x, 1);
  return x + __shfl_xor_sync(full_mask, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(full_mask, x, 1));
  return fmaxf(x, __shfl_xor_sync(full_mask, x, 2));
}

// Fragments of 16 columns from `column` on. `half`: only eight of them exist, the others count as
// zero.
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], const bf16_t* m, int stride, int row,
                                       int column, bool half) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, m + (row + lane % 16) * stride + column + (half ? 0 : lane / 16 * 8));
  if (half) a[2] = a[3] = 0;
}
// B[k][n] = m[row + n][column + k]: two tiles of eight n.
__device__ __forceinline__ void load_b(std::uint32_t (&b)[2][2], const bf16_t* m, int stride,
                                       int row, int column, bool half) {
  const int lane = threadIdx.x % 32;
  std::uint32_t r[4];
  ldmatrix_x4(
      r, m + (row + lane % 8 + lane / 16 * 8) * stride + column + (half ? 0 : lane / 8 % 2 * 8));
  b[0][0] = r[0];
  b[0][1] = half ? 0 : r[1];
  b[1][0] = r[2];
  b[1][1] = half ? 0 : r[3];
}

// d [16, D] += a [16, 16] m[row .. row+15][0 .. D).
template <int chunks>
__device__ __forceinline__ void multiply(float (&d)[chunks][4], const std::uint32_t (&a)[4],
                                         const bf16_t* m, int row) {
  const int lane = threadIdx.x % 32;
  const bf16_t* at = m + (row + lane % 16) * Head<chunks>::stride;
#pragma unroll
  for (int c = 0; c + 1 < chunks; c += 2) {
    std::uint32_t r[4];
    ldmatrix_x4_trans(r, at + 8 * c + lane / 16 * 8);
    const std::uint32_t left[2] = {r[0], r[1]}, right[2] = {r[2], r[3]};
    mma_16x8x16(d[c], a, left);
    mma_16x8x16(d[c + 1], a, right);
  }
  if constexpr (chunks % 2 == 1) {
    std::uint32_t r[2];
    ldmatrix_x2_trans(r, at + 8 * (chunks - 1));
    mma_16x8x16(d[chunks - 1], a, r);
  }
}

// s [16, 16] += x[row_x ..] y[row_y ..]^T over 16 columns, or 8, as two tiles of eight columns.
__device__ __forceinline__ void multiply_step(float (&s)[2][4], const bf16_t* x, int row_x,
                                              const bf16_t* y, int row_y, int stride, int column,
                                              bool half) {
  std::uint32_t a[4], b[2][2];
  load_a(a, x, stride, row_x, column, half);
  load_b(b, y, stride, row_y, column, half);
  mma_16x8x16(s[0], a, b[0]);
  mma_16x8x16(s[1], a, b[1]);
}

// s = x[row_x ..] y[row_y ..]^T over D columns.
template <int chunks, int unrolled = chunks / 2>
__device__ __forceinline__ void multiply_rows(float (&s)[2][4], const bf16_t* x, int row_x,
                                              const bf16_t* y, int row_y) {
  constexpr int stride = Head<chunks>::stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][i] = s[1][i] = 0.0f;
#pragma unroll unrolled
  for (int step = 0; step < chunks / 2; ++step)
    multiply_step(s, x, row_x, y, row_y, stride, 16 * step, false);
  if constexpr (chunks % 2 == 1)
    multiply_step(s, x, row_x, y, row_y, stride, 8 * (chunks - 1), true);
}

// The fragment that a 16x16 result is as the left operand of the next product.
__device__ __forceinline__ void as_left(std::uint32_t (&a)[4], const float (&s)[2][4]) {
  a[0] = pack(s[0][0], s[0][1]);
  a[1] = pack(s[0][2], s[0][3]);
  a[2] = pack(s[1][0], s[1][1]);
  a[3] = pack(s[1][2], s[1][3]);
}

// What every head of the block needs: weights of the norms and the rotation of each frame, in
// shared memory.
template <int chunks>
struct Constants {
  float* wq;  // [D], 1 without norm
  float* wk;
  float2* rope;  // [T, rope_stride] (cos, sin), (1, 0) without rotation

  static std::size_t bytes(int T) {
    return (2 * Head<chunks>::D + 2 * static_cast<std::size_t>(T) * Head<chunks>::rope_stride) *
           sizeof(float);
  }
  __device__ explicit Constants(float* shared)
      : wq(shared),
        wk(wq + Head<chunks>::D),
        rope(reinterpret_cast<float2*>(wk + Head<chunks>::D)) {}

  __device__ void fill(const float* q, const float* k, const float* table, int T) {
    using H = Head<chunks>;
    for (int i = threadIdx.x; i < H::D; i += blockDim.x) {
      wq[i] = q != nullptr ? q[i] : 1.0f;
      wk[i] = k != nullptr ? k[i] : 1.0f;
    }
    for (int i = threadIdx.x; i < T * (H::D / 2); i += blockDim.x)
      rope[i / (H::D / 2) * H::rope_stride + i % (H::D / 2)] =
          table != nullptr ? reinterpret_cast<const float2*>(table)[i] : make_float2(1.0f, 0.0f);
  }
};

// Where a thread is in a run of 16-byte pieces of heads * D elements for each frame; neighbours
// take neighbouring pieces.
template <int chunks>
struct Walk {
  int t, piece, run, frames, pieces;  // the last two: what a step adds
  __device__ explicit Walk(const Shape& shape) : run(shape.heads * chunks) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    t = thread / run;
    piece = thread % run;
    frames = threads / run;
    pieces = threads % run;
  }
  __device__ void next() {
    t += frames;
    piece += pieces;
    if (piece >= run) {
      piece -= run;
      ++t;
    }
  }
  // In a matrix of the piece's head, matrices of heads being head_size apart.
  __device__ int at(int head_size) const {
    return piece / chunks * head_size + t * Head<chunks>::stride + piece % chunks * 8;
  }
};

// Copies heads * D elements of each frame into one matrix of each head. Frames beyond T become
// zero.
template <int chunks>
__device__ void fetch(const bf16_t* from, std::int64_t frame_stride, const Shape& shape, bf16_t* to,
                      int head_size) {
  for (Walk<chunks> w(shape); w.t < 16 * shape.tiles; w.next()) {
    const bool inside = w.t < shape.T;
    cp_async_16(to + w.at(head_size), from + (inside ? w.t : 0) * frame_stride + w.piece * 8,
                inside);
  }
}

// The way back, of frames below T.
template <int chunks>
__device__ void put(const bf16_t* from, int head_size, const Shape& shape, bf16_t* to,
                    std::int64_t frame_stride) {
  for (Walk<chunks> w(shape); w.t < shape.T; w.next())
    *reinterpret_cast<uint4*>(to + w.t * frame_stride + w.piece * 8) =
        *reinterpret_cast<const uint4*>(from + w.at(head_size));
}

// q' = rope(norm(q)) and k' = rope(norm(k)) of row t, each lane its own columns; q_to and k_to may
// be q and k. rstd_q, rstd_k [frames]: 1 / rms, written where given.
template <int chunks>
__device__ void prepare(const bf16_t* q, const bf16_t* k, bf16_t* q_to, bf16_t* k_to, int t,
                        const Constants<chunks>& constants, const Shape& shape, float* rstd_q,
                        float* rstd_k) {
  using H = Head<chunks>;
  const int pair = threadIdx.x % 4, at = t * H::stride + 2 * pair;
  std::uint32_t xq[chunks], xk[chunks];
  float squares_q = 0.0f, squares_k = 0.0f;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    xq[c] = load_pair(q + at + 8 * c);
    xk[c] = load_pair(k + at + 8 * c);
    const float2 vq = unpack(xq[c]), vk = unpack(xk[c]);
    squares_q += vq.x * vq.x + vq.y * vq.y;
    squares_k += vk.x * vk.x + vk.y * vk.y;
  }
  float scale_q = 1.0f, scale_k = 1.0f;
  if (shape.norm) {
    scale_q = rsqrtf(row_sum(squares_q) * (1.0f / H::D) + norm_epsilon);
    scale_k = rsqrtf(row_sum(squares_k) * (1.0f / H::D) + norm_epsilon);
  }
  if (rstd_q != nullptr && pair == 0) {
    rstd_q[t] = scale_q;
    rstd_k[t] = scale_k;
  }
  // Rows of zeros beyond T stay zero under any rotation.
  const float2* turns = constants.rope + (t < shape.T ? t : 0) * H::rope_stride + pair;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const float2 turn = turns[4 * c];
    const float2 wq = reinterpret_cast<const float2*>(constants.wq)[4 * c + pair];
    const float2 wk = reinterpret_cast<const float2*>(constants.wk)[4 * c + pair];
    const float2 vq = unpack(xq[c]), vk = unpack(xk[c]);
    const float q0 = vq.x * scale_q * wq.x, q1 = vq.y * scale_q * wq.y;
    const float k0 = vk.x * scale_k * wk.x, k1 = vk.y * scale_k * wk.y;
    store_pair(q_to + at + 8 * c, pack(q0 * turn.x - q1 * turn.y, q1 * turn.x + q0 * turn.y));
    store_pair(k_to + at + 8 * c, pack(k0 * turn.x - k1 * turn.y, k1 * turn.x + k0 * turn.y));
  }
}

}  // namespace weft::kernels::temporal
