// Pieces of the temporal attention kernels on tensor cores (temporal_mma.cu): bf16 tiles of 16
// frames of one head. A head's q, k, v ... lie in shared memory as matrices [16 tiles][stride], one
// row a frame, rows beyond T zero. The stride is an odd number of 16-byte pieces, so that eight
// rows of ldmatrix, and the eight rows times four pairs of a fragment, touch all 32 banks once. A
// lane's place in a fragment is (group, pair) = (lane / 4, lane % 4): it holds columns 8 c + 2 pair
// and the next of rows group and group + 8. That is a pair of the rotary embedding, and the four
// lanes of a group hold a whole row, so norm and rotation need no more than two shuffles a row.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/qk_norm.cuh"
#include "divide.cuh"
#include "launch.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "vector.cuh"

namespace weft::kernels::temporal {

using bf16_t = __nv_bfloat16;

template <int chunks>  // D / 8
struct Head {
  static constexpr int D = 8 * chunks;
  static constexpr int steps = (chunks + 1) / 2;  // of 16 along D
  static constexpr int stride = chunks % 2 == 1 ? D : D + 8;
  static constexpr int rope_stride = D / 2 + (chunks % 2 == 1 ? 0 : 4);  // of float2, the same rule
};

// How frames lie over tiles of 16 rows: many tiles hold a token, one tile holds a token (9 to 16
// frames), or two tokens of up to 8 frames share one, rows 0 to 7 and 8 to 15, and each attends to
// its own rows alone.
enum class Tiling { many, one, shared };

struct Shape {
  int T, S, H;
  int tiles;  // of 16 rows
  int heads;  // of a block: neighbours, so that a frame's piece of a block is one run of memory
  int warps_per_head;  // they share the tiles
  bool norm;
  unsigned tokens;               // B * S
  int step;                      // frames that the block's threads copy at once
  Divisor columns, groups, run;  // of S, H / heads and 16-byte pieces of a frame: heads * D / 8
};

// The frame of a row of a head's matrix.
template <Tiling tiling>
__device__ __forceinline__ int frame_of(int row) {
  return tiling == Tiling::shared ? row % 8 : row;
}

__device__ __forceinline__ float2 unpack(std::uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
// sum + a b, in two instructions.
__device__ __forceinline__ float dot(float2 a, float2 b, float sum) {
  return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
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

  // The rotation of a frame; of some frame where T ends before it.
  __device__ __forceinline__ const float2* turns(int frame, int T) const {
    return rope + (frame < T ? frame : 0) * Head<chunks>::rope_stride;
  }

  // Loops over threads and frames stay loops: to unroll one, the compiler divides by its step.
  __device__ void fill(const float* q, const float* k, const float* table, int T) {
    using H = Head<chunks>;
#pragma unroll 1
    for (int i = threadIdx.x; i < H::D; i += blockDim.x) {
      wq[i] = q != nullptr ? q[i] : 1.0f;
      wk[i] = k != nullptr ? k[i] : 1.0f;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < T * (H::D / 2); i += blockDim.x)
      rope[i / (H::D / 2) * H::rope_stride + i % (H::D / 2)] =
          table != nullptr ? reinterpret_cast<const float2*>(table)[i] : make_float2(1.0f, 0.0f);
  }
};

// What a block works on: neighbouring heads of one token, or of two that share a tile.
template <int chunks, Tiling tiling>
struct Unit {
  static constexpr int tokens = tiling == Tiling::shared ? 2 : 1;
  unsigned token;        // the first
  int head;              // the first
  int present;           // tokens: 1 where the last has no partner
  unsigned row[tokens];  // of [B,T,S], where frame 0 of the token is; frames are S rows apart

  __device__ __forceinline__ Unit(unsigned unit, const Shape& shape) {
    token = shape.groups.split(unit) * tokens;
    head = static_cast<int>(unit) * shape.heads;
    present = token + tokens <= shape.tokens ? tokens : 1;
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
      unsigned column = token + i;
      const unsigned batch = shape.columns.split(column);
      row[i] = batch * static_cast<unsigned>(shape.T * shape.S) + column;
    }
  }
};

// How a block copies its frames: a thread takes one 16-byte piece of every step-th frame, and
// neighbours take neighbouring pieces. Threads that are left over behind the last whole frame of
// those `step` start behind the last row: they copy nothing.
//
// In memory a frame of a token is a row of row_size elements, of which the block's heads are one
// run of heads * D; q, k and v (`parts`) lie part_stride apart. In shared memory each part of a
// head is a matrix of frames, its parts `matrix` apart.
template <int chunks, Tiling tiling>
class Copies {
 public:
  // The first matrices of two heads are head_size apart.
  __device__ __forceinline__ Copies(const Shape& shape, int head_size) {
    unsigned piece = threadIdx.x;
    frame_ = static_cast<int>(shape.run.split(piece));
    if (frame_ >= shape.step) frame_ = rows(shape);
    const int head = static_cast<int>(piece) / chunks, chunk = static_cast<int>(piece) % chunks;
    in_run_ = 8 * static_cast<int>(piece);
    in_matrices_ = head * head_size + 8 * chunk;
  }

  // Asks for the frames of `from`; rows of the matrices that no frame belongs to become zero.
  template <int parts>
  __device__ __forceinline__ void fetch(const bf16_t* from, const Unit<chunks, tiling>& unit,
                                        int row_size, int part_stride, const Shape& shape,
                                        bf16_t* to, int matrix) const {
    const std::int64_t frame_apart = static_cast<std::int64_t>(shape.S) * row_size;
#pragma unroll
    for (int token = 0; token < unit.tokens; ++token) {
      const bf16_t* const first = from + std::int64_t{unit.row[token]} * row_size + in_run_;
      bf16_t* const row_0 = to + row_of(token) + in_matrices_;
      const int frames = token < unit.present ? shape.T : 0;
#pragma unroll 1
      for (int t = frame_; t < rows(shape); t += shape.step)
#pragma unroll
        for (int part = 0; part < parts; ++part)
          // Nothing is read, and zeros are written, where the frame does not exist.
          cp_async_16(row_0 + t * stride + part * matrix,
                      first + t * frame_apart + part * part_stride, t < frames);
    }
  }

  // The way back, of rows that have a frame.
  template <int parts>
  __device__ __forceinline__ void put(const bf16_t* from, int matrix, const Shape& shape,
                                      const Unit<chunks, tiling>& unit, int row_size,
                                      int part_stride, bf16_t* to) const {
    const std::int64_t frame_apart = static_cast<std::int64_t>(shape.S) * row_size;
#pragma unroll
    for (int token = 0; token < unit.tokens; ++token) {
      const bf16_t* const row_0 = from + row_of(token) + in_matrices_;
      bf16_t* const first = to + std::int64_t{unit.row[token]} * row_size + in_run_;
      const int frames = token < unit.present ? shape.T : 0;
#pragma unroll 1
      for (int t = frame_; t < frames; t += shape.step)
#pragma unroll
        for (int part = 0; part < parts; ++part)
          *reinterpret_cast<uint4*>(first + t * frame_apart + part * part_stride) =
              *reinterpret_cast<const uint4*>(row_0 + t * stride + part * matrix);
    }
  }

 private:
  static constexpr int stride = Head<chunks>::stride;
  // Rows of a token in a matrix, and where they begin: the second of two has rows 8 to 15.
  __device__ static int rows(const Shape& shape) {
    return tiling == Tiling::shared ? 8 : 16 * shape.tiles;
  }
  __device__ static int row_of(int token) { return 8 * token * stride; }

  int frame_;        // the first that the thread copies
  int in_run_;       // its piece: the first element, counted from the run's
  int in_matrices_;  // and from the first element of row 0 of the first head's first matrix
};

// q' = rope(norm(q)) and k' = rope(norm(k)) of row t, each lane its own columns; q_to and k_to may
// be q and k. rstd_q, rstd_k [frames]: 1 / rms, written where given.
template <int chunks, Tiling tiling>
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
    squares_q = dot(vq, vq, squares_q);
    squares_k = dot(vk, vk, squares_k);
  }
  float scale_q = 1.0f, scale_k = 1.0f;
  if (shape.norm) {
    scale_q = rsqrtf(row_sum(squares_q) * (1.0f / H::D) + qk_norm_epsilon);
    scale_k = rsqrtf(row_sum(squares_k) * (1.0f / H::D) + qk_norm_epsilon);
  }
  if (rstd_q != nullptr && pair == 0) {
    rstd_q[t] = scale_q;
    rstd_k[t] = scale_k;
  }
  // Rows of zeros beyond T stay zero under any rotation.
  const float2* turns = constants.turns(frame_of<tiling>(t), shape.T) + pair;
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

// The largest of 4, 2, 1 heads a block that divides H and is at most `most`.
inline int heads_of_block(int H, int most) {
  while (H % most != 0) most /= 2;
  return most;
}

inline Shape shape_of(const Tensor& qkv, bool norm, bool backward) {
  const int T = static_cast<int>(qkv.dim(1)), H = static_cast<int>(qkv.dim(4));
  const int tiles = (T + 15) / 16;
  // About 50 KiB a block, so that several are at work on a multiprocessor.
  const int most = backward ? (tiles <= 2 ? 2 : 1) : (tiles <= 2 ? 4 : 2);
  const int heads = heads_of_block(H, most);
  // A warp takes a tile; in the backward one for its queries and one for its keys.
  int warps_per_head = std::min((backward ? 2 : 1) * tiles, 8 / heads);
  if (backward) warps_per_head -= warps_per_head % 2;
  const int run = heads * static_cast<int>(qkv.dim(5)) / 8, threads = 32 * heads * warps_per_head;
  WEFT_ASSERT(run <= threads && qkv.numel() / (3 * H) < std::int64_t{1} << 31);
  return {.T = T,
          .S = static_cast<int>(qkv.dim(2)),
          .H = H,
          .tiles = tiles,
          .heads = heads,
          .warps_per_head = warps_per_head,
          .norm = norm,
          .tokens = static_cast<unsigned>(qkv.dim(0) * qkv.dim(2)),
          .step = threads / run,
          .columns = Divisor(qkv.dim(2)),
          .groups = Divisor(H / heads),
          .run = Divisor(run)};
}

inline unsigned threads_of(const Shape& s) {
  return static_cast<unsigned>(32 * s.heads * s.warps_per_head);
}

// Blocks' worth of work.
inline std::int64_t units_of(const Shape& s) {
  return (s.T <= 8 ? (s.tokens + 1) / 2 : s.tokens) * static_cast<std::int64_t>(s.H / s.heads);
}

inline bool fits(std::size_t shared) { return shared <= cuda_properties().sharedMemPerBlockOptin; }

// Calls f.operator()<D / 8, tiling>() for the sizes of which there is a kernel; false for others.
template <class F>
bool by_size(const Tensor& qkv, F&& f) {
  const std::int64_t T = qkv.dim(1), D = qkv.dim(5);
  const auto by_tiling = [&]<int chunks>() {
    if (T <= 8) return f.template operator()<chunks, Tiling::shared>();
    if (T <= 16) return f.template operator()<chunks, Tiling::one>();
    return f.template operator()<chunks, Tiling::many>();
  };
  if (D == 64) return by_tiling.template operator()<8>();
  if (D == 72) return by_tiling.template operator()<9>();
  if (D == 128) return by_tiling.template operator()<16>();
  return false;
}

}  // namespace weft::kernels::temporal
