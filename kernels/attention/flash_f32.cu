// Flash attention in f32 on the ordinary cores, forward and backward: exact f32, for tests, probes
// and small models. CPU twin: src/ops/cpu/attention/attention.cpp. Cases:
// tests/kernels/attention.cpp.
//
// Least work of one head: forward 4 nq nk D, backward 10 nq nk D operations (here 14: see
// flash_sm80_backward.cu, whose order of sums this follows); every operand is read or written once.
// Bound by FFMA (67 TFLOP/s on an H200): a thread makes 4 x 2 scores (of wide heads 4 x 1) from
// float4 rows of both sides, and 4 x D/16 results from them, so that shared memory is read once for
// every 1.3 (scores) to 2 (results) FFMA. 256 threads are 16 x 16: ty owns rows 4 ty .. 4 ty + 3 of
// the block's 64, and its 16 lanes are half a warp, so that a row's maximum and sum are four
// shuffles and scores pass through shared memory under __syncwarp() alone.
#include "attention/flash_common.cuh"

namespace weft::kernels {
namespace {

constexpr int f32_threads = 256, f32_rows = 64;

// DP is D rounded up to what is instantiated. An odd number of 16-byte pieces a row spreads eight
// rows over all banks.
template <int DP>
struct F32Tile {
  // Rows of the other side at a time: of wide heads few, so that the backward fits the 99 KiB that
  // GPUs for desktops have.
  static constexpr int pass_rows = DP <= 80 ? 32 : 16;
  static constexpr int columns = pass_rows / 16;  // scores of a thread in a row
  static constexpr bool biased = DP == 128;       // looks at last_bias
  static constexpr int pitch = (DP / 4 | 1) * 4, score_pitch = pass_rows + 4;
  static constexpr int own_size = f32_rows * pitch, pass_size = pass_rows * pitch;
  static constexpr int score_size = f32_rows * score_pitch;
  static constexpr std::size_t forward_shared =
      sizeof(float) * (own_size + 2 * pass_size + score_size);
  static constexpr std::size_t backward_shared =
      sizeof(float) * (2 * own_size + 2 * pass_size + score_size);
  static_assert(backward_shared <= 99 * 1024);
};
template <int DP>
using Scores = float[4][F32Tile<DP>::columns];

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ float4 float4_at(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

// s[i][j] = row 4 ty + i of `own` times row tx + 16 j of `pass`.
template <int DP>
__device__ __forceinline__ void score(Scores<DP>& s, const float* own, const float* pass) {
  constexpr int pitch = F32Tile<DP>::pitch, columns = F32Tile<DP>::columns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < columns; ++j) s[i][j] = 0.0f;
#pragma unroll 4
  for (int d = 0; d < DP; d += 4) {
    float4 b[columns];
#pragma unroll
    for (int j = 0; j < columns; ++j) b[j] = float4_at(pass + (tx + 16 * j) * pitch + d);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 a = float4_at(own + (4 * ty + i) * pitch + d);
#pragma unroll
      for (int j = 0; j < columns; ++j) s[i][j] = dot4(a, b[j], s[i][j]);
    }
  }
}

// Scores to shared memory, where this half warp alone reads them again.
template <int DP>
__device__ __forceinline__ void put_scores(float* shared, const Scores<DP>& s) {
  constexpr int pitch = F32Tile<DP>::score_pitch, columns = F32Tile<DP>::columns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < columns; ++j) shared[(4 * ty + i) * pitch + tx + 16 * j] = s[i][j];
  __syncwarp();
}

// x[i][j] += row 4 ty + i of the scores times column tx + 16 j of `pass`.
template <int DP>
__device__ __forceinline__ void weigh(float (&x)[4][DP / 16], const float* scores,
                                      const float* pass) {
  constexpr int pitch = F32Tile<DP>::pitch, score_pitch = F32Tile<DP>::score_pitch;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 2
  for (int k = 0; k < F32Tile<DP>::pass_rows; k += 4) {
    float p[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = float4_at(scores + (4 * ty + i) * score_pitch + k);
      p[i][0] = v.x;
      p[i][1] = v.y;
      p[i][2] = v.z;
      p[i][3] = v.w;
    }
#pragma unroll
    for (int kk = 0; kk < 4; ++kk)
#pragma unroll
      for (int j = 0; j < DP / 16; ++j) {
        const float b = pass[(k + kk) * pitch + tx + 16 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i][j] = fmaf(p[i][kk], b, x[i][j]);
      }
  }
}

template <int DP>
__device__ __forceinline__ void load_f32(float* to, const float* from, std::int64_t row, int first,
                                         int n, int D, bool own) {
  constexpr int pitch = F32Tile<DP>::pitch;
  if (own)
    load_rows<f32_rows, DP / 4, pitch, f32_threads>(to, from, row, first, n, D);
  else
    load_rows<F32Tile<DP>::pass_rows, DP / 4, pitch, f32_threads>(to, from, row, first, n, D);
}

template <int DP>
__device__ __forceinline__ void zero(float (&x)[4][DP / 16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < DP / 16; ++j) x[i][j] = 0.0f;
}

// Rows 4 ty .. of this block, those below n only: to[(first + row) * stride + column] = x *
// factor[row].
template <int DP>
__device__ __forceinline__ void store_f32(const float (&x)[4][DP / 16], const float (&factor)[4],
                                          float* to, std::int64_t stride, int first, int n, int D) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + 4 * ty + i;
    if (row >= n) continue;
#pragma unroll
    for (int j = 0; j < DP / 16; ++j)
      if (tx + 16 * j < D) to[row * stride + tx + 16 * j] = x[i][j] * factor[i];
  }
}

template <int DP>
__global__ void __launch_bounds__(f32_threads, 1)
    flash_f32_forward_kernel(FlashForward<float> p, int tiles) {
  using Tile = F32Tile<DP>;
  constexpr int pass_rows = Tile::pass_rows, columns = Tile::columns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int h = static_cast<int>(blockIdx.x) / tiles % p.shape.heads;
  const int s = static_cast<int>(blockIdx.x) / tiles / p.shape.heads;
  const int D = p.shape.D, nq = p.shape.nq, nk = p.shape.keys(s), first = tile * f32_rows;
  const float* const k = p.k.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.k.row;
  const float* const v = p.v.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.v.row;
  float* const queries = shared_memory<float>();
  float* const keys = queries + Tile::own_size;
  float* const values = keys + Tile::pass_size;
  float* const scores = values + Tile::pass_size;

  load_f32<DP>(queries, p.q.at(s, h, p.shape.inner), p.q.row, first, nq, D, true);
  const float bias = Tile::biased && p.shape.last_bias ? p.shape.last_bias[s] : 0.0f;
  float out[4][DP / 16], top[4], sum[4];
  zero<DP>(out);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    top[i] = -INFINITY;
    sum[i] = 0.0f;
  }
  for (int key = 0; key < nk; key += pass_rows) {
    load_f32<DP>(keys, k, p.k.row, key, nk, D, false);
    load_f32<DP>(values, v, p.v.row, key, nk, D, false);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Scores<DP> x;
    score<DP>(x, queries, keys);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float largest = top[i];
      for (int j = 0; j < columns; ++j) {
        x[i][j] = key + tx + 16 * j < nk ? x[i][j] * p.shape.scale : -INFINITY;
        if (Tile::biased && key + tx + 16 * j == nk - 1) x[i][j] += bias;
        largest = fmaxf(largest, x[i][j]);
      }
      for (int offset = 8; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, offset));
      const float shrink = expf(top[i] - largest);
      top[i] = largest;
      sum[i] *= shrink;
      for (int j = 0; j < columns; ++j) {
        x[i][j] = expf(x[i][j] - largest);
        sum[i] += x[i][j];
      }
#pragma unroll
      for (int j = 0; j < DP / 16; ++j) out[i][j] *= shrink;
    }
    put_scores<DP>(scores, x);
    weigh<DP>(out, scores, values);
    __syncthreads();
  }
  cp_async_commit();
  cp_async_wait<0>();  // without keys the queries are still in flight

  float inverse[4];
  float* const lse = p.lse + (static_cast<std::int64_t>(s) * p.shape.heads + h) * nq;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int offset = 8; offset > 0; offset /= 2)
      sum[i] += __shfl_xor_sync(full_mask, sum[i], offset);
    inverse[i] = nk > 0 ? 1.0f / sum[i] : 0.0f;
    const int row = first + 4 * ty + i;
    if (tx == 0 && row < nq) lse[row] = nk > 0 ? top[i] + logf(sum[i]) : 0.0f;
  }
  store_f32<DP>(out, inverse, p.out.at(s, h, p.shape.inner), p.out.row, first, nq, D);
}

template <int DP>
__global__ void __launch_bounds__(f32_threads, 1)
    flash_f32_keys_kernel(FlashBackward<float> p, unsigned tiles) {
  using Tile = F32Tile<DP>;
  constexpr int pass_rows = Tile::pass_rows, columns = Tile::columns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const KeyTile tile = find_key_tile(p.shape, f32_rows, tiles, blockIdx.x);
  if (tile.s < 0) return;  // the whole block
  const int D = p.shape.D, s = tile.s, h = tile.h, nk = p.shape.keys(s);
  const int each = blocks_of(blocks_of(p.shape.nq, pass_rows), p.splits) * pass_rows;
  const int begin = tile.split * each, end = min(p.shape.nq, begin + each);
  float* const keys = shared_memory<float>();
  float* const values = keys + Tile::own_size;
  float* const queries = values + Tile::own_size;
  float* const gradients = queries + Tile::pass_size;
  float* const scores = gradients + Tile::pass_size;
  const float* const q = p.q.at(s, h, p.shape.inner);
  const float* const g = p.dout.at(s, h, p.shape.inner);
  const std::int64_t stat_row = (static_cast<std::int64_t>(s) * p.shape.heads + h) * p.shape.nq;
  const std::int64_t key_row = p.shape.first_key(s);

  load_f32<DP>(keys, p.k.at(s, h, p.shape.inner) + key_row * p.k.row, p.k.row, tile.first, nk, D,
               true);
  load_f32<DP>(values, p.v.at(s, h, p.shape.inner) + key_row * p.v.row, p.v.row, tile.first, nk, D,
               true);
  const float bias = Tile::biased && p.shape.last_bias ? p.shape.last_bias[s] : 0.0f;
  float dk[4][DP / 16], dv[4][DP / 16];
  zero<DP>(dk);
  zero<DP>(dv);
  for (int query = begin; query < end; query += pass_rows) {
    load_f32<DP>(queries, q, p.q.row, query, end, D, false);
    load_f32<DP>(gradients, g, p.dout.row, query, end, D, false);
    cp_async_commit();
    float lse[columns], delta[columns];
    for (int j = 0; j < columns; ++j) {
      const int i = query + tx + 16 * j;
      lse[j] = i < end ? p.lse[stat_row + i] : INFINITY;
      delta[j] = i < end ? p.delta[stat_row + i] : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    Scores<DP> x, y;
    score<DP>(x, keys, queries);
    score<DP>(y, values, gradients);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < columns; ++j) {
        x[i][j] = x[i][j] * p.shape.scale - lse[j];
        if (Tile::biased && tile.first + 4 * ty + i == nk - 1) x[i][j] += bias;
        x[i][j] = expf(x[i][j]);
        y[i][j] = x[i][j] * (y[i][j] - delta[j]);
      }
    put_scores<DP>(scores, x);
    weigh<DP>(dv, scores, gradients);
    put_scores<DP>(scores, y);
    weigh<DP>(dk, scores, queries);
    __syncthreads();
  }
  cp_async_commit();
  cp_async_wait<0>();  // a share without queries has keys in flight

  const float scale = p.shape.scale;
  const float by_scale[4] = {scale, scale, scale, scale}, by_one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (p.partial == nullptr) {
    store_f32<DP>(dk, by_scale, p.dk.at(s, h, p.shape.inner), p.dk.row, tile.first, nk, D);
    store_f32<DP>(dv, by_one, p.dv.at(s, h, p.shape.inner), p.dv.row, tile.first, nk, D);
    return;
  }
  const std::int64_t part = static_cast<std::int64_t>(p.shape.heads) * D;
  float* const to = partial_row(p, tile.split, key_row, h);
  store_f32<DP>(dk, by_scale, to, 2 * part, tile.first, nk, D);
  store_f32<DP>(dv, by_one, to + part, 2 * part, tile.first, nk, D);
}

template <int DP>
__global__ void __launch_bounds__(f32_threads, 1)
    flash_f32_queries_kernel(FlashBackward<float> p, int tiles) {
  using Tile = F32Tile<DP>;
  constexpr int pass_rows = Tile::pass_rows, columns = Tile::columns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int h = static_cast<int>(blockIdx.x) / tiles % p.shape.heads;
  const int s = static_cast<int>(blockIdx.x) / tiles / p.shape.heads;
  const int D = p.shape.D, nq = p.shape.nq, nk = p.shape.keys(s), first = tile * f32_rows;
  const float* const k = p.k.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.k.row;
  const float* const v = p.v.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.v.row;
  float* const queries = shared_memory<float>();
  float* const gradients = queries + Tile::own_size;
  float* const keys = gradients + Tile::own_size;
  float* const values = keys + Tile::pass_size;
  float* const dscores = values + Tile::pass_size;

  load_f32<DP>(queries, p.q.at(s, h, p.shape.inner), p.q.row, first, nq, D, true);
  load_f32<DP>(gradients, p.dout.at(s, h, p.shape.inner), p.dout.row, first, nq, D, true);
  const float bias = Tile::biased && p.shape.last_bias ? p.shape.last_bias[s] : 0.0f;
  float dq[4][DP / 16], lse[4], delta[4];
  zero<DP>(dq);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + 4 * ty + i;
    const std::int64_t at = (static_cast<std::int64_t>(s) * p.shape.heads + h) * nq + row;
    lse[i] = row < nq ? p.lse[at] : INFINITY;
    delta[i] = row < nq ? p.delta[at] : 0.0f;
  }
  for (int key = 0; key < nk; key += pass_rows) {
    load_f32<DP>(keys, k, p.k.row, key, nk, D, false);
    load_f32<DP>(values, v, p.v.row, key, nk, D, false);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Scores<DP> x, y;
    score<DP>(x, queries, keys);
    score<DP>(y, gradients, values);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < columns; ++j) {
        x[i][j] = x[i][j] * p.shape.scale - lse[i];
        if (Tile::biased && key + tx + 16 * j == nk - 1) x[i][j] += bias;
        const float prob = key + tx + 16 * j < nk ? expf(x[i][j]) : 0.0f;
        y[i][j] = prob * (y[i][j] - delta[i]);
      }
    put_scores<DP>(dscores, y);
    weigh<DP>(dq, dscores, keys);
    __syncthreads();
  }
  cp_async_commit();
  cp_async_wait<0>();
  const float scale = p.shape.scale;
  store_f32<DP>(dq, {scale, scale, scale, scale}, p.dq.at(s, h, p.shape.inner), p.dq.row, first, nq,
                D);
}

// Calls f.operator()<DP>() with the smallest instance that holds D.
template <class F>
void by_padded_size(int D, F&& f) {
  if (D <= 32)
    f.template operator()<32>();
  else if (D <= 80)
    f.template operator()<80>();
  else
    f.template operator()<128>();
}

}  // namespace

void flash_f32_forward(const FlashForward<float>& p) {
  by_padded_size(p.shape.tile_size(), [&]<int DP>() {
    const unsigned tiles = blocks_for(p.shape.nq, f32_rows);
    launch(flash_f32_forward_kernel<DP>,
           dim3(tiles * static_cast<unsigned>(p.shape.heads * p.shape.sequences)),
           dim3(f32_threads), F32Tile<DP>::forward_shared, p, static_cast<int>(tiles));
  });
}

void flash_f32_backward(const FlashBackward<float>& p) {
  by_padded_size(p.shape.tile_size(), [&]<int DP>() {
    const auto heads = static_cast<unsigned>(p.shape.heads);
    const unsigned key_blocks = key_tiles(p.shape, f32_rows);
    launch(flash_f32_keys_kernel<DP>, dim3(key_blocks * heads * static_cast<unsigned>(p.splits)),
           dim3(f32_threads), F32Tile<DP>::backward_shared, p, key_blocks);
    const unsigned query_blocks = blocks_for(p.shape.nq, f32_rows);
    launch(flash_f32_queries_kernel<DP>,
           dim3(query_blocks * heads * static_cast<unsigned>(p.shape.sequences)), dim3(f32_threads),
           F32Tile<DP>::backward_shared, p, static_cast<int>(query_blocks));
  });
}

}  // namespace weft::kernels
