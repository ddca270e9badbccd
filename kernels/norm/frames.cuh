// What the operations over frames of tokens (layer_norm.cu, modulation.cu) share. Activations are
// [frames, S, C], and a frame's row of the modulation m [G,K,C] is named by rows [frames]. A warp
// holds whole rows of C channels in registers, four neighbouring channels a lane and step (8 bytes
// of bf16, 16 of f32: at 1152 channels nine full steps), so that all of a row's loads are under way
// together, sums over channels are warp shuffles, and nothing waits at a block's barrier.
//
// Sums over tokens (dm): a block walks a run of tokens of one frame with its column sums in
// registers and writes them once, as partials [frame, run, part, C]; add_partials adds those of
// each modulation row in an order that only shapes and the number of SMs decide. No atomics, so a
// run repeats its bits.
#pragma once

#include <algorithm>

#include "vector.cuh"

namespace weft::kernels {

constexpr int forward_warps = 8;  // of a block
// Fewer where each warp holds column sums: such blocks fill an SM more evenly.
constexpr int backward_warps = 4;
constexpr int quad_steps = 9;  // most steps of 32 quads that a warp holds of a row: C <= 1152

// Four neighbouring channels.
template <class T>
using Quad = Vec<T, 4>;

// This lane's quads of a row; those beyond the row are zero.
template <class T, int N>
__device__ __forceinline__ void load_row(const T* row, int quads, Quad<T> (&q)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int i = n * 32 + lane;
    q[n] = i < quads ? load_vec<4>(row, i) : Quad<T>{};
  }
}

// The tokens of an operation, and how blocks share them: `runs` blocks a frame, `run` tokens each.
struct FrameGrid {
  int frames, tokens, channels;  // tokens of one frame
  int vectors;                   // K of m [G,K,C]
  int runs, run;

  __device__ int frame() const { return static_cast<int>(blockIdx.x) / runs; }
  __device__ int first() const { return static_cast<int>(blockIdx.x) % runs * run; }
  __device__ int last() const { return min(first() + run, tokens); }
  // Offset of a token's row.
  __device__ std::int64_t row(int frame, int token) const {
    return (static_cast<std::int64_t>(frame) * tokens + token) * channels;
  }
  __device__ const float* vector(const float* m, int group, int k) const {
    return m + (static_cast<std::int64_t>(group) * vectors + k) * channels;
  }
  unsigned blocks() const { return static_cast<unsigned>(frames) * static_cast<unsigned>(runs); }
};

// Writes the sums over the block's warps of each lane's columns to out [C]. `shared` holds a row a
// warp.
template <int N>
__device__ __forceinline__ void store_column_sums(const float (&sum)[N][4], int channels,
                                                  float* shared, float* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n * 32 + lane < channels / 4)
      store_vec<4>(shared + warp * channels, n * 32 + lane, pack<float, 4>(sum[n]));
  __syncthreads();
  for (int i = threadIdx.x; i < channels; i += backward_warps * 32) {
    float s = 0.0f;
#pragma unroll
    for (int w = 0; w < backward_warps; ++w) s += shared[w * channels + i];
    out[i] = s;
  }
}

// dm[row, vectors] += the partials [frame, run, parts, C] of the frames that use the row; rows
// below first_row have none. `vector1` counts where there are two parts.
void add_partials(const Tensor& partial, const Tensor& rows, const FrameGrid& g, int parts,
                  int vector0, int vector1, int first_row, Tensor& dm);

// x is [.., S, C] with `rows` one entry a frame.
inline FrameGrid grid_of(const Tensor& x, const Tensor& m, const Tensor& rows) {
  const std::int64_t c = x.dim(-1), frames = rows.numel();
  FrameGrid g{};
  g.frames = static_cast<int>(frames);
  g.channels = static_cast<int>(c);
  g.tokens = frames == 0 ? 0 : static_cast<int>(x.numel() / (frames * c));
  g.vectors = static_cast<int>(m.dim(1));
  return g;
}

inline FrameGrid with_run(FrameGrid g, int run) {
  g.run = run;
  g.runs = (g.tokens + run - 1) / run;
  return g;
}

// Runs such that the blocks fill the GPU's `slots` in as few and as even waves as possible. What a
// block does besides its tokens (write and later read partials, start) costs about as much as 8
// tokens.
inline FrameGrid with_even_runs(const FrameGrid& g, int slots) {
  int best = 1;
  std::int64_t least = 0;
  for (int runs = 1; runs <= std::max(1, g.tokens / 16); ++runs) {
    const std::int64_t waves = (static_cast<std::int64_t>(g.frames) * runs + slots - 1) / slots;
    const std::int64_t cost = waves * ((g.tokens + runs - 1) / runs + 8);
    if (runs == 1 || cost < least) {
      least = cost;
      best = runs;
    }
  }
  return with_run(g, std::max(1, (g.tokens + best - 1) / best));
}

inline int slots(int blocks_per_sm) {
  return std::max(1, cuda_properties().multiProcessorCount) * blocks_per_sm;
}

// Whether rows of all tensors can be walked in quads.
template <class... Tensors>
bool in_quads(int channels, const Tensors&... t) {
  return channels % 4 == 0 && channels <= quad_steps * 128 && aligned<4>(t...);
}

// Calls f.operator()<N>() with N steps of 32 quads, enough for a row.
template <class F>
void by_steps(int channels, F&& f) {
  if (channels <= 128)
    f.template operator()<1>();
  else if (channels <= 3 * 128)
    f.template operator()<3>();
  else if (channels <= 5 * 128)
    f.template operator()<5>();
  else
    f.template operator()<quad_steps>();
}

}  // namespace weft::kernels
