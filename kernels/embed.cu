// CUDA side of ops/layout.h. CPU twin: src/ops/cpu/embed.cpp; cases: tests/kernels/embed.cpp.
//
// Nothing here multiplies: each operation is bounded by the bytes named below, and most are so
// small at STDiT3's sizes that starting them is what they cost. n = elements, w = bytes of the
// rows' type.
//   position_embedding     4 n written; 1 double power and 4 sines for 4 values; a thread keeps its
//                          frequency
//   add_position           x read and written, p read once: a thread keeps its 16 bytes of p and
//                          walks over frames
//   timestep_embedding, rope_table: a few KB
//   rope_table_3d          8 bytes a pair written, for a power, a sine and a cosine in double: once
//                          a forward
//   embedding_forward      2 n w, 16 bytes an access
//   gather_captions        n (4 + w), and n (w + 8) backward: a block a row, 16-byte accesses
// No operation takes scratch.
#include "ops/layout.h"

#include <algorithm>
#include <cmath>

#include "vector.cuh"

namespace weft::kernels {
namespace {

// ---- Positions ----

constexpr int positions_a_thread = 16;

// Thread x is a frequency, which costs a power in double as on the CPU; the block's row is a run of
// positions.
__global__ void position_kernel(int positions, int W, int quarter, float divisor, float ratio_w,
                                float ratio_h, float* p) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= quarter) return;
  const float frequency =
      static_cast<float>(1.0 / pow(10000.0, static_cast<double>(k) / static_cast<double>(quarter)));
  const int first = static_cast<int>(blockIdx.y) * positions_a_thread;
  for (int at = first; at < min(first + positions_a_thread, positions); ++at) {
    float* row = p + static_cast<std::int64_t>(at) * 4 * quarter;
    const float gx = static_cast<float>(at % W) / divisor * ratio_w;
    const float gy = static_cast<float>(at / W) / divisor * ratio_h;
    row[k] = sinf(gx * frequency);
    row[quarter + k] = cosf(gx * frequency);
    row[2 * quarter + k] = sinf(gy * frequency);
    row[3 * quarter + k] = cosf(gy * frequency);
  }
}

constexpr int frames_a_thread = 4;

// x [frames, size] += p [size], `size` in accesses.
template <class T, int V>
__global__ void add_position_kernel(const float* p, T* x, std::int64_t size, std::int64_t frames) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  float shift[V];
  unpack(load_vec<V>(p, i), shift);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * frames_a_thread;
  // All frames' loads first: their latency is what the kernel waits for.
  Vec<T, V> loaded[frames_a_thread];
#pragma unroll
  for (int f = 0; f < frames_a_thread; ++f)
    if (first + f < frames) loaded[f] = load_vec<V>(x, (first + f) * size + i);
#pragma unroll
  for (int f = 0; f < frames_a_thread; ++f)
    if (first + f < frames) {
      float v[V];
      unpack(loaded[f], v);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] += shift[e];
      store_vec<V>(x, (first + f) * size + i, pack<T, V>(v));
    }
}

// ---- Tables ----

// The frequency is the exponential rounded once to f32, as the host's is: at s ~ 1000 an ulp of it
// would show.
__global__ void timestep_kernel(const float* s, int half, float* e) {
  const int i = static_cast<int>(blockIdx.y);
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= half) return;
  constexpr float minus_log_10000 = -9.21034037197618273607f;
  const float exponent = minus_log_10000 * static_cast<float>(k) / static_cast<float>(half);
  const float angle = s[i] * static_cast<float>(exp(static_cast<double>(exponent)));
  float* row = e + static_cast<std::int64_t>(i) * 2 * half;
  row[k] = cosf(angle);
  row[half + k] = sinf(angle);
}

__global__ void rope_kernel(const float* freqs, int half, int count, float2* rope) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const float angle = static_cast<float>(i / half) * freqs[i % half];
  rope[i] = make_float2(cosf(angle), sinf(angle));
}

// A thread a pair. The angles in double, as on the CPU.
__global__ void rope_3d_kernel(int rows, int columns, std::int64_t first, int half, float2* rope,
                               std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t token = first + i / half;
  const int pair = static_cast<int>(i % half), third = half / 3, before = half - 2 * third;
  const bool by_frame = pair < before, by_row = !by_frame && pair < before + third;
  const std::int64_t position = by_frame ? token / (static_cast<std::int64_t>(rows) * columns)
                                : by_row ? token / columns % rows
                                         : token % columns;
  const int pairs = by_frame ? before : third, k = by_frame ? pair : (pair - before) % third;
  double sin = 0.0, cos = 0.0;
  sincos(static_cast<double>(position) * pow(10000.0, -static_cast<double>(k) / pairs), &sin, &cos);
  rope[i] = make_float2(static_cast<float>(cos), static_cast<float>(sin));
}

template <class T, int V>
__global__ void __launch_bounds__(threads)
    embedding_kernel(const std::int32_t* ids, const T* table, std::int64_t packs, T* y,
                     std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  store_vec<V>(y, i, load_vec<V>(table, ids[i / packs] * packs + i % packs));
}

// ---- Captions ----

// Block: one row of C accesses.
template <class T, int V>
__global__ void gather_captions_kernel(const float* y, const float* null_caption,
                                       const std::int32_t* index, int C, T* rows) {
  const std::int64_t at = index[blockIdx.x], to = static_cast<std::int64_t>(blockIdx.x) * C;
  for (int i = static_cast<int>(threadIdx.x); i < C; i += static_cast<int>(blockDim.x)) {
    float v[V] = {};
    if (at >= 0)
      unpack(load_vec<V>(y, at * C + i), v);
    else if (at != ops::padding_row)
      unpack(load_vec<V>(null_caption, (-1 - at) * C + i), v);
    store_vec<V>(rows, to + i, pack<T, V>(v));
  }
}

// A caption row is packed at most once, so no two blocks add to the same place.
template <class T, int V>
__global__ void gather_backward_kernel(const T* drows, const std::int32_t* index, int C,
                                       float* dy) {
  const std::int64_t at = index[blockIdx.x], from = static_cast<std::int64_t>(blockIdx.x) * C;
  if (at < 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < C; i += static_cast<int>(blockDim.x)) {
    float d[V], sum[V];
    unpack(load_vec<V>(drows, from + i), d);
    unpack(load_vec<V>(static_cast<const float*>(dy), at * C + i), sum);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += d[e];
    store_vec<V>(dy, at * C + i, pack<float, V>(sum));
  }
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void position_embedding(int H, int W, double scale, Tensor& p) {
  const int quarter = static_cast<int>(p.dim(1) / 4);
  const double base = std::nearbyint(std::sqrt(static_cast<double>(H) * W));
  launch(position_kernel,
         dim3(blocks_for(quarter, threads), blocks_for(std::int64_t{H} * W, positions_a_thread)),
         dim3(threads), 0, H * W, W, quarter, static_cast<float>(scale),
         static_cast<float>(base / W), static_cast<float>(base / H), data<float>(p));
}

void add_position(const Tensor& p, Tensor& x) {
  const std::int64_t size = p.numel();
  if (size == 0) return;
  const std::int64_t frames = x.numel() / size;
  by_type(x, [&]<class T>() {
    by_width<Pack<T>::size>(
        size,
        [&]<int V>() {
          launch(add_position_kernel<T, V>,
                 dim3(blocks_for(size, threads * V), blocks_for(frames, frames_a_thread)),
                 dim3(threads), 0, data<float>(p), data<T>(x), size / V, frames);
        },
        x, p);
  });
}

void timestep_embedding(const Tensor& s, Tensor& e) {
  const int half = static_cast<int>(e.dim(1) / 2);
  launch(timestep_kernel, dim3(blocks_for(half, 128), static_cast<unsigned>(s.numel())), dim3(128),
         0, data<float>(s), half, data<float>(e));
}

void rope_table(const Tensor& freqs, Tensor& rope) {
  const int half = static_cast<int>(rope.dim(1)), count = static_cast<int>(rope.dim(0)) * half;
  launch(rope_kernel, dim3(blocks_for(count, 128)), dim3(128), 0, data<float>(freqs), half, count,
         reinterpret_cast<float2*>(data<float>(rope)));
}

void rope_table_3d(int rows, int columns, std::int64_t first, Tensor& rope) {
  launch_items(rope_3d_kernel, rope.numel() / 2, rows, columns, first,
               static_cast<int>(rope.dim(1)), reinterpret_cast<float2*>(data<float>(rope)));
}

void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y) {
  const std::int64_t C = table.dim(1), count = ids.numel() * C;
  by_access(
      C,
      [&]<class T, int V>() {
        launch_items(embedding_kernel<T, V>, count / V, data<std::int32_t>(ids), data<T>(table),
                     C / V, data<T>(y));
      },
      table, y);
}

void gather_captions(const Tensor& y, const Tensor& null_caption, const Tensor& index,
                     Tensor& rows) {
  const int C = static_cast<int>(rows.dim(-1));
  by_type(rows, [&]<class T>() {
    by_width<Pack<T>::size>(
        C,
        [&]<int V>() {
          launch(gather_captions_kernel<T, V>, dim3(static_cast<unsigned>(index.numel())),
                 dim3(threads), 0, data_or_null<float>(y), data_or_null<float>(null_caption),
                 data<std::int32_t>(index), C / V, data<T>(rows));
        },
        y, null_caption, rows);
  });
}

void gather_captions_backward(const Tensor& drows, const Tensor& index, Tensor& dy) {
  const int C = static_cast<int>(drows.dim(-1));
  by_type(drows, [&]<class T>() {
    by_width<Pack<T>::size>(
        C,
        [&]<int V>() {
          launch(gather_backward_kernel<T, V>, dim3(static_cast<unsigned>(index.numel())),
                 dim3(threads), 0, data<T>(drows), data<std::int32_t>(index), C / V,
                 data<float>(dy));
        },
        drows, dy);
  });
}

}  // namespace weft::ops::cuda
