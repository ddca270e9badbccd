// Gated residual, modulation and the sums of its gradient (frames.cuh) of ops/norm.h on the GPU.
// CPU twin: src/ops/cpu/norm.cpp; cases: tests/kernels/norm.cpp.
//
// Bound by memory. Least traffic for one token of C = 1152 channels in bf16 (a row is 2304 bytes),
// f32 twice that:
//   gate_residual_forward    x, p in, y out      6912 bytes
//   gate_residual_backward   dy, p in, dp out    6912 bytes, and no more for the bias gradient of
//                            the layer that made p, which read dp again where its weight's is made
// A warp a token with all of its rows in registers (frames.cuh); the gates come from the
// first-level cache. The modulation itself is some tens of thousands of elements: the time of a
// launch.
//
// Scratch (Tensor::empty) of gate_residual_backward: 8 C bytes a run, 5 MB at 30 frames of C = 1152
// on 132 SMs.
#include "ops/norm.h"

#include "matmul/product.cuh"
#include "norm/rows.cuh"

namespace weft::kernels {
namespace {

// Drop path's factor of a frame: keep [B], or 1 where it is not given.
struct Keep {
  const float* factors;
  int frames_per_sample;
  __device__ float operator()(int frame) const {
    return factors == nullptr ? 1.0f : factors[frame / frames_per_sample];
  }
};

// A warp a token, like the norm: nothing is summed, but rows in whole steps need no division to
// find a channel.
template <class T, int N>
__global__ void __launch_bounds__(forward_warps * 32, 2)
    gate_forward_kernel(const T* x, const T* p, const float* __restrict__ m,
                        const std::int32_t* __restrict__ rows, FrameGrid g, int gate, Keep keep,
                        T* y) {
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

// Rows of any length, and x and p of two types: V columns a thread down a run of tokens, some at a
// time, whose loads are under way together. y may be x.
constexpr int column_threads = 128, column_run = 8, together = 4;

template <class X, class P, int V>
__global__ void __launch_bounds__(column_threads)
    gate_columns_kernel(const X* x, const P* p, const float* __restrict__ m,
                        const std::int32_t* __restrict__ rows, FrameGrid g, int gate, Keep keep,
                        X* y) {
  const int i = static_cast<int>(blockIdx.y * column_threads + threadIdx.x);
  if (i * V >= g.channels) return;
  const int frame = g.frame(), last = g.last();
  const float factor = keep(frame);
  const Vec<float, V> s = load_vec<V>(g.vector(m, rows[frame], gate), i);
  for (int first = g.first(); first < last; first += together) {
    Vec<X, V> in[together];
    Vec<P, V> branch[together];
#pragma unroll
    for (int t = 0; t < together; ++t) {
      const std::int64_t row = g.row(frame, min(first + t, last - 1));
      in[t] = load_vec<V>(x + row, i);
      branch[t] = load_vec<V>(p + row, i);
    }
#pragma unroll
    for (int t = 0; t < together; ++t) {
      if (first + t >= last) continue;
      float v[V], b[V];
      unpack(in[t], v);
      unpack(branch[t], b);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] += factor * s.v[e] * b[e];
      store_vec<V>(y + g.row(frame, first + t), i, pack<X, V>(v));
    }
  }
}

// Blocks of the backward on a multiprocessor: two sums of every column take the registers of more.
template <class T>
constexpr int gate_blocks = sizeof(T) == 2 ? 3 : 2;

// dp, and a run's sums for the gradients of the gate and, unless null, of p's bias. dp may be p.
template <class T, int N>
__global__ void __launch_bounds__(backward_warps * 32, gate_blocks<T>)
    gate_backward_kernel(const T* dy, const T* p, const float* __restrict__ m,
                         const std::int32_t* __restrict__ rows, FrameGrid g, int gate, Keep keep,
                         T* dp, float* __restrict__ partial, float* __restrict__ bias) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), last = g.last();
  const float* gates = g.vector(m, rows[frame], gate);
  const float factor = keep(frame);
  float dgate[N][4] = {}, dbias[N][4] = {};
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
        dbias[n][e] += d[e];
      }
      store_vec<4>(dp + row, n * 32 + lane, pack<T, 4>(d));
    }
  }
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * g.channels;
  store_column_sums(dgate, g.channels, shared_memory<float>(), partial + block);
  if (bias != nullptr) store_column_sums(dbias, g.channels, shared_memory<float>(), bias + block);
}

// The same for rows as in gate_columns_kernel.
template <class X, class P, int V>
__global__ void __launch_bounds__(column_threads)
    gate_columns_backward_kernel(const X* __restrict__ dy, const P* p, const float* __restrict__ m,
                                 const std::int32_t* __restrict__ rows, FrameGrid g, int gate,
                                 Keep keep, P* dp, float* __restrict__ partial,
                                 float* __restrict__ bias) {
  const int i = static_cast<int>(blockIdx.y * column_threads + threadIdx.x);
  if (i * V >= g.channels) return;
  const int frame = g.frame(), last = g.last();
  const float factor = keep(frame);
  const Vec<float, V> s = load_vec<V>(g.vector(m, rows[frame], gate), i);
  float sum[V] = {}, bias_sum[V] = {};
  for (int first = g.first(); first < last; first += together) {
    Vec<X, V> gradient[together];
    Vec<P, V> branch[together];
#pragma unroll
    for (int t = 0; t < together; ++t) {
      const std::int64_t row = g.row(frame, min(first + t, last - 1));
      gradient[t] = load_vec<V>(dy + row, i);
      branch[t] = load_vec<V>(p + row, i);
    }
#pragma unroll
    for (int t = 0; t < together; ++t) {
      if (first + t >= last) continue;
      float d[V], b[V];
      unpack(gradient[t], d);
      unpack(branch[t], b);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        d[e] *= factor;
        sum[e] += d[e] * b[e];
        d[e] *= s.v[e];
        bias_sum[e] += d[e];
      }
      store_vec<V>(dp + g.row(frame, first + t), i, pack<P, V>(d));
    }
  }
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * g.channels;
  store_vec<V>(partial + block, i, pack<float, V>(sum));
  if (bias != nullptr) store_vec<V>(bias + block, i, pack<float, V>(bias_sum));
}

// m[g] = table + t[g]; `columns` of t is K*C, or C to broadcast it over K. A few tens of thousands
// of elements.
__global__ void modulation_forward_kernel(const float* __restrict__ table,
                                          const float* __restrict__ t, int count, int table_size,
                                          int channels, int columns, float* __restrict__ m) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const int group = i / table_size, inner = i % table_size;
  m[i] = table[inner] + t[group * columns + (columns == channels ? inner % channels : inner)];
}

// to[o, i] += sum over j < terms of from[o * outer + j * stride + i], in order of j: over groups
// for the table, over vectors for a broadcast t, one term for a full one.
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

Keep keep_of(const Tensor& keep, int frames) {
  if (!keep.defined()) return {nullptr, 1};
  return {data<float>(keep), static_cast<int>(frames / keep.numel())};
}

// Thread i does row i of the scalars and frame i of the names.
__global__ void modulation_rows_kernel(const float* timestep, const float* fps,
                                       const std::uint8_t* mask, int B, int G, int frames,
                                       float* times, float* rates, std::int32_t* rows,
                                       std::int32_t* sample_rows) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < G) {
    times[i] = i < B ? timestep[i] : 0.0f;
    rates[i] = fps[i % B];
  }
  if (i < frames) {
    const int b = i / (frames / B);
    rows[i] = mask == nullptr || mask[i] != 0 ? b : B + b;
    sample_rows[i] = b;
  }
}

constexpr int adding_warps = 16;
constexpr int in_flight = 8;  // loads of a thread

// dm[row, vector] += the partials [frame, run, parts, C] of the frames that use the row. A block:
// 32 columns of one part and row; its warps take every 16th partial, and their sums are added in
// the order of warps. The frames are listed first, so that the loop over partials has no branch and
// keeps several loads under way.
__global__ void __launch_bounds__(adding_warps * 32)
    add_partials_kernel(const float* __restrict__ partial, const std::int32_t* __restrict__ rows,
                        FrameGrid g, int parts, int vector0, int vector1, int first_row,
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
    // Eight loads at a time, the last ones masked: their latency is what this kernel costs.
    for (int first = warp; first < partials; first += in_flight * adding_warps) {
      float x[in_flight];
#pragma unroll
      for (int j = 0; j < in_flight; ++j) {
        const int q = first + j * adding_warps;
        x[j] = 0.0f;
        if (q < partials) {
          const std::int64_t at = static_cast<std::int64_t>(list[q / g.runs]) * g.runs + q % g.runs;
          x[j] = partial[(at * parts + part) * g.channels + column];
        }
      }
#pragma unroll
      for (int j = 0; j < in_flight; ++j) sum += x[j];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= g.channels) return;
  for (int w = 1; w < adding_warps; ++w) sum += sums[w * 32 + lane];
  dm[(static_cast<std::int64_t>(group) * g.vectors + (part == 0 ? vector0 : vector1)) * g.channels +
     column] += sum;
}

}  // namespace

// Half of the backward passes over frames: reads 4 C bytes a run and part, most of it still in the
// second-level cache, about 1 % of what the first halves move.
void add_partials(const Tensor& partial, const Tensor& rows, const FrameGrid& g, int parts,
                  int vector0, int vector1, int first_row, Tensor& dm) {
  const dim3 grid(blocks_for(g.channels, 32), static_cast<unsigned>(parts),
                  static_cast<unsigned>(dm.dim(0)));
  launch(add_partials_kernel, grid, dim3(adding_warps * 32),
         (adding_warps * 32 + 1 + static_cast<std::size_t>(g.frames)) * sizeof(float),
         data<float>(partial), data<std::int32_t>(rows), g, parts, vector0, vector1, first_row,
         data<float>(dm));
}

}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void gate_residual_forward(const Tensor& x, const Tensor& p, const Tensor& m, const Tensor& rows,
                           int gate, const Tensor& keep, Tensor& y) {
  const FrameGrid grid = grid_of(x, m, rows);
  if (x.dtype() == p.dtype() && in_quads(grid.channels, x, p, m, y)) {
    const FrameGrid g = with_run(grid, forward_warps);
    return by_type(x, [&]<class T>() {
      by_steps(g.channels, [&]<int N>() {
        launch(gate_forward_kernel<T, N>, dim3(g.blocks()), dim3(forward_warps * 32), 0, data<T>(x),
               data<T>(p), data<float>(m), data<std::int32_t>(rows), g, gate,
               keep_of(keep, g.frames), data<T>(y));
      });
    });
  }
  const FrameGrid g = with_run(grid, column_run);
  by_stream(x, p, [&]<class X, class P>() {
    by_width<4>(
        g.channels,
        [&]<int V>() {
          launch(gate_columns_kernel<X, P, V>,
                 dim3(g.blocks(), blocks_for(g.channels, column_threads * V)), dim3(column_threads),
                 0, data<X>(x), data<P>(p), data<float>(m), data<std::int32_t>(rows), g, gate,
                 keep_of(keep, g.frames), data<X>(y));
        },
        x, p, m, y);
  });
}

void gate_residual_backward(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows,
                            int gate, const Tensor& keep, Tensor& dp, Tensor& dm, Tensor& dbias,
                            bool accumulate) {
  const FrameGrid grid = grid_of(dy, m, rows);
  const bool by_warps = dy.dtype() == p.dtype() && in_quads(grid.channels, dy, p, m, dp);
  const FrameGrid g = with_even_runs(
      grid, slots(dy.dtype() == DType::bf16 ? gate_blocks<__nv_bfloat16> : gate_blocks<float>));
  const Tensor partial = Tensor::empty({g.frames, g.runs, 1, g.channels}, DType::f32);
  const Tensor sums = dbias.defined() ? Tensor::empty(partial.shape(), DType::f32) : Tensor();
  if (by_warps)
    by_type(dy, [&]<class T>() {
      by_steps(g.channels, [&]<int N>() {
        launch(gate_backward_kernel<T, N>, dim3(g.blocks()), dim3(backward_warps * 32),
               backward_warps * static_cast<std::size_t>(g.channels) * sizeof(float), data<T>(dy),
               data<T>(p), data<float>(m), data<std::int32_t>(rows), g, gate,
               keep_of(keep, g.frames), data<T>(dp), data<float>(partial),
               data_or_null<float>(sums));
      });
    });
  else
    by_stream(dy, p, [&]<class X, class P>() {
      by_width<4>(
          g.channels,
          [&]<int V>() {
            launch(gate_columns_backward_kernel<X, P, V>,
                   dim3(g.blocks(), blocks_for(g.channels, column_threads * V)),
                   dim3(column_threads), 0, data<X>(dy), data<P>(p), data<float>(m),
                   data<std::int32_t>(rows), g, gate, keep_of(keep, g.frames), data<P>(dp),
                   data<float>(partial), data_or_null<float>(sums));
          },
          dy, p, m, dp);
    });
  add_partials(partial, rows, g, 1, gate, gate, 0, dm);
  if (dbias.defined()) column_sums(sums, g.blocks(), g.channels, data<float>(dbias), accumulate);
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

void modulation_rows(const Tensor& timestep, const Tensor& fps, const Tensor& mask, Tensor& times,
                     Tensor& rates, Tensor& rows, Tensor& sample_rows) {
  const int G = static_cast<int>(times.numel()), frames = static_cast<int>(rows.numel());
  launch(modulation_rows_kernel, dim3(blocks_for(std::max(G, frames), 128)), dim3(128), 0,
         data<float>(timestep), data<float>(fps), data_or_null<std::uint8_t>(mask),
         static_cast<int>(timestep.numel()), G, frames, data<float>(times), data<float>(rates),
         data<std::int32_t>(rows), data<std::int32_t>(sample_rows));
}

}  // namespace weft::ops::cuda
