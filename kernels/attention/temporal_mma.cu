// Temporal self attention in bf16 on tensor cores, D = 64, 72, 128: forward; the backward is in
// temporal_mma_backward.cu, what they share in temporal_mma.cuh. CPU twin
// src/ops/cpu/attention/attention.cpp, cases tests/kernels/attention.cpp.
//   forward   reads q, k, v and writes out: 8 T D bytes a head and 4 T^2 D operations, at T 15 7.5
//             operations a byte, where a GPU has some 200: only traffic counts. Each byte is moved
//             once, by runs of whole 16-byte pieces.
//   backward  reads q, k, v, dout (beyond 16 frames out, too) and writes three gradients: 14 (16) T
//             D bytes, 10 T^2 D operations.
// A block takes one token of one sample and a few neighbouring heads for all frames, so that a
// frame's piece is one run of memory (2 heads of 72: 288 bytes, nine whole sectors), fetched with
// cp.async; nothing is permuted. Up to 8 frames, two tokens share the 16 rows of a tile, and a mask
// keeps them apart. There is no pipeline within a block: blocks are small, and while one computes
// others fetch. What binds beside memory is the issue of instructions. At T 15 and D 72, counted in
// SASS for sm_90a and not measured:
//   forward   4 warps, 33 KiB, at most 128 registers: 4 blocks, so 100 KiB under way on a
//             multiprocessor of an H200, where 4.3 TB/s times a microsecond of latency over 132 of
//             them is 33 KiB. A head takes some 1,300 warp instructions, 325 clocks at four a
//             clock, where the memory of an H100 takes 670. Five frames: two heads 1,400 for 448
//             clocks.
//   backward  4 warps, 33 KiB, at most 128 registers: 4 blocks, 74 KiB under way. A head takes some
//             3,600 warp instructions, 900 clocks, where memory takes 1,180: the tighter one.
//             Five frames: two heads 3,700 for 780 clocks.
// Fragments come without bank conflicts. Scratch: 2 D f32 for each block of the backward, at most
// 4096 blocks.
#include "attention/temporal_mma.cuh"

#include "attention/temporal.cuh"

namespace weft::kernels {
namespace temporal {
namespace {

template <int chunks, int most_threads>
__global__ void __launch_bounds__(most_threads, (chunks > 9 ? 3 : 5) * 128 / most_threads)
    forward_kernel(const bf16_t* qkv, const float* wq, const float* wk, const float* rope,
                   bf16_t* out, float* lse, Shape shape, float factor) {
  using H = Head<chunks>;
  constexpr Tiling tiling = Tiling::many;
  unsigned char* shared = shared_memory<unsigned char>();
  const int frames = 16 * shape.tiles, matrix = frames * H::stride;
  bf16_t* heads = reinterpret_cast<bf16_t*>(shared);  // [heads][q, k, v][frames][stride]
  Constants<chunks> constants(reinterpret_cast<float*>(heads + shape.heads * 3 * matrix));

  const Unit<chunks, tiling> unit(blockIdx.x, shape);
  const Copies<chunks, tiling> copies(shape, 3 * matrix);
  const int C = shape.H * H::D;
  copies.template fetch<3>(qkv + unit.head * H::D, unit, 3 * C, C, shape, heads, matrix);
  cp_async_commit();
  constants.fill(wq, wk, rope, shape.T);
  cp_async_wait<0>();
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int head = warp / shape.warps_per_head, share = warp % shape.warps_per_head;
  bf16_t* const q = heads + head * 3 * matrix;
  bf16_t *const k = q + matrix, *const v = k + matrix;
  for (int half = share; half < 2 * shape.tiles; half += shape.warps_per_head)
    prepare<chunks, tiling>(q, k, q, k, 8 * half + group, constants, shape, nullptr, nullptr);
  __syncthreads();

  const float scale = factor * log2_e;
  for (int tile = share; tile < shape.tiles; tile += shape.warps_per_head) {
    float o[chunks][4] = {};
    // Maximum and sum of rows group and group + 8; the maximum is of the scores before `scale`.
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int keys = 0; keys < shape.tiles; ++keys) {
      float p[2][4];
      multiply_rows<chunks>(p, q, 16 * tile, k, 16 * keys);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (16 * keys + 8 * n + 2 * pair + i % 2 >= shape.T) p[n][i] = -INFINITY;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Every tile of keys has at least one below T, so the maximum is finite.
        const float high = row_max(
            fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1])));
        const float before = top[r];
        top[r] = fmaxf(before, high);
        if (keys > 0) {
          const float shrink = exp2_approx((before - top[r]) * scale);
          sum[r] *= shrink;
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            o[c][2 * r] *= shrink;
            o[c][2 * r + 1] *= shrink;
          }
        }
        const float high2 = top[r] * scale;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 2 * r; i < 2 * r + 2; ++i) {
            p[n][i] = exp2_approx(p[n][i] * scale - high2);
            sum[r] += p[n][i];
          }
      }
      std::uint32_t left[4];
      as_left(left, p);
      multiply<chunks>(o, left, v, 16 * keys);
    }
    // This warp alone reads this tile of q: out takes its place.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = 16 * tile + group + 8 * r;
      const float total = row_sum(sum[r]), inverse = rcp_approx(total);
#pragma unroll
      for (int c = 0; c < chunks; ++c)
        store_pair(q + t * H::stride + 8 * c + 2 * pair,
                   pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse));
      if (pair == 0 && t < shape.T)
        lse[(static_cast<std::int64_t>(unit.token) * shape.H + unit.head + head) * shape.T + t] =
            top[r] * factor + __logf(total);
    }
  }
  __syncthreads();
  copies.template put<1>(heads, matrix, shape, unit, C, 0, out + unit.head * H::D);
}

// q' and k' of one tile from q and k in shared memory, as fragments: the pairs that a lane loads
// are those that it holds of the left operand q' and of the right operand k'^T.
template <int chunks, Tiling tiling>
__device__ __forceinline__ void prepare_tile(std::uint32_t (&q)[2][chunks],
                                             std::uint32_t (&k)[2][chunks], const bf16_t* q_from,
                                             const bf16_t* k_from,
                                             const Constants<chunks>& constants,
                                             const Shape& shape) {
  using H = Head<chunks>;
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  float scale_q[2] = {1.0f, 1.0f}, scale_k[2] = {1.0f, 1.0f};
  const float2* turns[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = group + 8 * r, at = row * H::stride + 2 * pair;
    float squares_q = 0.0f, squares_k = 0.0f;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      q[r][c] = load_pair(q_from + at + 8 * c);
      k[r][c] = load_pair(k_from + at + 8 * c);
      const float2 vq = unpack(q[r][c]), vk = unpack(k[r][c]);
      squares_q = dot(vq, vq, squares_q);
      squares_k = dot(vk, vk, squares_k);
    }
    if (shape.norm) {
      scale_q[r] = rsqrtf(row_sum(squares_q) * (1.0f / H::D) + qk_norm_epsilon);
      scale_k[r] = rsqrtf(row_sum(squares_k) * (1.0f / H::D) + qk_norm_epsilon);
    }
    // Rows of zeros beyond T stay zero under any rotation.
    turns[r] = constants.turns(frame_of<tiling>(row), shape.T) + pair;
  }
  const float2* const wq = reinterpret_cast<const float2*>(constants.wq) + pair;
  const float2* const wk = reinterpret_cast<const float2*>(constants.wk) + pair;
#pragma unroll
  for (int c = 0; c < chunks; ++c)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 turn = turns[r][4 * c], vq = unpack(q[r][c]), vk = unpack(k[r][c]);
      const float q0 = vq.x * scale_q[r] * wq[4 * c].x, q1 = vq.y * scale_q[r] * wq[4 * c].y;
      const float k0 = vk.x * scale_k[r] * wk[4 * c].x, k1 = vk.y * scale_k[r] * wk[4 * c].y;
      q[r][c] = pack(q0 * turn.x - q1 * turn.y, q1 * turn.x + q0 * turn.y);
      k[r][c] = pack(k0 * turn.x - k1 * turn.y, k1 * turn.x + k0 * turn.y);
    }
}

// Where one tile holds all frames: a warp a head, and q' and k' stay in registers.
template <int chunks, Tiling tiling>
__global__ void __launch_bounds__(128, chunks > 9 ? 3 : 4)
    forward_tile_kernel(const bf16_t* qkv, const float* wq, const float* wk, const float* rope,
                        bf16_t* out, float* lse, Shape shape, float factor) {
  using H = Head<chunks>;
  constexpr int matrix = 16 * H::stride;
  bf16_t* heads = shared_memory<bf16_t>();  // [heads][q, k, v][16][stride]
  Constants<chunks> constants(reinterpret_cast<float*>(heads + shape.heads * 3 * matrix));
  const Unit<chunks, tiling> unit(blockIdx.x, shape);
  const Copies<chunks, tiling> copies(shape, 3 * matrix);
  const int C = shape.H * H::D;
  copies.template fetch<3>(qkv + unit.head * H::D, unit, 3 * C, C, shape, heads, matrix);
  cp_async_commit();
  constants.fill(wq, wk, rope, shape.T);
  cp_async_wait<0>();
  __syncthreads();

  const int lane = threadIdx.x % 32, head = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  bf16_t* const q = heads + head * 3 * matrix;
  float p[2][4] = {};
  {
    std::uint32_t a[2][chunks], b[2][chunks];
    prepare_tile<chunks, tiling>(a, b, q, q + matrix, constants, shape);
#pragma unroll
    for (int c = 0; c < chunks; c += 2) {
      const bool whole = c + 1 < chunks;  // the last eight columns of an odd number have no partner
      const int next = whole ? c + 1 : c;
      const std::uint32_t left[4] = {a[0][c], a[1][c], whole ? a[0][next] : 0,
                                     whole ? a[1][next] : 0};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t right[2] = {b[n][c], whole ? b[n][next] : 0};
        mma_16x8x16(p[n], left, right);
      }
    }
  }
  const float scale = factor * log2_e;
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The rows of one of two tokens, i / 2, meet only the keys of that token, n.
      const int key = frame_of<tiling>(8 * n) + 2 * pair + i % 2;
      if (key >= shape.T || (tiling == Tiling::shared && n != i / 2)) p[n][i] = -INFINITY;
      top[i / 2] = fmaxf(top[i / 2], p[n][i]);
    }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = row_max(top[r]);
    const float high = top[r] * scale;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        p[n][i] = exp2_approx(p[n][i] * scale - high);
        sum[r] += p[n][i];
      }
  }
  float o[chunks][4] = {};
  std::uint32_t left[4];
  as_left(left, p);
  multiply<chunks>(o, left, q + 2 * matrix, 0);
  // Out takes the place of q, of which each lane has read what it writes.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = group + 8 * r, frame = frame_of<tiling>(t);
    const float total = row_sum(sum[r]), inverse = rcp_approx(total);
#pragma unroll
    for (int c = 0; c < chunks; ++c)
      store_pair(q + t * H::stride + 8 * c + 2 * pair,
                 pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse));
    const unsigned other = tiling == Tiling::shared ? static_cast<unsigned>(r) : 0;
    if (pair == 0 && frame < shape.T && other < static_cast<unsigned>(unit.present))
      lse[(static_cast<std::int64_t>(unit.token + other) * shape.H + unit.head + head) * shape.T +
          frame] = top[r] * factor + __logf(total);
  }
  __syncthreads();
  copies.template put<1>(heads, matrix, shape, unit, C, 0, out + unit.head * H::D);
}

}  // namespace

bool mma_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                 Tensor& out, Tensor& lse) {
  if (qkv.dtype() != DType::bf16 || !aligned<8>(qkv, out)) return false;
  return by_size(qkv, [&]<int chunks, Tiling tiling>() {
    const Shape s = shape_of(qkv, wq.defined(), false);
    const std::size_t shared = sizeof(bf16_t) * s.heads * 3 * 16 * s.tiles * Head<chunks>::stride +
                               Constants<chunks>::bytes(s.T);
    if (!fits(shared)) return false;
    const auto start = [&](auto kernel) {
      launch(kernel, dim3(static_cast<unsigned>(units_of(s))), dim3(threads_of(s)), shared,
             data<bf16_t>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
             data_or_null<float>(rope), data<bf16_t>(out), data<float>(lse), s,
             inverse_root(qkv.dim(5)));
    };
    if constexpr (tiling == Tiling::many)
      start(threads_of(s) <= 128 ? forward_kernel<chunks, 128> : forward_kernel<chunks, 256>);
    else
      start(forward_tile_kernel<chunks, tiling>);
    return true;
  });
}

}  // namespace temporal
}  // namespace weft::kernels
