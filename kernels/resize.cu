// CUDA side of ops/resize.h. CPU twin: src/ops/cpu/resize.cpp; cases: tests/kernels/resize.cpp.
//
// Bound by memory: each side's elements once, the four of the smaller side from the caches.
// 16 bytes of a pixel of the result a thread, or where many are gathered for one a block.
//
// Nearest and reflected borders: 16 bytes of the channels that are moved a thread; backward, of a
// pixel of the gradient, which adds the result's pixels row by row.
#include "ops/resize.h"

#include <algorithm>
#include <numeric>

#include "divide.cuh"
#include "ops/pointwise.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// [frames,h,w,C] and, of the result, [frames,H,W,C]; C in accesses.
struct ResizeGrid {
  int h, w, H, W;
  float down, across;  // h / H, w / W
  float up, along;     // H / h, W / w
  std::int64_t C;
};

// A thread has `each` accesses of a pixel: finding its neighbours takes as long as two of them.
template <int V, int each, bool accumulate, class T>
__global__ void __launch_bounds__(threads)
    bilinear_kernel(const T* x, ResizeGrid g, Places places, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place to_place = places.of(i);
  const std::int64_t frame = static_cast<std::int64_t>(to_place.frame) * g.h, apart = g.C / each;
  const ops::BilinearTap row = ops::bilinear_tap(static_cast<int>(to_place.row), g.down, g.h),
                         column =
                             ops::bilinear_tap(static_cast<int>(to_place.column), g.across, g.w);
  const std::int64_t upper = (frame + row.first) * g.w, lower = (frame + row.second) * g.w;
  const std::int64_t at[4] = {upper + column.first, upper + column.second, lower + column.first,
                              lower + column.second};
  const float share[4] = {(1.0f - row.share) * (1.0f - column.share),
                          (1.0f - row.share) * column.share, row.share * (1.0f - column.share),
                          row.share * column.share};
  Vec<T, V> from[each][4];
#pragma unroll
  for (int a = 0; a < each; ++a)
#pragma unroll
    for (int k = 0; k < 4; ++k) from[a][k] = load_vec<V>(x, at[k] * g.C + to_place.c + a * apart);
  // Threads are numbered like accesses but for those of a pixel.
  const std::int64_t first = (i - to_place.c) * each + to_place.c;
#pragma unroll
  for (int a = 0; a < each; ++a) {
    float v[4][V], to[V];
#pragma unroll
    for (int k = 0; k < 4; ++k) unpack(from[a][k], v[k]);
    if (accumulate) unpack(load_vec<V>(static_cast<const T*>(y), first + a * apart), to);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float value =
          share[0] * v[0][e] + share[1] * v[1][e] + share[2] * v[2][e] + share[3] * v[3][e];
      to[e] = accumulate ? to[e] + value : value;
    }
    store_vec<V>(y, first + a * apart, pack<T, V>(to));
  }
}

// The outputs, `apart` to a pixel, that may have a share of pixel `i`: those that lie less than a
// pixel from it. The margin is for rounding; what it lets in has share 0.
struct Range {
  int begin, end;
  __device__ __forceinline__ Range(int i, float apart, int in, int out) {
    constexpr float margin = 0.0625f;
    const float low = (static_cast<float>(i) - 0.5f) * apart - (0.5f + margin);
    const float high = (static_cast<float>(i) + 1.5f) * apart - (0.5f - margin);
    // The first pixel has all outputs in front of it, the last one all behind it.
    begin = i == 0 || low < 0.0f ? 0 : min(static_cast<int>(low) + 1, out);
    end = i < in - 1 && high < static_cast<float>(out) ? static_cast<int>(high) + 1 : out;
  }
  __device__ __forceinline__ int size() const { return end - begin; }
};
__device__ __forceinline__ float share_of(int output, float ratio, int in, int from) {
  const ops::BilinearTap t = ops::bilinear_tap(output, ratio, in);
  return (t.first == from ? 1.0f - t.share : 0.0f) + (t.second == from ? t.share : 0.0f);
}

// Where few outputs have a share of a pixel, as when maps are doubled: a thread has `each` accesses
// of a pixel of dx, a block a piece of a row, of which C / each are a pixel. The shares of the
// row's outputs, `down` at most, and of each pixel's, `most` at most, are found once a block.
constexpr int together = 4;  // outputs whose loads are under way
template <int V, int each, class T>
__global__ void __launch_bounds__(threads)
    bilinear_near_backward_kernel(const T* dy, ResizeGrid g, Divisor lanes, Divisor h,
                                  Divisor pieces, int down, Divisor across, int most, T* dx,
                                  bool accumulate) {
  float* const rows = shared_memory<float>();  // [down]
  float* const columns = rows + down;          // [pixels,most]
  unsigned piece = blockIdx.x, row = pieces.split(piece);
  const std::int64_t frame = h.split(row);
  const int i = static_cast<int>(row);
  const unsigned first = piece * threads;
  const int left = static_cast<int>(lanes.divide(first)),
            pixels = min(static_cast<int>(lanes.divide(first + threads - 1)) + 1, g.w) - left;
  const Range vertical(i, g.up, g.h, g.H);
  if (threadIdx.x < vertical.size())
    rows[threadIdx.x] = share_of(vertical.begin + static_cast<int>(threadIdx.x), g.down, g.h, i);
#pragma unroll 1
  for (int k = threadIdx.x; k < pixels * most; k += threads) {
    unsigned tap = k;
    const int j = left + static_cast<int>(across.split(tap));
    const Range horizontal(j, g.along, g.w, g.W);
    columns[k] = share_of(horizontal.begin + static_cast<int>(tap), g.across, g.w, j);
  }
  __syncthreads();
  unsigned c = first + threadIdx.x;
  const int j = static_cast<int>(lanes.split(c));
  if (j >= g.w) return;
  const Range horizontal(j, g.along, g.w, g.W);
  const float* const own = columns + (j - left) * most;
  const std::int64_t apart = g.C / each;
  const T* from = dy + (((frame * g.H + vertical.begin) * g.W + horizontal.begin) * g.C + c) * V;
  const int width = horizontal.size();
  float sum[each][V] = {};
#pragma unroll 1
  for (int r = 0; r < vertical.size(); ++r, from += g.W * g.C * V)
#pragma unroll 1
    for (int q = 0; q < width; q += together) {
      Vec<T, V> loaded[together][each];
#pragma unroll
      for (int k = 0; k < together; ++k)
#pragma unroll
        for (int a = 0; a < each; ++a) {
          loaded[k][a] = Vec<T, V>{};
          if (q + k < width) loaded[k][a] = load_vec<V>(from, (q + k) * g.C + a * apart);
        }
#pragma unroll
      for (int k = 0; k < together; ++k) {
        const float share = rows[r] * own[min(q + k, width - 1)];
#pragma unroll
        for (int a = 0; a < each; ++a) {
          float v[V];
          unpack(loaded[k][a], v);
#pragma unroll
          for (int e = 0; e < V; ++e) sum[a][e] += share * v[e];
        }
      }
    }
#pragma unroll
  for (int a = 0; a < each; ++a) {
    const std::int64_t at = ((frame * g.h + i) * g.w + j) * g.C + c + a * apart;
    if (accumulate) {
      float before[V];
      unpack(load_vec<V>(static_cast<const T*>(dx), at), before);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[a][e] += before[e];
    }
    store_vec<V>(dx, at, pack<T, V>(sum[a]));
  }
}

// A way through a rectangle of outputs, row by row from its upper left corner: every `step`-th one.
struct Walk {
  unsigned width, row, column;
  unsigned rows_on, columns_on;  // `step` as whole rows and the rest

  __device__ __forceinline__ Walk(unsigned of_width, unsigned first, unsigned step)
      : width(of_width),
        row(first / width),
        column(first % width),
        rows_on(step / width),
        columns_on(step % width) {}
  __device__ __forceinline__ void go_on() {
    row += rows_on;
    column += columns_on;
    if (column >= width) {
      column -= width;
      ++row;
    }
  }
};

// Where many have: a block has 8 lanes of one pixel of dx, each with `each` accesses; its threads
// take the outputs in turn, and their sums are added in order. `places`: [frames,h,w,pieces].
constexpr int far_width = 8;
template <int V, int each, class T>
__global__ void __launch_bounds__(4 * threads)
    bilinear_far_backward_kernel(const T* dy, ResizeGrid g, Places places, T* dx, bool accumulate) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block_warps = blockDim.x / 32;
  const Places::Place pixel = places.of(blockIdx.x);
  const int i = static_cast<int>(pixel.row), j = static_cast<int>(pixel.column);
  const std::int64_t frame = pixel.frame;
  // The first of the lane's accesses, which lie `apart`; lanes beyond the pixel have none.
  const std::int64_t c = pixel.c * far_width + threadIdx.x % far_width, apart = g.C / each;

  // In shared memory: sums [warps,each,V,lanes], then the shares of the rows and of the columns.
  float* const sums = shared_memory<float>();
  const auto sum_at = [=](int w, int a, int e) -> float& {
    return sums[((w * each + a) * V + e) * far_width + lane];
  };
  const Range down(i, g.up, g.h, g.H), across(j, g.along, g.w, g.W);
  float* const row_shares = sums + block_warps * each * V * far_width;
  float* const column_shares = row_shares + down.size();
  for (int k = threadIdx.x; k < down.size() + across.size(); k += blockDim.x)
    row_shares[k] = k < down.size() ? share_of(down.begin + k, g.down, g.h, i)
                                    : share_of(across.begin + k - down.size(), g.across, g.w, j);
  __syncthreads();

  float sum[each][V] = {};
  if (c < apart && across.size() > 0) {
    const T* const corner = dy + (((frame * g.H + down.begin) * g.W + across.begin) * g.C + c) * V;
    const unsigned channels = static_cast<unsigned>(g.C), outputs = down.size() * across.size();
    const unsigned first = threadIdx.x / far_width, step = blockDim.x / far_width;
    Walk at(across.size(), first, step);
    // Counted, so that the loads of two turns are under way together.
#pragma unroll 2
    for (unsigned k = first; k < outputs; k += step) {
      const float share = row_shares[at.row] * column_shares[at.column];
      const std::int64_t output = std::uint64_t{at.row * g.W + at.column} * channels;
#pragma unroll
      for (int a = 0; a < each; ++a) {
        float v[V];
        unpack(load_vec<V>(corner, output + a * apart), v);
#pragma unroll
        for (int e = 0; e < V; ++e) sum[a][e] += share * v[e];
      }
      at.go_on();
    }
  }
  // Over the warp's threads of the same lane, then over the warps: a warp for each access.
#pragma unroll
  for (int a = 0; a < each; ++a)
#pragma unroll
    for (int e = 0; e < V; ++e) {
#pragma unroll
      for (int offset = 16; offset >= far_width; offset /= 2)
        sum[a][e] += __shfl_xor_sync(full_mask, sum[a][e], offset);
      if (lane < far_width) sum_at(warp, a, e) = sum[a][e];
    }
  __syncthreads();
  if (warp >= each || lane >= far_width || c >= apart) return;
  float to[V] = {};
  for (int w = 0; w < block_warps; ++w)
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] += sum_at(w, warp, e);
  const std::int64_t own = ((frame * g.h + i) * g.w + j) * g.C + c + warp * apart;
  if (accumulate) {
    float before[V];
    unpack(load_vec<V>(static_cast<const T*>(dx), own), before);
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] += before[e];
  }
  store_vec<V>(dx, own, pack<T, V>(to));
}

// x [frames,h,w,c] and y [frames,H,W,C], in accesses; y starts at the first channel that is meant.
struct NearestGrid {
  std::int64_t h, w, H, W, c, C;
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    nearest_kernel(const T* x, NearestGrid g, Places places, T* y, std::int64_t count,
                   bool accumulate) {
  const std::int64_t i = thread_index();
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
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place p = places.of(i);
  // ops::nearest_first() of both axes.
  const auto first = [](unsigned k, std::int64_t in, std::int64_t out, const Divisor& by) {
    return by.divide(k * static_cast<unsigned>(out) + static_cast<unsigned>(in) - 1);
  };
  const unsigned top = first(p.row, g.h, g.H, places.H),
                 bottom = first(p.row + 1, g.h, g.H, places.H),
                 left = first(p.column, g.w, g.W, places.W),
                 width = first(p.column + 1, g.w, g.W, places.W) - left;
  const std::int64_t corner = (static_cast<std::int64_t>(p.frame) * g.H * g.W + left) * g.C + p.c;
  float sum[V] = {};
#pragma unroll 1
  for (unsigned a = top; a < bottom; ++a) {
    const std::int64_t row = corner + a * g.W * g.C;
#pragma unroll 4
    for (unsigned b = 0; b < width; ++b) {
      float from[V];
      unpack(load_vec<V>(dy, row + b * g.C), from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += from[e];
    }
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
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const std::int64_t row = ops::reflected_source(p.row, g.h << shift) >> shift,
                     column = ops::reflected_source(p.column, g.w << shift) >> shift;
  store_vec<V>(y, i, load_vec<V>(x, ((p.frame * g.h + row) * g.w + column) * g.C + p.c));
}

NearestGrid nearest_grid(const Tensor& x, const Tensor& y, int V) {
  return {x.dim(2), x.dim(3), y.dim(2), y.dim(3), x.dim(4) / V, y.dim(4) / V};
}

// The places of `count` accesses of t, C of a pixel.
Places places_of(const Tensor& t, std::int64_t C, std::int64_t count) {
  WEFT_ASSERT(count < std::int64_t{1} << 31);
  return {Divisor(C), Divisor(t.dim(3)), Divisor(t.dim(2))};
}

bool same_size(const Tensor& x, const Tensor& y) {
  return x.dim(2) == y.dim(2) && x.dim(3) == y.dim(3);
}

// No pixel of an axis of `in` has more outputs than these: they lie within two pixels, and a
// Range's margins.
int most_outputs(int in, int out) {
  return std::min(out, (static_cast<int>(std::int64_t{16} * out / in) + 2) / 8 + 1);
}

ResizeGrid resize_grid(const Tensor& small, const Tensor& large, int V) {
  return {static_cast<int>(small.dim(2)),
          static_cast<int>(small.dim(3)),
          static_cast<int>(large.dim(2)),
          static_cast<int>(large.dim(3)),
          ops::bilinear_ratio(small.dim(2), large.dim(2)),
          ops::bilinear_ratio(small.dim(3), large.dim(3)),
          ops::bilinear_ratio(large.dim(2), small.dim(2)),
          ops::bilinear_ratio(large.dim(3), small.dim(3)),
          small.dim(4) / V};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void bilinear_forward(const Tensor& x, Tensor& y, bool accumulate) {
  if (same_size(x, y)) return accumulate ? add_inplace(x, y) : convert(x, y);
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const std::int64_t C = y.dim(4) / V, each = C % 2 == 0 ? 2 : 1,
                           count = y.numel() / V / each;
        const auto kernel =
            each > 1
                ? (accumulate ? bilinear_kernel<V, 2, true, T> : bilinear_kernel<V, 2, false, T>)
                : (accumulate ? bilinear_kernel<V, 1, true, T> : bilinear_kernel<V, 1, false, T>);
        launch_items(kernel, count, data<T>(x), resize_grid(x, y, V), places_of(y, C / each, count),
                     data<T>(y));
      },
      x, y);
}

void bilinear_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  if (same_size(dy, dx)) return accumulate ? add_inplace(dy, dx) : convert(dy, dx);
  by_access(
      dy.dim(-1),
      [&]<class T, int V>() {
        const ResizeGrid g = resize_grid(dx, dy, V);
        const std::int64_t frames = dx.dim(0) * dx.dim(1);
        WEFT_ASSERT(std::max(g.H, g.W) < 1 << 16);  // a Range's margin
        const int down = most_outputs(g.h, g.H), across = most_outputs(g.w, g.W);
        const int each = g.C % 2 == 0 ? 2 : 1;
        const std::int64_t lanes = g.C / each;
        if (down * across <= 64) {
          const std::int64_t pieces = blocks_for(g.w * lanes, threads),
                             pixels = (threads - 1) / lanes + 2;
          launch(each > 1 ? bilinear_near_backward_kernel<V, 2, T>
                          : bilinear_near_backward_kernel<V, 1, T>,
                 dim3(static_cast<unsigned>(frames * g.h * pieces)), dim3(threads),
                 sizeof(float) * static_cast<std::size_t>(down + pixels * across), data<T>(dy), g,
                 Divisor(lanes), Divisor(g.h), Divisor(pieces), down, Divisor(across), across,
                 data<T>(dx), accumulate);
          return;
        }
        // Few pixels with many outputs need more threads each.
        const int block = down * across < 2048 ? threads / 2 : 4 * threads;
        const std::int64_t pieces = blocks_for(lanes, far_width),
                           count = frames * g.h * g.w * pieces;
        WEFT_ASSERT(count < std::int64_t{1} << 31 && std::int64_t{g.H} * g.W < std::int64_t{1}
                                                                                   << 31);
        launch(each > 1 ? bilinear_far_backward_kernel<V, 2, T>
                        : bilinear_far_backward_kernel<V, 1, T>,
               dim3(static_cast<unsigned>(count)), dim3(block),
               sizeof(float) *
                   static_cast<std::size_t>(block / 32 * each * V * far_width + down + across),
               data<T>(dy), g, Places{Divisor(pieces), Divisor(g.w), Divisor(g.h)}, data<T>(dx),
               accumulate);
      },
      dy, dx);
}

// To half the size each pixel is the mean of four, exactly.
void average_pool_2x2_forward(const Tensor& x, Tensor& y) {
  WEFT_ASSERT(x.numel() == 4 * y.numel() && x.dim(2) == 2 * y.dim(2));
  if (y.numel() > 0) bilinear_forward(x, y, false);
}
void average_pool_2x2_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  WEFT_ASSERT(dx.numel() == 4 * dy.numel() && dx.dim(2) == 2 * dy.dim(2));
  if (dy.numel() > 0) bilinear_backward(dy, dx, accumulate);
}

void nearest_forward(const Tensor& x, std::int64_t first, Tensor& y, bool accumulate) {
  by_access(
      std::gcd(std::gcd(x.dim(4), y.dim(4)), first),
      [&]<class T, int V>() {
        const NearestGrid g = nearest_grid(x, y, V);
        const std::int64_t count = y.numel() / y.dim(4) * g.c;
        WEFT_ASSERT(std::max(g.h * g.H, g.w * g.W) < std::int64_t{1} << 31);
        launch_threads(nearest_kernel<V, T>, count, data<T>(x), g, places_of(y, g.c, count),
                       data<T>(y) + first, count, accumulate);
      },
      x, y);
}

void nearest_backward(const Tensor& dy, std::int64_t first, Tensor& dx, bool accumulate) {
  by_access(
      std::gcd(std::gcd(dx.dim(4), dy.dim(4)), first),
      [&]<class T, int V>() {
        const NearestGrid g = nearest_grid(dx, dy, V);
        const std::int64_t count = dx.numel() / V;
        WEFT_ASSERT(std::max((g.h + 1) * (g.H + 1), (g.w + 1) * (g.W + 1)) < std::int64_t{1} << 31);
        launch_threads(nearest_backward_kernel<V, T>, count, data<T>(dy) + first, g,
                       places_of(dx, g.c, count), data<T>(dx), count, accumulate);
      },
      dx, dy);
}

void reflect_border(const Tensor& x, int up, Tensor& y) {
  WEFT_ASSERT((up == 1 || up == 2) && y.dim(2) == up * x.dim(2) + 2 &&
              y.dim(3) == up * x.dim(3) + 2 && y.dim(2) > 3 && y.dim(3) > 3);
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const std::int64_t count = y.numel() / V;
        launch_items(reflect_kernel<V, T>, count, data<T>(x), resize_grid(x, y, V),
                     places_of(y, y.dim(4) / V, count), up - 1, data<T>(y));
      },
      x, y);
}

}  // namespace weft::ops::cuda
