// CUDA side of ops/norm.h. CPU twin: src/ops/cpu/norm.cpp; cases: src/commands/kernel_cases_norm.cpp. Not yet run on a GPU.
//
// All are bound by memory. Least traffic for one token of C = 1152 channels in bf16 (one row: 2304 bytes), f32 twice that:
//   layer_norm_modulate_forward    x in, y out              4608 bytes, about 8 C operations
//   layer_norm_modulate_backward   x, dy in, dx out         6912 bytes, or 9216 with `accumulate`; about 14 C operations
//   gate_residual_forward          x, p in, y out           6912 bytes
//   gate_residual_backward         dy, p in, dp out         6912 bytes
// At 4.8 TB/s an SM of an H200 has some 220 clocks for a token of 4608 bytes, about 24 instructions an element: enough,
// as long as every byte moves once and some 30 KB a SM are on the way at any time. Hence: a warp holds whole rows in
// registers, four neighbouring channels a lane and step (8 bytes of bf16, 16 of f32: at 1152 channels nine full steps), so
// all of a row's loads are under way together, the sums are warp shuffles, and nothing waits at a block's barrier. The
// modulation rows (f32, shared by a whole frame) come from the first-level cache.
//
// Sums over tokens (dm): a block walks a run of tokens of one frame with its column sums in registers and writes them
// once, as partials [frame, run, vector, C]; a second kernel adds the partials of each modulation row in an order that
// only shapes and the number of SMs decide. No atomics, so a run repeats its bits.
//
// Scratch (Tensor::empty): the partials, 4 C bytes a run and vector. There are about as many runs as blocks fit on the GPU,
// at least one a frame: 3.6 MB for layer_norm_modulate_backward at 30 frames of C = 1152 on 132 SMs.
#include "ops/norm.h"

#include <algorithm>

#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr float epsilon = 1e-6f;
constexpr int forward_warps = 8;  // of a block
constexpr int backward_warps =
    4;  // fewer, because each holds column sums: blocks then fill an SM evenly
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
struct Grid {
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

// ---------------------------------------------------------------- layer_norm_modulate_forward

// Two tokens a warp at a time: the loads of both are on the way together, and the modulation is read once for the two.
template <class T, int N>
__global__ void __launch_bounds__(forward_warps * 32, 2)
    modulate_forward_kernel(const T* __restrict__ x, const float* __restrict__ m,
                            const std::int32_t* __restrict__ rows, Grid g, int shift, int scale,
                            int first_row, T* __restrict__ y, float2* __restrict__ stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), first = g.first() + 2 * warp;
  if (first >= g.tokens) return;
  const int count = min(2, g.tokens - first);
  const int group = rows[frame];
  Quad<T> in[2][N];
  std::int64_t row[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    row[t] = g.row(
        frame, first + min(t, count - 1));  // a missing second token is the first again, not stored
    load_row(x + row[t], quads, in[t]);
  }
  if (group < first_row) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (n * 32 + lane < quads && t < count) store_vec<4>(y + row[t], n * 32 + lane, in[t][n]);
    return;
  }
  float mean[2], rstd[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[t][n], v);
      sum += (v[0] + v[1]) + (v[2] + v[3]);
    }
    mean[t] = warp_sum(sum) / static_cast<float>(g.channels);
    // Around the mean, as the CPU does: the difference of two large sums would lose what a large mean hides.
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (n * 32 + lane < quads) {
        float v[4];
        unpack(in[t][n], v);
#pragma unroll
        for (int e = 0; e < 4; ++e) squares += (v[e] - mean[t]) * (v[e] - mean[t]);
      }
    rstd[t] = rsqrtf(warp_sum(squares) / static_cast<float>(g.channels) + epsilon);
    if (lane == 0 && t < count)
      stats[static_cast<std::int64_t>(frame) * g.tokens + first + t] =
          make_float2(mean[t], rstd[t]);
  }
  const float *sh = g.vector(m, group, shift), *sc = g.vector(m, group, scale);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int i = n * 32 + lane;
    if (i >= quads) continue;
    const Quad<float> a = load_vec<4>(sc, i), b = load_vec<4>(sh, i);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float v[4];
      unpack(in[t][n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = (v[e] - mean[t]) * rstd[t] * (1.0f + a.v[e]) + b.v[e];
      if (t < count) store_vec<4>(y + row[t], i, pack<T, 4>(v));
    }
  }
}

// Any C: a warp a token, one channel a lane, the row read three times (from the cache but for the first).
template <class T>
__global__ void __launch_bounds__(forward_warps * 32)
    modulate_forward_any_kernel(const T* __restrict__ x, const float* __restrict__ m,
                                const std::int32_t* __restrict__ rows, Grid g, int shift, int scale,
                                int first_row, T* __restrict__ y, float2* __restrict__ stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int frame = g.frame(), group = rows[frame];
  const float *sh = g.vector(m, group, shift), *sc = g.vector(m, group, scale);
  for (int token = g.first() + warp; token < g.last(); token += forward_warps) {
    const T* in = x + g.row(frame, token);
    T* out = y + g.row(frame, token);
    if (group < first_row) {
      for (int i = lane; i < g.channels; i += 32) out[i] = in[i];
      continue;
    }
    float sum = 0.0f, squares = 0.0f;
    for (int i = lane; i < g.channels; i += 32) sum += to_float(in[i]);
    const float mean = warp_sum(sum) / static_cast<float>(g.channels);
    for (int i = lane; i < g.channels; i += 32) {
      const float d = to_float(in[i]) - mean;
      squares += d * d;
    }
    const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(g.channels) + epsilon);
    if (lane == 0)
      stats[static_cast<std::int64_t>(frame) * g.tokens + token] = make_float2(mean, rstd);
    for (int i = lane; i < g.channels; i += 32)
      out[i] = from_float<T>((to_float(in[i]) - mean) * rstd * (1.0f + sc[i]) + sh[i]);
  }
}

// ---------------------------------------------------------------- sums over tokens

// Writes the sums over the block's warps of each lane's columns to out [C]. `shared` holds a row a warp.
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

constexpr int adding_warps = 16;

// dm[row, vector] += the partials [frame, run, parts, C] of the frames that use the row. A block: 32 columns of one part
// and row; its warps take every 16th partial, and their sums are added in the order of warps. The frames are
// listed first, so that the loop over partials has no branch and keeps several loads under way.
__global__ void __launch_bounds__(adding_warps * 32)
    add_partials_kernel(const float* __restrict__ partial, const std::int32_t* __restrict__ rows,
                        Grid g, int parts, int vector0, int vector1, int first_row,
                        float* __restrict__ dm) {
  float* sums = shared_memory<float>();                            // [adding_warps, 32]
  int* listed = reinterpret_cast<int*>(sums + adding_warps * 32);  // how many
  int* list = listed + 1;                                          // [frames]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane, part = blockIdx.y;
  const int group = blockIdx.z;
  if (group < first_row) return;  // passed frames wrote no partials
  if (warp == 0) {
    int count = 0;
    for (int base = 0; base < g.frames; base += 32) {
      const int frame = base + lane;
      const bool uses = frame < g.frames && rows[frame] == group;
      const unsigned users = __ballot_sync(full_mask, uses);
      if (uses) list[count + __popc(users & ((1u << lane) - 1))] = frame;
      count += __popc(users);
    }
    if (lane == 0) *listed = count;
  }
  __syncthreads();
  float sum = 0.0f;
  if (column < g.channels) {
    const int partials = *listed * g.runs;
#pragma unroll 4
    for (int q = warp; q < partials; q += adding_warps) {
      const std::int64_t at = static_cast<std::int64_t>(list[q / g.runs]) * g.runs + q % g.runs;
      sum += partial[(at * parts + part) * g.channels + column];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= g.channels) return;
  for (int w = 1; w < adding_warps; ++w) sum += sums[w * 32 + lane];
  dm[(static_cast<std::int64_t>(group) * g.vectors + (part == 0 ? vector0 : vector1)) * g.channels +
     column] += sum;
}

void add_partials(const Tensor& partial, const Tensor& rows, const Grid& g, int parts, int vector0,
                  int vector1, int first_row, Tensor& dm) {
  const dim3 grid(blocks_for(g.channels, 32), static_cast<unsigned>(parts),
                  static_cast<unsigned>(dm.dim(0)));
  launch(add_partials_kernel, grid, dim3(adding_warps * 32),
         (adding_warps * 32 + 1 + static_cast<std::size_t>(g.frames)) * sizeof(float),
         data<float>(partial), data<std::int32_t>(rows), g, parts, vector0, vector1, first_row,
         data<float>(dm));
}

// ---------------------------------------------------------------- layer_norm_modulate_backward

// With h = LN(x), s = 1 + scale, g = dy: dx = rstd (g s - mean(g s) - h mean(g s h)), sums of g and g h over the run.
// A warp a token; the gradient that is added to, if any, is loaded together with the rest.
template <class T, int N, bool accumulate>
__global__ void __launch_bounds__(backward_warps * 32, sizeof(T) == 2 ? 3 : 2)
    modulate_backward_kernel(const T* __restrict__ x, const float* __restrict__ m,
                             const std::int32_t* __restrict__ rows, Grid g, int scale,
                             int first_row, const float2* __restrict__ stats,
                             const T* __restrict__ dy, T* dx, float* __restrict__ partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), last = g.last(), group = rows[frame];
  if (group < first_row) {
    for (int token = g.first() + warp; token < last; token += backward_warps) {
      const std::int64_t row = g.row(frame, token);
      Quad<T> in[N], old[N];
      load_row(dy + row, quads, in);
      if constexpr (accumulate) load_row(dx + row, quads, old);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (accumulate) {
          float v[4], w[4];
          unpack(in[n], v);
          unpack(old[n], w);
#pragma unroll
          for (int e = 0; e < 4; ++e) v[e] += w[e];
          in[n] = pack<T, 4>(v);
        }
        if (n * 32 + lane < quads) store_vec<4>(dx + row, n * 32 + lane, in[n]);
      }
    }
    return;
  }
  const float* sc = g.vector(m, group, scale);
  float dshift[N][4] = {}, dscale[N][4] = {};
  for (int token = g.first() + warp; token < last; token += backward_warps) {
    const std::int64_t row = g.row(frame, token);
    Quad<T> in[N], gradient[N], old[N];
    load_row(x + row, quads, in);
    load_row(dy + row, quads, gradient);
    if constexpr (accumulate) load_row(static_cast<const T*>(dx + row), quads, old);
    const float2 st = stats[static_cast<std::int64_t>(frame) * g.tokens + token];
    float sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> s = load_vec<4>(sc, n * 32 + lane);
      float v[4], d[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y, gh = d[e] * h, s1 = 1.0f + s.v[e];
        sum += d[e] * s1;
        product += gh * s1;
        dshift[n][e] += d[e];
        dscale[n][e] += gh;
      }
    }
    const float mean_g = warp_sum(sum) / static_cast<float>(g.channels);
    const float mean_gh = warp_sum(product) / static_cast<float>(g.channels);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> s = load_vec<4>(sc, n * 32 + lane);
      float v[4], d[4], w[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
      if constexpr (accumulate) unpack(old[n], w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y;
        v[e] = st.y * (d[e] * (1.0f + s.v[e]) - mean_g - h * mean_gh);
        if constexpr (accumulate) v[e] += w[e];
      }
      store_vec<4>(dx + row, n * 32 + lane, pack<T, 4>(v));
    }
  }
  float* out = partial + static_cast<std::int64_t>(blockIdx.x) * 2 * g.channels;
  store_column_sums(dshift, g.channels, shared_memory<float>(), out);
  store_column_sums(dscale, g.channels, shared_memory<float>(), out + g.channels);
}

// Any C: a block a token, its column sums in shared memory, where a thread meets its own columns only.
template <class T>
__global__ void __launch_bounds__(backward_warps * 32)
    modulate_backward_any_kernel(const T* __restrict__ x, const float* __restrict__ m,
                                 const std::int32_t* __restrict__ rows, Grid g, int scale,
                                 int first_row, const float2* __restrict__ stats,
                                 const T* __restrict__ dy, T* dx, bool accumulate,
                                 float* __restrict__ partial) {
  constexpr int threads = backward_warps * 32;
  float *scratch = shared_memory<float>(), *dshift = scratch + 32, *dscale = dshift + g.channels;
  const int frame = g.frame(), group = rows[frame];
  const float* sc = g.vector(m, group, scale);
  for (int i = threadIdx.x; i < g.channels; i += threads) dshift[i] = dscale[i] = 0.0f;
  for (int token = g.first(); token < g.last(); ++token) {
    const T *in = x + g.row(frame, token), *gradient = dy + g.row(frame, token);
    T* out = dx + g.row(frame, token);
    if (group < first_row) {
      for (int i = threadIdx.x; i < g.channels; i += threads)
        out[i] = from_float<T>(to_float(gradient[i]) + (accumulate ? to_float(out[i]) : 0.0f));
      continue;
    }
    const float2 st = stats[static_cast<std::int64_t>(frame) * g.tokens + token];
    float sum = 0.0f, product = 0.0f;
    for (int i = threadIdx.x; i < g.channels; i += threads) {
      const float d = to_float(gradient[i]), h = (to_float(in[i]) - st.x) * st.y;
      sum += d * (1.0f + sc[i]);
      product += d * h * (1.0f + sc[i]);
      dshift[i] += d;
      dscale[i] += d * h;
    }
    const float mean_g = block_sum(sum, scratch) / static_cast<float>(g.channels);
    const float mean_gh = block_sum(product, scratch) / static_cast<float>(g.channels);
    for (int i = threadIdx.x; i < g.channels; i += threads) {
      const float d = to_float(gradient[i]), h = (to_float(in[i]) - st.x) * st.y;
      float v = st.y * (d * (1.0f + sc[i]) - mean_g - h * mean_gh);
      if (accumulate) v += to_float(out[i]);
      out[i] = from_float<T>(v);
    }
  }
  float* to = partial + static_cast<std::int64_t>(blockIdx.x) * 2 * g.channels;
  for (int i = threadIdx.x; i < g.channels; i += threads) {
    to[i] = dshift[i];
    to[g.channels + i] = dscale[i];
  }
}

// ---------------------------------------------------------------- gate_residual

// Drop path's factor of a frame: keep [B], or 1 where it is not given.
struct Keep {
  const float* factors;
  int frames_per_sample;
  __device__ float operator()(int frame) const {
    return factors == nullptr ? 1.0f : factors[frame / frames_per_sample];
  }
};

// A warp a token, like the norm: nothing is summed, but rows in whole steps need no division to find a channel.
template <class T, int N>
__global__ void __launch_bounds__(forward_warps * 32, 2)
    gate_forward_kernel(const T* x, const T* p, const float* __restrict__ m,
                        const std::int32_t* __restrict__ rows, Grid g, int gate, Keep keep, T* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), token = g.first() + warp;
  if (token >= g.tokens) return;
  const std::int64_t row = g.row(frame, token);
  Quad<T> in[N], branch[N];
  load_row(x + row, quads, in);
  load_row(p + row, quads, branch);
  const float* gates = g.vector(m, rows[frame], gate);
  const float factor = keep(frame);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n * 32 + lane >= quads) continue;
    const Quad<float> s = load_vec<4>(gates, n * 32 + lane);
    float v[4], b[4];
    unpack(in[n], v);
    unpack(branch[n], b);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] += factor * s.v[e] * b[e];
    store_vec<4>(y + row, n * 32 + lane, pack<T, 4>(v));
  }
}

template <class T>
__global__ void __launch_bounds__(forward_warps * 32)
    gate_forward_any_kernel(const T* x, const T* p, const float* __restrict__ m,
                            const std::int32_t* __restrict__ rows, Grid g, int gate, Keep keep,
                            T* y) {
  const int frame = g.frame();
  const float* gates = g.vector(m, rows[frame], gate);
  const float factor = keep(frame);
  for (int token = g.first(); token < g.last(); ++token)
    for (int i = threadIdx.x; i < g.channels; i += forward_warps * 32) {
      const std::int64_t at = g.row(frame, token) + i;
      y[at] = from_float<T>(to_float(x[at]) + factor * gates[i] * to_float(p[at]));
    }
}

template <class T, int N>
__global__ void __launch_bounds__(backward_warps * 32)
    gate_backward_kernel(const T* dy, const T* p, const float* __restrict__ m,
                         const std::int32_t* __restrict__ rows, Grid g, int gate, Keep keep, T* dp,
                         float* __restrict__ partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), last = g.last();
  const float* gates = g.vector(m, rows[frame], gate);
  const float factor = keep(frame);
  float dgate[N][4] = {};
  for (int token = g.first() + warp; token < last; token += backward_warps) {
    const std::int64_t row = g.row(frame, token);
    Quad<T> gradient[N], branch[N];
    load_row(dy + row, quads, gradient);
    load_row(p + row, quads, branch);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> s = load_vec<4>(gates, n * 32 + lane);
      float d[4], b[4];
      unpack(gradient[n], d);
      unpack(branch[n], b);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float v = factor * d[e];
        dgate[n][e] += v * b[e];
        d[e] = v * s.v[e];
      }
      store_vec<4>(dp + row, n * 32 + lane, pack<T, 4>(d));
    }
  }
  store_column_sums(dgate, g.channels, shared_memory<float>(),
                    partial + static_cast<std::int64_t>(blockIdx.x) * g.channels);
}

template <class T>
__global__ void __launch_bounds__(backward_warps * 32)
    gate_backward_any_kernel(const T* dy, const T* p, const float* __restrict__ m,
                             const std::int32_t* __restrict__ rows, Grid g, int gate, Keep keep,
                             T* dp, float* __restrict__ partial) {
  const int frame = g.frame();
  const float* gates = g.vector(m, rows[frame], gate);
  const float factor = keep(frame);
  for (int i = threadIdx.x; i < g.channels; i += backward_warps * 32) {
    float sum = 0.0f;
    for (int token = g.first(); token < g.last(); ++token) {
      const std::int64_t at = g.row(frame, token) + i;
      const float d = factor * to_float(dy[at]);
      sum += d * to_float(p[at]);
      dp[at] = from_float<T>(d * gates[i]);
    }
    partial[static_cast<std::int64_t>(blockIdx.x) * g.channels + i] = sum;
  }
}

// ---------------------------------------------------------------- modulation

// m[g] = table + t[g]; `columns` of t is K*C, or C to broadcast it over K. A few tens of thousands of elements.
__global__ void modulation_forward_kernel(const float* __restrict__ table,
                                          const float* __restrict__ t, int count, int table_size,
                                          int channels, int columns, float* __restrict__ m) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const int group = i / table_size, inner = i % table_size;
  m[i] = table[inner] + t[group * columns + (columns == channels ? inner % channels : inner)];
}

// to[o, i] += sum over j < terms of from[o * outer + j * stride + i], in order of j: over groups for the table, over
// vectors for a broadcast t, one term for a full one.
__global__ void add_terms_kernel(const float* __restrict__ from, int count, int inner, int outer,
                                 int terms, int stride, float* __restrict__ to) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const float* at = from + i / inner * outer + i % inner;
  float sum = to[i];
#pragma unroll 4
  for (int j = 0; j < terms; ++j) sum += at[j * stride];
  to[i] = sum;
}

// ---------------------------------------------------------------- host side

// x is [.., S, C] with `rows` one entry a frame.
Grid grid_of(const Tensor& x, const Tensor& m, const Tensor& rows) {
  const std::int64_t c = x.dim(-1), frames = rows.numel();
  Grid g{};
  g.frames = static_cast<int>(frames);
  g.channels = static_cast<int>(c);
  g.tokens = frames == 0 ? 0 : static_cast<int>(x.numel() / (frames * c));
  g.vectors = static_cast<int>(m.dim(1));
  return g;
}

Grid with_run(Grid g, int run) {
  g.run = run;
  g.runs = (g.tokens + run - 1) / run;
  return g;
}

// Runs such that the blocks fill the GPU's `slots` in as few and as even waves as possible. What a block does besides its
// tokens (write and later read partials, start) costs about as much as 8 tokens.
Grid with_even_runs(const Grid& g, int slots) {
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

int slots(int blocks_per_sm) {
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

Keep keep_of(const Tensor& keep, int frames) {
  if (!keep.defined()) return {nullptr, 1};
  return {data<float>(keep), static_cast<int>(frames / keep.numel())};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void layer_norm_modulate_forward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                 int scale, int first_row, Tensor& y, Tensor& stats) {
  const Grid g = with_run(grid_of(x, m, rows), 2 * forward_warps);
  const dim3 block(forward_warps * 32);
  auto* st = reinterpret_cast<float2*>(data<float>(stats));
  by_type(x, [&]<class T>() {
    const auto start = [&](auto kernel) {
      launch(kernel, dim3(g.blocks()), block, 0, data<T>(x), data<float>(m),
             data<std::int32_t>(rows), g, shift, scale, first_row, data<T>(y), st);
    };
    if (in_quads(g.channels, x, m, y))
      by_steps(g.channels, [&]<int N>() { start(modulate_forward_kernel<T, N>); });
    else
      start(modulate_forward_any_kernel<T>);
  });
}

void layer_norm_modulate_backward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                  int scale, int first_row, const Tensor& stats, const Tensor& dy,
                                  Tensor& dx, bool accumulate, Tensor& dm) {
  const Grid g = with_even_runs(grid_of(x, m, rows), slots(x.dtype() == DType::bf16 ? 3 : 2));
  const dim3 block(backward_warps * 32);
  const Tensor partial = Tensor::empty({g.frames, g.runs, 2, g.channels}, DType::f32);
  const auto* st = reinterpret_cast<const float2*>(data<float>(stats));
  const std::size_t row_bytes = static_cast<std::size_t>(g.channels) * sizeof(float);
  by_type(x, [&]<class T>() {
    const auto start = [&](auto kernel) {
      launch(kernel, dim3(g.blocks()), block, backward_warps * row_bytes, data<T>(x),
             data<float>(m), data<std::int32_t>(rows), g, scale, first_row, st, data<T>(dy),
             data<T>(dx), data<float>(partial));
    };
    if (in_quads(g.channels, x, m, dy, dx))
      by_steps(g.channels, [&]<int N>() {
        if (accumulate)
          start(modulate_backward_kernel<T, N, true>);
        else
          start(modulate_backward_kernel<T, N, false>);
      });
    else
      launch(modulate_backward_any_kernel<T>, dim3(g.blocks()), block,
             2 * row_bytes + 32 * sizeof(float), data<T>(x), data<float>(m),
             data<std::int32_t>(rows), g, scale, first_row, st, data<T>(dy), data<T>(dx),
             accumulate, data<float>(partial));
  });
  add_partials(partial, rows, g, 2, shift, scale, first_row, dm);
}

void gate_residual_forward(const Tensor& x, const Tensor& p, const Tensor& m, const Tensor& rows,
                           int gate, const Tensor& keep, Tensor& y) {
  const Grid g = with_run(grid_of(x, m, rows), forward_warps);
  by_type(x, [&]<class T>() {
    const auto start = [&](auto kernel) {
      launch(kernel, dim3(g.blocks()), dim3(forward_warps * 32), 0, data<T>(x), data<T>(p),
             data<float>(m), data<std::int32_t>(rows), g, gate, keep_of(keep, g.frames),
             data<T>(y));
    };
    if (in_quads(g.channels, x, p, m, y))
      by_steps(g.channels, [&]<int N>() { start(gate_forward_kernel<T, N>); });
    else
      start(gate_forward_any_kernel<T>);
  });
}

void gate_residual_backward(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows,
                            int gate, const Tensor& keep, Tensor& dp, Tensor& dm) {
  const Grid g = with_even_runs(grid_of(dy, m, rows), slots(dy.dtype() == DType::bf16 ? 5 : 3));
  const Tensor partial = Tensor::empty({g.frames, g.runs, 1, g.channels}, DType::f32);
  by_type(dy, [&]<class T>() {
    const auto start = [&](auto kernel, std::size_t shared) {
      launch(kernel, dim3(g.blocks()), dim3(backward_warps * 32), shared, data<T>(dy), data<T>(p),
             data<float>(m), data<std::int32_t>(rows), g, gate, keep_of(keep, g.frames),
             data<T>(dp), data<float>(partial));
    };
    if (in_quads(g.channels, dy, p, m, dp))
      by_steps(g.channels, [&]<int N>() {
        start(gate_backward_kernel<T, N>,
              backward_warps * static_cast<std::size_t>(g.channels) * sizeof(float));
      });
    else
      start(gate_backward_any_kernel<T>, 0);
  });
  add_partials(partial, rows, g, 1, gate, gate, 0, dm);
}

void modulation_forward(const Tensor& table, const Tensor& t, Tensor& m) {
  const auto count = static_cast<int>(m.numel());
  launch(modulation_forward_kernel, dim3(blocks_for(count, 256)), dim3(256), 0, data<float>(table),
         data<float>(t), count, static_cast<int>(table.numel()), static_cast<int>(m.dim(2)),
         static_cast<int>(t.dim(1)), data<float>(m));
}

void modulation_backward(const Tensor& dm, Tensor& dtable, Tensor& dt) {
  const int groups = static_cast<int>(dm.dim(0)), k = static_cast<int>(dm.dim(1)),
            c = static_cast<int>(dm.dim(2)), size = k * c;
  const auto add = [&](int count, int inner, int outer, int terms, int stride, Tensor& to) {
    launch(add_terms_kernel, dim3(blocks_for(count, 256)), dim3(256), 0, data<float>(dm), count,
           inner, outer, terms, stride, data<float>(to));
  };
  if (dtable.defined()) add(size, size, size, groups, size, dtable);
  if (dt.defined() && dt.dim(1) == c && k > 1)
    add(groups * c, c, size, k, c, dt);
  else if (dt.defined())
    add(groups * size, size, size, 1, 0, dt);
}

}  // namespace weft::ops::cuda
