// Attention of packed captions with T5's relative position bias (ops/attention.h). CPU twin
// src/ops/cpu/attention/relative.cpp, cases tests/kernels/attention.cpp.
//
// Least work of one head of a caption of L rows: 4 L^2 D operations over 8 L D bytes in bf16.
// Captions are short (300 rows at most), so that a layer of T5-XXL spends 1.3 % of its operations
// here. bf16 with heads of 32, 64 or 128 goes through the tensor cores: a block holds 64 queries
// and passes over the keys 64 at a time, scores and probabilities in registers. Everything else
// (f32, other heads) goes through a plain kernel: 16 queries a block, 4 products for 5 values from
// shared memory. The bias of a head is a table in shared memory: beyond 91 rows apart all distances
// share a bucket.
#include "attention/flash_sm80.cuh"
#include "ops/attention.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int far = 91,
              distances = 2 * far + 1;  // from here on one bucket a direction (docs/models/t5.md)

struct Captions {
  const float* bias;  // [32,heads]
  const std::int32_t* offsets;
  std::int64_t rows;  // of all captions
  int heads, D, tiles;
};

__device__ __forceinline__ int bucket_of(int distance) {
  const int n = distance < 0 ? -distance : distance;
  int bucket = n < 8 ? n
                     : 8 + (n >= 12) + (n >= 16) + (n >= 23) + (n >= 32) + (n >= 46) + (n >= 64) +
                           (n >= far);
  return bucket + (distance > 0 ? 16 : 0);
}

// table[far + d] = the head's bias for key - query = d, times `factor`.
__device__ __forceinline__ void load_bias(const Captions& c, int head, float factor, float* table) {
  for (int i = threadIdx.x; i < distances; i += blockDim.x)
    table[i] = c.bias[bucket_of(i - far) * c.heads + head] * factor;
}
__device__ __forceinline__ float bias_at(const float* table, int distance) {
  return table[far + (distance < -far ? -far : distance > far ? far : distance)];
}

constexpr int plain_queries = 16, plain_keys = 64, plain_threads = 256, most_D = 128;

// Thread (i, j) of 16 x 16: keys j, j + 16 ... of query i, then channels j, j + 16 ... of its
// result.
template <class T>
__global__ void __launch_bounds__(plain_threads)
    relative_plain_kernel(const T* qkv, Captions c, T* out) {
  const int tile = static_cast<int>(blockIdx.x) % c.tiles,
            caption = static_cast<int>(blockIdx.x) / c.tiles;
  const int head = static_cast<int>(blockIdx.y), D = c.D, pitch = D + 1;
  const std::int64_t first = c.offsets[caption], row = static_cast<std::int64_t>(c.heads) * D;
  const int L = static_cast<int>(c.offsets[caption + 1] - first), q0 = tile * plain_queries;
  float* const table = shared_memory<float>();
  float* const q = table + distances;
  float* const k = q + plain_queries * pitch;
  float* const v = k + plain_keys * pitch;
  float* const p = v + plain_keys * pitch;  // [queries][keys + 1]
  if (q0 >= L) return;                      // the whole block
  const auto load = [&](int part, int from, int rows, float* to) {
    const T* const base = qkv + (part * c.rows + first + from) * row + head * D;
    for (int e = threadIdx.x; e < rows * D; e += plain_threads)
      to[e / D * pitch + e % D] = from + e / D < L ? to_float(base[e / D * row + e % D]) : 0.0f;
  };
  load_bias(c, head, 1.0f, table);
  load(0, q0, plain_queries, q);
  const int i = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
  float top = -INFINITY, sum = 0.0f, result[most_D / 16] = {};
  for (int k0 = 0; k0 < L; k0 += plain_keys) {
    __syncthreads();
    load(1, k0, plain_keys, k);
    load(2, k0, plain_keys, v);
    __syncthreads();
    float s[plain_keys / 16] = {};
    for (int d = 0; d < D; ++d) {
      const float x = q[i * pitch + d];
#pragma unroll
      for (int m = 0; m < plain_keys / 16; ++m) s[m] += x * k[(j + 16 * m) * pitch + d];
    }
    float largest = top;
#pragma unroll
    for (int m = 0; m < plain_keys / 16; ++m) {
      const int key = k0 + j + 16 * m;
      s[m] = key < L ? s[m] + bias_at(table, key - q0 - i) : -INFINITY;
      largest = fmaxf(largest, s[m]);
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, offset));
    const float shrink = expf(top - largest);
    top = largest;
    sum *= shrink;
#pragma unroll
    for (int m = 0; m < plain_keys / 16; ++m) {
      const float e = expf(s[m] - top);
      sum += e;
      p[i * (plain_keys + 1) + j + 16 * m] = e;
    }
    __syncwarp();  // a query's sixteen threads share a warp
#pragma unroll
    for (int n = 0; n < most_D / 16; ++n) {
      const int d = j + 16 * n;
      if (d >= D) continue;
      float r = result[n] * shrink;
      for (int key = 0; key < plain_keys; ++key)
        r += p[i * (plain_keys + 1) + key] * v[key * pitch + d];
      result[n] = r;
    }
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(full_mask, sum, offset);
  if (q0 + i < L)
#pragma unroll
    for (int n = 0; n < most_D / 16; ++n)
      if (const int d = j + 16 * n; d < D)
        out[(first + q0 + i) * row + head * D + d] = from_float<T>(result[n] / sum);
}

constexpr int mma_queries = 64, mma_keys = 64, mma_threads = 128;

// Four warps of 16 queries; see flash_sm80.cu for the fragments.
template <int D>
__global__ void __launch_bounds__(mma_threads)
    relative_mma_kernel(const bf16_t* qkv, Captions c, bf16_t* out) {
  constexpr int pitch = tile_pitch(D), NT = mma_keys / 8;
  const int tile = static_cast<int>(blockIdx.x) % c.tiles,
            caption = static_cast<int>(blockIdx.x) / c.tiles;
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = c.offsets[caption], L = c.offsets[caption + 1] - first, q0 = tile * mma_queries;
  // In elements, of which there are less than 2^31.
  const int row = c.heads * D, own = first * row + head * D;
  if (q0 >= L) return;  // the whole block
  bf16_t* const q = shared_memory<bf16_t>();
  bf16_t* const k = q + mma_queries * pitch;
  bf16_t* const v = k + mma_keys * pitch;
  float* const table = reinterpret_cast<float*>(v + mma_keys * pitch);
  const int part = static_cast<int>(c.rows) * row;  // from q to k, and to v
  load_bias(c, head, log2_e, table);
  load_rows<mma_queries, D / 8, pitch, mma_threads>(q, qkv + own, row, q0, L, D);
  float result[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int k0 = 0; k0 < L; k0 += mma_keys) {
    __syncthreads();
    load_rows<mma_keys, D / 8, pitch, mma_threads>(k, qkv + (own + part), row, k0, L, D);
    load_rows<mma_keys, D / 8, pitch, mma_threads>(v, qkv + (own + 2 * part), row, k0, L, D);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float scores[NT][4];
    row_products<D, NT, pitch>(scores, q, warp * 16, k);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = q0 + warp * 16 + lane / 4 + 8 * r;
      float largest = top[r];
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const int key = k0 + t * 8 + lane % 4 * 2 + e % 2;
          scores[t][e] = key < L ? scores[t][e] * log2_e + bias_at(table, key - query) : -INFINITY;
          largest = fmaxf(largest, scores[t][e]);
        }
      largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 2));
      const float shrink = exp2_approx(top[r] - largest);
      top[r] = largest;
      sum[r] *= shrink;
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          scores[t][e] = exp2_approx(scores[t][e] - largest);
          sum[r] += scores[t][e];
        }
#pragma unroll
      for (int t = 0; t < D / 8; ++t) {
        result[t][2 * r] *= shrink;
        result[t][2 * r + 1] *= shrink;
      }
    }
    weighted_rows<D, NT, pitch>(result, scores, v);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(full_mask, sum[r], 1);
    sum[r] += __shfl_xor_sync(full_mask, sum[r], 2);
  }
  store_rows<D>(result, 1.0f / sum[0], 1.0f / sum[1], out + own, row, q0 + warp * 16, L, D);
}

template <int D>
void start_mma(const Tensor& qkv, const Captions& c, dim3 blocks, const Tensor& out) {
  constexpr std::size_t tiles =
      sizeof(bf16_t) * (mma_queries + 2 * mma_keys) * static_cast<std::size_t>(tile_pitch(D));
  launch(relative_mma_kernel<D>, blocks, dim3(mma_threads), tiles + distances * sizeof(float),
         data<bf16_t>(qkv), c, data<bf16_t>(out));
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void relative_attention_forward(const Tensor& qkv, const Tensor& bias, const Tensor& offsets,
                                std::int64_t longest, Tensor& out) {
  Captions c{data<float>(bias),
             data<std::int32_t>(offsets),
             qkv.dim(1),
             static_cast<int>(qkv.dim(2)),
             static_cast<int>(qkv.dim(3)),
             0};
  const auto captions = static_cast<unsigned>(offsets.numel() - 1);
  if (c.rows == 0 || longest == 0) return;
  WEFT_ASSERT(c.D <= most_D && qkv.numel() < std::int64_t{1} << 31);
  const auto blocks = [&](int queries) {
    c.tiles = static_cast<int>((longest + queries - 1) / queries);
    return dim3(captions * static_cast<unsigned>(c.tiles), static_cast<unsigned>(c.heads));
  };
  if (qkv.dtype() == DType::bf16 && aligned<8>(qkv, out) &&
      (c.D == 32 || c.D == 64 || c.D == 128)) {
    const dim3 grid = blocks(mma_queries);
    if (c.D == 32) return start_mma<32>(qkv, c, grid, out);
    if (c.D == 64) return start_mma<64>(qkv, c, grid, out);
    return start_mma<128>(qkv, c, grid, out);
  }
  const dim3 grid = blocks(plain_queries);
  const int rows = plain_queries + 2 * plain_keys;
  const std::size_t shared =
      sizeof(float) *
      static_cast<std::size_t>(distances + rows * (c.D + 1) + plain_queries * (plain_keys + 1));
  by_type(qkv, [&]<class T>() {
    launch(relative_plain_kernel<T>, grid, dim3(plain_threads), shared, data<T>(qkv), c,
           data<T>(out));
  });
}

}  // namespace weft::ops::cuda
