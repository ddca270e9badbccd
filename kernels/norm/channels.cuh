// What the norms over channels-last activations share (group_norm.cu, batch_norm.cu). A thread
// keeps 16 bytes of channels and walks down the positions, so that everything per channel stays in
// its registers and a warp's accesses are whole lines. Chunks of positions depend on the shape
// alone.
#pragma once

#include <algorithm>

#include "vector.cuh"

namespace weft::kernels {

constexpr std::int64_t most_chunks = 512, least_rows = 64;
constexpr int sum_warps = 8;  // that add up chunks

struct Grid {
  std::int64_t N, P, C, groups;
  std::int64_t chunks, rows;  // of a sample; positions a chunk
  int packs, width;           // of V channels: in all, a block

  __host__ __device__ std::int64_t group_size() const { return C / groups; }
  // Where the two numbers of a channel's group lie, of [N,groups,2]. Divisions of 64 bits are calls
  // of functions, which take registers from all that lives across them: here and below they
  // have 32.
  __device__ __forceinline__ std::int64_t of_group(std::int64_t sample, unsigned channel) const {
    const unsigned size = static_cast<unsigned>(C) / static_cast<unsigned>(groups);
    return 2 * (sample * groups + channel / size);
  }
};

template <int V>
Grid grid_of(const Tensor& x, int groups) {
  Grid g{};
  g.N = x.dim(0);
  g.C = x.dim(-1);
  g.P = x.numel() / (g.N * g.C);
  g.groups = groups;
  g.rows = std::max(least_rows, (g.P + most_chunks - 1) / most_chunks);
  g.chunks = (g.P + g.rows - 1) / g.rows;
  g.packs = static_cast<int>(g.C / V);
  g.width = std::min(g.packs, threads);
  return g;
}

// A thread's channels and the positions that it takes: row, row + step, ... below last.
struct Place {
  std::int64_t sample, row, step, last;
  int pack, line;  // line: of the threads that share these channels
  bool active;
};
__device__ __forceinline__ Place place(const Grid& g) {
  Place p;
  p.step = threads / g.width;
  p.line = static_cast<int>(threadIdx.x) / g.width;
  p.pack = static_cast<int>(blockIdx.y) * g.width + static_cast<int>(threadIdx.x) % g.width;
  const auto chunks = static_cast<unsigned>(g.chunks);
  p.sample = blockIdx.x / chunks;
  const std::int64_t first = blockIdx.x % chunks * g.rows;
  p.row = first + p.line;
  p.last = first + g.rows < g.P ? first + g.rows : g.P;
  p.active = p.line < p.step && p.pack < g.packs;
  return p;
}

// partial [N,chunks,K,C] = sums over the block's lines of the K values.
template <int K, int V>
__device__ __forceinline__ void store_sums(const Grid& g, const float (&values)[K][V],
                                           float* partial) {
  float* const shared = shared_memory<float>();  // [lines][K][width V]
  const int width = opaque(g.width), channels = width * V, lines = threads / width;
  const int own_line = static_cast<int>(threadIdx.x) / width;
  if (own_line < lines) {
    float* const to = shared + K * own_line * channels + static_cast<int>(threadIdx.x) % width * V;
#pragma unroll
    for (int j = 0; j < K; ++j)
#pragma unroll
      for (int k = 0; k < V; ++k) to[j * channels + k] = values[j][k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < K * channels; i += threads) {
    float sum = 0.0f;
    for (int line = 0; line < lines; ++line) sum += shared[K * line * channels + i];
    const std::int64_t c = static_cast<std::int64_t>(blockIdx.y) * channels + i % channels;
    if (c < g.C)
      partial[(static_cast<std::int64_t>(blockIdx.x) * K + i / channels) * g.C + c] = sum;
  }
}

// The first stage's launch: blocks of chunks by tiles of channels.
inline dim3 blocks_of(const Grid& g) {
  return {static_cast<unsigned>(g.N * g.chunks), blocks_for(g.packs, g.width)};
}
template <int V>
std::size_t shared_of(const Grid& g, int values = 2) {
  return sizeof(float) * static_cast<std::size_t>(values) * V *
         static_cast<std::size_t>(threads / g.width * g.width);
}

// partial [N * chunks, 2, C] = sums of x - x at the sample's first position, and of their squares:
// what is left is of the size of the deviation, whatever the mean, and nothing cancels.
template <class T, int V>
__global__ void __launch_bounds__(threads) moments_kernel(const T* x, Grid g, float* partial) {
  const Place p = place(g);
  float sums[2][V] = {};
  if (p.active) {
    float base[V];
    unpack(load_vec<V>(x, p.sample * g.P * g.packs + p.pack), base);
#pragma unroll 4
    for (std::int64_t r = p.row; r < p.last; r += p.step) {
      float v[V];
      unpack(load_vec<V>(x, (p.sample * g.P + r) * g.packs + p.pack), v);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float d = v[k] - base[k];
        sums[0][k] += d;
        sums[1][k] += d * d;
      }
    }
  }
  store_sums(g, sums, partial);
}

// totals [2] = this block's column of the chunks' sums [chunks,2,C], in f64 and in order: 32
// columns a block, a warp takes every eighth chunk. Valid in the first warp.
__device__ __forceinline__ void add_chunks(const float* partial, std::int64_t chunks,
                                           std::int64_t C, std::int64_t column,
                                           double (&totals)[2]) {
  double* const shared = shared_memory<double>();  // [2][warps][32]
  const int warp = threadIdx.x / 32;
  totals[0] = totals[1] = 0.0;
  if (column < C)
#pragma unroll 4
    for (std::int64_t k = warp; k < chunks; k += sum_warps) {
      totals[0] += partial[2 * k * C + column];
      totals[1] += partial[(2 * k + 1) * C + column];
    }
  shared[threadIdx.x] = totals[0];
  shared[32 * sum_warps + threadIdx.x] = totals[1];
  __syncthreads();
  if (warp > 0) return;
  for (int w = 1; w < sum_warps; ++w) {
    totals[0] += shared[w * 32 + threadIdx.x];
    totals[1] += shared[(sum_warps + w) * 32 + threadIdx.x];
  }
}

}  // namespace weft::kernels
