// CUDA side of ops/conv.h. CPU twin: src/ops/cpu/conv/deform.cpp; cases:
// tests/kernels/deform.cpp.
//
// Bound by memory: the columns are written (read) once, nine values for each of x, which the four
// neighbours of a place read from the caches.
//   columns   four times 16 bytes a thread where the channels allow it: finding out what a tap
//             reads takes longer than moving 16 bytes
//   offsets   a warp takes a tap of a pixel, its lanes the channels
//   input     each pixel of x gets the list of the taps that read it, as a transposed sparse
//             matrix. They are counted, placed by atomic counters, and put in the taps' order, so
//             that the sums repeat their bits; then 16 bytes of columns a thread and entry. An
//             entry finds its place by the keys below its own: with offsets near 0 a list has some
//             36. One as long as the band, where all taps read one pixel, is slow.
#include "ops/conv.h"

#include "core/error.h"
#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int taps = ops::deform_taps;

// x [frames,H,W,C] and the result [frames,h,w,.]; C in accesses. Pixels [first, first + count) of
// the result are under way.
struct Frames {
  int H, W, stride, top, left, dilation;
  std::int64_t C, first, count;
  Divisor h, w;
};

// What a tap reads: pixels of x (-1: outside of the frame) with their shares of the value.
struct Reading {
  ops::DeformPlace at;
  float mask;
  std::int64_t pixel[4];  // upper left and right, lower left and right
  float share[4];

  // Tap `tap` of pixel `p` of the result.
  template <class T>
  __device__ __forceinline__ Reading(const Frames& g, const T* offsets, std::int64_t p, int tap) {
    const T* own = offsets + p * ops::deform_channels;
    unsigned column = static_cast<unsigned>(p), row = g.w.split(column);
    const std::int64_t frame = g.h.split(row);
    const int y = static_cast<int>(row) * g.stride - g.top + tap / 3 * g.dilation,
              x = static_cast<int>(column) * g.stride - g.left + tap % 3 * g.dilation;
    at = ops::deform_place(static_cast<float>(y) + to_float(own[2 * tap]),
                           static_cast<float>(x) + to_float(own[2 * tap + 1]), g.H, g.W);
    mask = 1.0f / (1.0f + expf(-to_float(own[2 * taps + tap])));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int from_row = at.row + k / 2, from = at.column + k % 2;
      const bool counts = at.inside && from_row >= 0 && from_row < g.H && from >= 0 && from < g.W;
      pixel[k] = counts ? (frame * g.H + from_row) * g.W + from : -1;
      share[k] = (k / 2 ? at.below : 1.0f - at.below) * (k % 2 ? at.right : 1.0f - at.right);
    }
  }
  // Whether it adds something.
  __device__ __forceinline__ bool counts(int k) const { return pixel[k] >= 0 && share[k] != 0.0f; }
};

// A thread has `each` accesses of a tap, `lanes` threads all of them.
template <int V, int each, class T>
__global__ void __launch_bounds__(threads)
    columns_kernel(const T* x, const T* offsets, Frames g, Divisor lanes, T* columns,
                   std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned lane = static_cast<unsigned>(i);
  const unsigned reader = lanes.split(lane);
  const Reading r(g, offsets, g.first + reader / taps, static_cast<int>(reader % taps));
  float sum[each][V] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (!r.counts(k)) continue;
    const float factor = r.share[k] * r.mask;
    Vec<T, V> from[each];
#pragma unroll
    for (int j = 0; j < each; ++j)
      from[j] = load_vec<V>(x, r.pixel[k] * g.C + lane + j * (g.C / each));
#pragma unroll
    for (int j = 0; j < each; ++j) {
      float v[V];
      unpack(from[j], v);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[j][e] += factor * v[e];
    }
  }
#pragma unroll
  for (int j = 0; j < each; ++j)
    store_vec<V>(columns, reader * g.C + lane + j * (g.C / each), pack<T, V>(sum[j]));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    offsets_kernel(const T* x, const T* offsets, const T* dcolumns, Frames g, T* doffsets) {
  const std::int64_t i = thread_index() / 32;
  if (i >= g.count * taps) return;  // the whole warp
  const int tap = static_cast<int>(static_cast<unsigned>(i) % taps), lane = threadIdx.x % 32;
  const std::int64_t p = g.first + i / taps;
  const Reading r(g, offsets, p, tap);
  float along[4] = {};  // the columns' gradient times each of the four pixels
  for (std::int64_t c = lane; c < g.C; c += 32) {
    float d[V];
    unpack(load_vec<V>(dcolumns, i * g.C + c), d);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (r.pixel[k] < 0) continue;
      float v[V];
      unpack(load_vec<V>(x, r.pixel[k] * g.C + c), v);
#pragma unroll
      for (int e = 0; e < V; ++e) along[k] += d[e] * v[e];
    }
  }
  float value = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    along[k] = warp_sum(along[k]);
    value += r.share[k] * along[k];
  }
  if (lane > 0) return;
  const float below = r.at.below, right = r.at.right;
  T* own = doffsets + p * ops::deform_channels;
  own[2 * tap] = from_float<T>(
      r.mask * ((1.0f - right) * (along[2] - along[0]) + right * (along[3] - along[1])));
  own[2 * tap + 1] = from_float<T>(
      r.mask * ((1.0f - below) * (along[1] - along[0]) + below * (along[3] - along[2])));
  own[2 * taps + tap] = from_float<T>(value * r.mask * (1.0f - r.mask));
}

// ---- The lists of who reads a pixel of x. A reader's key: 4 times its tap, counted from the
// band's first, and which of the tap's four pixels it is ----

template <class T>
__global__ void count_kernel(const T* offsets, Frames g, std::int32_t* counts) {
  const std::int64_t i = thread_index();
  if (i >= g.count * taps) return;
  const Reading r(g, offsets, g.first + i / taps, static_cast<int>(i % taps));
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (r.counts(k)) atomicAdd(counts + r.pixel[k], 1);
}

// Room for the lists, in whatever order the warps come: begin = where each starts, and so does
// `end`, which grows as it is filled. total [1] is zero before.
__global__ void room_kernel(std::int32_t* end, std::int32_t* begin, std::int32_t* total,
                            std::int64_t pixels) {
  const std::int64_t i = thread_index();
  const int lane = threadIdx.x % 32;
  const std::int32_t own = i < pixels ? end[i] : 0;
  std::int32_t sum = own;  // of the lanes up to this one
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::int32_t before = __shfl_up_sync(full_mask, sum, offset);
    if (lane >= offset) sum += before;
  }
  std::int32_t first = 0;
  if (lane == 31) first = atomicAdd(total, sum);
  first = __shfl_sync(full_mask, first, 31) + sum - own;
  if (i < pixels) begin[i] = end[i] = first;
}

template <class T>
__global__ void fill_kernel(const T* offsets, Frames g, std::int32_t* end, std::int32_t* keys) {
  const std::int64_t i = thread_index();
  if (i >= g.count * taps) return;
  const Reading r(g, offsets, g.first + i / taps, static_cast<int>(i % taps));
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (r.counts(k)) keys[atomicAdd(end + r.pixel[k], 1)] = static_cast<std::int32_t>(4 * i + k);
}

struct Entry {
  std::int32_t tap;
  float factor;
};

template <class T>
__global__ void order_kernel(const T* offsets, Frames g, const std::int32_t* begin,
                             const std::int32_t* end, const std::int32_t* total,
                             const std::int32_t* keys, Entry* entries) {
  const std::int64_t i = thread_index();
  if (i >= total[0]) return;
  const std::int32_t key = keys[i], tap = key / 4, k = key % 4;
  const Reading r(g, offsets, g.first + tap / taps, tap % taps);
  std::int64_t pixel = 0;
  float factor = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j == k) pixel = r.pixel[j], factor = r.share[j] * r.mask;
  const std::int32_t first = begin[pixel], last = end[pixel];
  std::int32_t before = 0;
  for (std::int32_t e = first; e < last; ++e) before += keys[e] < key ? 1 : 0;
  entries[first + before] = {tap, factor};
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    gather_kernel(const T* dcolumns, const std::int32_t* begin, const std::int32_t* end,
                  const Entry* entries, Divisor lanes, int C, float* dx, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i);
  const unsigned pixel = lanes.split(c);
  const std::int32_t first = begin[pixel], last = end[pixel];
  if (first == last) return;
  float sum[V] = {};
#pragma unroll 4
  for (std::int32_t e = first; e < last; ++e) {
    const Entry entry = entries[e];
    float d[V];
    unpack(load_vec<V>(dcolumns, static_cast<std::int64_t>(entry.tap) * C + c), d);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += entry.factor * d[j];
  }
  float before[V];
  unpack(load_vec<V>(static_cast<const float*>(dx), i), before);
#pragma unroll
  for (int j = 0; j < V; ++j) sum[j] += before[j];
  store_vec<V>(dx, i, pack<float, V>(sum));
}

Frames frames_of(const Shape& x, const Tensor& offsets, const ops::Conv& k, std::int64_t first,
                 std::int64_t count, int V) {
  WEFT_ASSERT(k.kt == 1 && k.kh == 3 && k.kw == 3 && k.groups == 1 && !k.upsample);
  WEFT_ASSERT(offsets.dim(4) == ops::deform_channels &&
              k.output(x, x[4]) == Shape({x[0], x[1], offsets.dim(2), offsets.dim(3), x[4]}));
  WEFT_ASSERT(offsets.numel() / ops::deform_channels < std::int64_t{1} << 31);
  return {static_cast<int>(x[2]),
          static_cast<int>(x[3]),
          k.stride,
          k.top,
          k.left,
          k.dilation,
          x[4] / V,
          first,
          count,
          Divisor(offsets.dim(2)),
          Divisor(offsets.dim(3))};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void deform_columns(const Tensor& x, const Tensor& offsets, Conv conv, std::int64_t first,
                    Tensor& columns) {
  by_access(
      x.dim(4),
      [&]<class T, int V>() {
        const Frames g = frames_of(x.shape(), offsets, conv, first, columns.dim(0), V);
        const auto run = [&]<int each>() {
          const std::int64_t count = columns.numel() / V / each;
          WEFT_ASSERT(count < std::int64_t{1} << 31);
          launch_items(columns_kernel<V, each, T>, count, data<T>(x), data<T>(offsets), g,
                       Divisor(g.C / each), data<T>(columns));
        };
        if (g.C % 4 == 0)
          run.template operator()<4>();
        else
          run.template operator()<1>();
      },
      columns, x);
}

void deform_backward_offsets(const Tensor& x, const Tensor& offsets, const Tensor& dcolumns,
                             Conv conv, std::int64_t first, Tensor& doffsets) {
  by_access(
      x.dim(4),
      [&]<class T, int V>() {
        launch_threads(offsets_kernel<V, T>, 32 * taps * dcolumns.dim(0), data<T>(x),
                       data<T>(offsets), data<T>(dcolumns),
                       frames_of(x.shape(), offsets, conv, first, dcolumns.dim(0), V),
                       data<T>(doffsets));
      },
      dcolumns, x);
}

void deform_backward_input(const Tensor& offsets, const Tensor& dcolumns, Conv conv,
                           std::int64_t first, Tensor& dx) {
  const std::int64_t C = dx.dim(4), pixels = dx.numel() / C, readers = taps * dcolumns.dim(0);
  if (readers == 0 || dx.numel() == 0) return;
  WEFT_ASSERT(4 * readers < std::int64_t{1} << 31);
  const Tensor ends = Tensor::empty({pixels}, DType::i32),
               begins = Tensor::empty({pixels}, DType::i32),
               totals = Tensor::empty({1}, DType::i32),
               lists = Tensor::empty({4 * readers}, DType::i32),
               ordered = Tensor::empty({4 * readers, 2}, DType::i32);
  auto *end = data<std::int32_t>(ends), *begin = data<std::int32_t>(begins),
       *total = data<std::int32_t>(totals), *keys = data<std::int32_t>(lists);
  auto* entries = reinterpret_cast<Entry*>(data<std::int32_t>(ordered));
  device_runtime().zero(end, ends.bytes(), Stream::compute);
  device_runtime().zero(total, totals.bytes(), Stream::compute);
  by_access(
      C,
      [&]<class T, int V>() {
        const Frames g = frames_of(dx.shape(), offsets, conv, first, dcolumns.dim(0), V);
        const T* const o = data<T>(offsets);
        launch_threads(count_kernel<T>, readers, o, g, end);
        launch_items(room_kernel, pixels, end, begin, total);
        launch_threads(fill_kernel<T>, readers, o, g, end, keys);
        launch_threads(order_kernel<T>, 4 * readers, o, g, begin, end, total, keys, entries);
        WEFT_ASSERT(dx.numel() / V < std::int64_t{1} << 31);
        launch_items(gather_kernel<V, T>, dx.numel() / V, data<T>(dcolumns), begin, end, entries,
                     Divisor(g.C), static_cast<int>(g.C), data<float>(dx));
      },
      dcolumns, dx);
}

}  // namespace weft::ops::cuda
