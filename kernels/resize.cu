// CUDA side of ops/resize.h. CPU twin: src/ops/cpu/resize.cpp; cases: src/bench/kernels/resize.cpp.
//
// Bound by memory: each side's elements once, the four of the smaller side from the caches.
// Forward: 16 bytes of a pixel of the result a thread. Backward: a block gathers 32 accesses of one
// pixel of the gradient, its 8 warps take the result's pixels in turn, and their sums are added in
// order.
//
// Nearest and reflected borders: 16 bytes of the channels that are moved a thread; backward, of a
// pixel of the gradient, which adds the result's pixels row by row.
#include "ops/resize.h"

#include <algorithm>

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256, warps = threads / 32;

// [frames,h,w,C] and, of the result, [frames,H,W,C]; C in accesses.
struct ResizeGrid {
  int h, w, H, W;
  float down, across;  // h / H, w / W
  std::int64_t C;
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    bilinear_kernel(const T* x, ResizeGrid g, Places places, T* y, std::int64_t count,
                    bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const Places::Place to_place = places.of(i);
  const std::int64_t frame = to_place.frame;
  const ops::BilinearTap row = ops::bilinear_tap(static_cast<int>(to_place.row), g.down, g.h),
                         column =
                             ops::bilinear_tap(static_cast<int>(to_place.column), g.across, g.w);
  const auto at = [&](int ri, int ci) {
    return ((frame * g.h + ri) * g.w + ci) * g.C + to_place.c;
  };
  float a[V], b[V], d[V], e[V], to[V];
  unpack(load_vec<V>(x, at(row.first, column.first)), a);
  unpack(load_vec<V>(x, at(row.first, column.second)), b);
  unpack(load_vec<V>(x, at(row.second, column.first)), d);
  unpack(load_vec<V>(x, at(row.second, column.second)), e);
  const float se = row.share * column.share, sd = row.share * (1.0f - column.share),
              sb = (1.0f - row.share) * column.share,
              sa = (1.0f - row.share) * (1.0f - column.share);
  if (accumulate) unpack(load_vec<V>(static_cast<const T*>(y), i), to);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float v = sa * a[k] + sb * b[k] + sd * d[k] + se * e[k];
    to[k] = accumulate ? to[k] + v : v;
  }
  store_vec<V>(y, i, pack<T, V>(to));
}

// The outputs that may have a share of pixel `i`; those at the ends may have none.
struct Range {
  int begin, end;
  __device__ __forceinline__ Range(int i, float ratio, int out) {
    const float low = (static_cast<float>(i) - 0.5f) / ratio - 1.5f;
    const float high = (static_cast<float>(i) + 1.5f) / ratio + 0.5f;
    // The first pixel has all outputs in front of it.
    begin = i == 0 || low < 0.0f ? 0 : static_cast<int>(low);
    end = high < static_cast<float>(out) ? static_cast<int>(high) + 1 : out;
    if (end > out) end = out;
  }
};
__device__ __forceinline__ float share_of(const ops::BilinearTap& t, int from) {
  return (t.first == from ? 1.0f - t.share : 0.0f) + (t.second == from ? t.share : 0.0f);
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    bilinear_backward_kernel(const T* dy, ResizeGrid g, std::int64_t pieces, T* dx,
                             bool accumulate) {
  float* shared = shared_memory<float>();  // [warps,V,32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t pixel = blockIdx.x / pieces, c = blockIdx.x % pieces * 32 + lane;
  const int j = static_cast<int>(pixel % g.w), i = static_cast<int>(pixel / g.w % g.h);
  const std::int64_t frame = pixel / g.w / g.h;
  const Range down(i, g.down, g.H), across(j, g.across, g.W);
  const int width = across.end - across.begin, area = (down.end - down.begin) * width;
  float sum[V] = {};
  if (c < g.C)
    for (int k = warp; k < area; k += warps) {
      const int r = down.begin + k / width, q = across.begin + k % width;
      const float s = share_of(ops::bilinear_tap(r, g.down, g.h), i) *
                      share_of(ops::bilinear_tap(q, g.across, g.w), j);
      if (s == 0.0f) continue;
      float from[V];
      unpack(load_vec<V>(dy, ((frame * g.H + r) * g.W + q) * g.C + c), from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += s * from[e];
    }
#pragma unroll
  for (int e = 0; e < V; ++e) shared[(warp * V + e) * 32 + lane] = sum[e];
  __syncthreads();
  if (warp > 0 || c >= g.C) return;
  float to[V] = {};
  if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), pixel * g.C + c), to);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    float total = 0.0f;
    for (int k = 0; k < warps; ++k) total += shared[(k * V + e) * 32 + lane];
    to[e] += total;
  }
  store_vec<V>(dx, pixel * g.C + c, pack<T, V>(to));
}

template <int V, class T>
__global__ void __launch_bounds__(threads) copy_kernel(const T* x, T* y, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  float a[V], b[V];
  unpack(load_vec<V>(x, i), a);
  unpack(load_vec<V>(static_cast<const T*>(y), i), b);
#pragma unroll
  for (int e = 0; e < V; ++e) b[e] += a[e];
  store_vec<V>(y, i, pack<T, V>(b));
}

// x [frames,h,w,c] and y [frames,H,W,C], in accesses; y starts at the first channel that is meant.
struct NearestGrid {
  std::int64_t h, w, H, W, c, C;
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    nearest_kernel(const T* x, NearestGrid g, Places places, T* y, std::int64_t count,
                   bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const Places::Place p = places.of(i);
  // ops::nearest_source() of both axes.
  const std::int64_t row = places.H.divide(p.row * static_cast<unsigned>(g.h)),
                     column = places.W.divide(p.column * static_cast<unsigned>(g.w));
  const std::int64_t from = (p.frame * g.h + row) * g.w + column;
  const std::int64_t at = ((p.frame * g.H + p.row) * g.W + p.column) * g.C + p.c;
  Vec<T, V> v = load_vec<V>(x, from * g.c + p.c);
  if (accumulate) {
    float a[V], b[V];
    unpack(v, a);
    unpack(load_vec<V>(static_cast<const T*>(y), at), b);
#pragma unroll
    for (int e = 0; e < V; ++e) b[e] += a[e];
    v = pack<T, V>(b);
  }
  store_vec<V>(y, at, v);
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    nearest_backward_kernel(const T* dy, NearestGrid g, Places places, T* dx, std::int64_t count,
                            bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const std::int64_t c = p.c, q = p.column, r = p.row, frame = p.frame;
  const std::int64_t bottom = ops::nearest_first(r + 1, g.h, g.H),
                     left = ops::nearest_first(q, g.w, g.W),
                     right = ops::nearest_first(q + 1, g.w, g.W);
  float sum[V] = {};
  for (std::int64_t a = ops::nearest_first(r, g.h, g.H); a < bottom; ++a)
    for (std::int64_t b = left; b < right; ++b) {
      float from[V];
      unpack(load_vec<V>(dy, ((frame * g.H + a) * g.W + b) * g.C + c), from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += from[e];
    }
  if (accumulate) {
    float before[V];
    unpack(load_vec<V>(static_cast<const T*>(dx), i), before);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += before[e];
  }
  store_vec<V>(dx, i, pack<T, V>(sum));
}

// y [frames,H,W,C] of x [frames,h,w,C], C in accesses.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    reflect_kernel(const T* x, ResizeGrid g, Places places, int shift, T* y, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const std::int64_t row = ops::reflected_source(p.row, g.h << shift) >> shift,
                     column = ops::reflected_source(p.column, g.w << shift) >> shift;
  store_vec<V>(y, i, load_vec<V>(x, ((p.frame * g.h + row) * g.w + column) * g.C + p.c));
}

// Calls f.operator()<T, V>() with the widest access that the channels and both tensors allow.
template <class F>
void by_access(const Tensor& x, const Tensor& y, F&& f) {
  by_type(x, [&]<class T>() {
    constexpr int V = 16 / sizeof(T);
    if (x.dim(-1) % V == 0 && aligned<V>(x, y))
      f.template operator()<T, V>();
    else
      f.template operator()<T, 1>();
  });
}

// y (+)= x, of one shape.
void copy(const Tensor& x, Tensor& y, bool accumulate) {
  if (!accumulate) {
    CUDA_CHECK(cudaMemcpyAsync(y.raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice,
                               cuda_stream(Stream::compute)));
    return;
  }
  by_access(x, y, [&]<class T, int V>() {
    launch(copy_kernel<V, T>, dim3(blocks_for(x.numel() / V, threads)), dim3(threads), 0,
           data<T>(x), data<T>(y), x.numel() / V);
  });
}

// The same for the channels [first, first + c) of the wider tensor, and with their place there.
template <class F>
void by_access(const Tensor& x, std::int64_t first, const Tensor& y, F&& f) {
  const NearestGrid g{x.dim(2), x.dim(3), y.dim(2), y.dim(3), x.dim(4), y.dim(4)};
  by_type(x, [&]<class T>() {
    T* const from = data<T>(y) + first;
    constexpr int V = 16 / sizeof(T);
    if (g.c % V == 0 && g.C % V == 0 && first % V == 0 && aligned<V>(x, y))
      f.template operator()<T, V>(NearestGrid{g.h, g.w, g.H, g.W, g.c / V, g.C / V}, from);
    else
      f.template operator()<T, 1>(g, from);
  });
}

// Of `count` accesses of t, C of a pixel.
Places places_of(const Tensor& t, std::int64_t C, std::int64_t count) {
  WEFT_ASSERT(count < std::int64_t{1} << 31);
  return {Divisor(C), Divisor(t.dim(3)), Divisor(t.dim(2))};
}

bool same_size(const Tensor& x, const Tensor& y) {
  return x.dim(2) == y.dim(2) && x.dim(3) == y.dim(3);
}

ResizeGrid grid_of(const Tensor& small, const Tensor& large, int V) {
  return {static_cast<int>(small.dim(2)),
          static_cast<int>(small.dim(3)),
          static_cast<int>(large.dim(2)),
          static_cast<int>(large.dim(3)),
          ops::bilinear_ratio(small.dim(2), large.dim(2)),
          ops::bilinear_ratio(small.dim(3), large.dim(3)),
          small.dim(4) / V};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void bilinear_forward(const Tensor& x, Tensor& y, bool accumulate) {
  if (same_size(x, y)) return copy(x, y, accumulate);
  by_access(x, y, [&]<class T, int V>() {
    const std::int64_t count = y.numel() / V;
    launch(bilinear_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0, data<T>(x),
           grid_of(x, y, V), places_of(y, y.dim(4) / V, count), data<T>(y), count, accumulate);
  });
}

void bilinear_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  if (same_size(dy, dx)) return copy(dy, dx, accumulate);
  by_access(dy, dx, [&]<class T, int V>() {
    const ResizeGrid g = grid_of(dx, dy, V);
    const std::int64_t pieces = (g.C + 31) / 32, pixels = dx.numel() / dx.dim(4);
    launch(bilinear_backward_kernel<V, T>, dim3(static_cast<unsigned>(pixels * pieces)),
           dim3(threads), sizeof(float) * threads * V, data<T>(dy), g, pieces, data<T>(dx),
           accumulate);
  });
}

void nearest_forward(const Tensor& x, std::int64_t first, Tensor& y, bool accumulate) {
  by_access(x, first, y, [&]<class T, int V>(const NearestGrid& g, T* to) {
    const std::int64_t count = y.numel() / y.dim(4) * g.c;
    WEFT_ASSERT(std::max(g.h * g.H, g.w * g.W) < std::int64_t{1} << 31);
    launch(nearest_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0, data<T>(x), g,
           places_of(y, g.c, count), to, count, accumulate);
  });
}

void nearest_backward(const Tensor& dy, std::int64_t first, Tensor& dx, bool accumulate) {
  by_access(dx, first, dy, [&]<class T, int V>(const NearestGrid& g, const T* from) {
    const std::int64_t count = dx.numel() / V;
    launch(nearest_backward_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0, from,
           g, places_of(dx, g.c, count), data<T>(dx), count, accumulate);
  });
}

void reflect_border(const Tensor& x, int up, Tensor& y) {
  WEFT_ASSERT((up == 1 || up == 2) && y.dim(2) == up * x.dim(2) + 2 &&
              y.dim(3) == up * x.dim(3) + 2 && y.dim(2) > 3 && y.dim(3) > 3);
  by_access(x, y, [&]<class T, int V>() {
    const std::int64_t count = y.numel() / V;
    launch(reflect_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0, data<T>(x),
           grid_of(x, y, V), places_of(y, y.dim(4) / V, count), up - 1, data<T>(y), count);
  });
}

}  // namespace weft::ops::cuda
