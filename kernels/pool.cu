// CUDA side of ops/resize.h for windows and rectangles of any size; means of 2x2 pixels are
// resize.cu's. CPU twin: src/ops/cpu/pool.cpp; cases: tests/kernels/pool.cpp.
//
// Bound by memory, every operand read and every result written once; what windows share comes from
// the caches.
//   windows      16 bytes of the result a thread
//   backward     3x3 windows of stride 2, behind the stem of a ResNet: a thread goes down two
//                columns and finds the greatest of each window once, 12 accesses for 4 pixels.
//                Other windows: 16 bytes of dx a thread, which looks through each window that it is
//                in.
//   adaptive     forward: a block has 8 accesses of one rectangle, its threads take the pixels in
//                turn, and their sums are added in order; backward: four times 16 bytes of dx a
//                thread
#include "ops/resize.h"

#include <algorithm>

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// [frames,H,W,C] and, of the pooled side, [frames,h,w,C]; C in accesses.
struct WindowGrid {
  int H, W, h, w;
  std::int64_t C;
  ops::PoolWindow window;
  Divisor stride;
};
// The pixels of window i of an axis.
struct Span {
  int begin, end;
  __device__ __forceinline__ Span(int i, ops::PoolWindow k, int length) {
    const int first = i * k.stride - k.padding;
    begin = max(first, 0);
    end = min(first + k.size, length);
  }
};

// `places` are y's. size: the windows' if they have 2 x 2 or 3 x 3 pixels, whose loads are under
// way together: those beyond the border read the border, which the window has anyway. Else 0.
template <int size, int V, class T>
__global__ void __launch_bounds__(threads)
    window_kernel(const T* x, WindowGrid g, Places places, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const Span rows(static_cast<int>(p.row), g.window, g.H),
      columns(static_cast<int>(p.column), g.window, g.W);
  const std::int64_t frame = static_cast<std::int64_t>(p.frame) * g.H;
  float most[V], v[V];
#pragma unroll
  for (int e = 0; e < V; ++e) most[e] = NAN;  // which any number is greater than
  const auto take = [&](std::int64_t row, int column) {
    unpack(load_vec<V>(x, ((frame + row) * g.W + column) * g.C + p.c), v);
#pragma unroll
    for (int e = 0; e < V; ++e) most[e] = fmaxf(most[e], v[e]);
  };
  if constexpr (size > 0) {
#pragma unroll
    for (int k = 0; k < size * size; ++k)
      take(min(rows.begin + k / size, rows.end - 1),
           min(columns.begin + k % size, columns.end - 1));
  } else {
    for (int r = rows.begin; r < rows.end; ++r)
      for (int q = columns.begin; q < columns.end; ++q) take(r, q);
  }
  store_vec<V>(y, i, pack<T, V>(most));
}

// Windows of any size; `places` are x's.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    window_backward_kernel(const T* x, WindowGrid g, Places places, const T* dy, T* dx,
                           std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const int row = static_cast<int>(p.row), column = static_cast<int>(p.column);
  const std::int64_t frame = p.frame, c = p.c;
  const ops::PoolWindow k = g.window;
  const auto divided = [&](int n) {
    return static_cast<int>(g.stride.divide(static_cast<unsigned>(max(n, 0))));
  };
  // The windows that the pixel is in.
  const int r0 = divided(row + k.padding - k.size + k.stride),
            r1 = min(g.h - 1, divided(row + k.padding)),
            q0 = divided(column + k.padding - k.size + k.stride),
            q1 = min(g.w - 1, divided(column + k.padding));
  float sum[V] = {};
  for (int r = r0; r <= r1; ++r)
    for (int q = q0; q <= q1; ++q) {
      const Span rows(r, k, g.H), columns(q, k, g.W);
      float most[V];
      int mine[V];
#pragma unroll
      for (int e = 0; e < V; ++e)
        most[e] = -INFINITY, mine[e] = row == rows.begin && column == columns.begin ? 1 : 0;
      for (int a = rows.begin; a < rows.end; ++a)
        for (int b = columns.begin; b < columns.end; ++b) {
          float v[V];
          unpack(load_vec<V>(x, ((frame * g.H + a) * g.W + b) * g.C + c), v);
#pragma unroll
          for (int e = 0; e < V; ++e)
            if (v[e] > most[e]) most[e] = v[e], mine[e] = a == row && b == column ? 1 : 0;
        }
      float d[V];
      unpack(load_vec<V>(dy, ((frame * g.h + r) * g.w + q) * g.C + c), d);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += mine[e] ? d[e] : 0.0f;
    }
  store_vec<V>(dx, i, pack<T, V>(sum));
}

// Windows of 3 x 3 pixels, 2 apart, the first one pixel beyond the corner: a row and column of x
// with an even number is in one window, one with an odd number in two. A thread takes the two
// columns 2 b and 2 b + 1 of `steps` pairs of rows and goes down the windows b and b + 1: of each
// it knows the place of the first greatest element, 3 times its row in the window and its column.
// `places`: [frames,chunks of pairs,w,C].
// With 140 registers, smaller blocks fill a multiprocessor better.
constexpr int stem_threads = 128;
template <int V, class T>
__global__ void __launch_bounds__(stem_threads)
    stem_backward_kernel(const T* x, WindowGrid g, Places places, int steps, const T* dy, T* dx,
                         std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * stem_threads + threadIdx.x;
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const int b = static_cast<int>(p.column), first = static_cast<int>(p.row) * steps,
            last = min(first + steps, g.h);
  const T* const from = x + static_cast<std::int64_t>(p.frame) * g.H * g.W * g.C * V;
  T* const to = dx + static_cast<std::int64_t>(p.frame) * g.H * g.W * g.C * V;
  float border[V];
#pragma unroll
  for (int e = 0; e < V; ++e) border[e] = -INFINITY;
  // The first greatest of a row in each of the two windows.
  struct Row {
    float most[2][V];
    int at[2][V];
  };
  const auto read = [&](int row) {
    Vec<T, V> loaded[5];
#pragma unroll
    for (int k = 0; k < 5; ++k) {
      const int column = 2 * b - 1 + k;
      loaded[k] = pack<T, V>(border);
      if (row >= 0 && row < g.H && column >= 0 && column < g.W)
        loaded[k] = load_vec<V>(from, (static_cast<std::int64_t>(row) * g.W + column) * g.C + p.c);
    }
    Row r;
    float v[5][V];
#pragma unroll
    for (int k = 0; k < 5; ++k) unpack(loaded[k], v[k]);
#pragma unroll
    for (int e = 0; e < V; ++e)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        r.most[j][e] = fmaxf(v[2 * j][e], -INFINITY);  // where it is no number
        r.at[j][e] = b + j == 0 ? 1 : 0;
#pragma unroll
        for (int k = 1; k < 3; ++k)
          if (v[2 * j + k][e] > r.most[j][e]) r.most[j][e] = v[2 * j + k][e], r.at[j][e] = k;
      }
    return r;
  };
  Row above = read(2 * first - 1);
  int upper[2][V] = {}, lower[2][V];  // of the windows above and below a pair of rows
  Vec<T, V> upper_d[2], lower_d[2];
  for (int a = first; a <= last; ++a) {
    const Row middle = read(2 * a), below = read(2 * a + 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      lower_d[j] = Vec<T, V>{};
      if (a < g.h && b + j < g.w)
        lower_d[j] = load_vec<V>(
            dy, ((static_cast<std::int64_t>(p.frame) * g.h + a) * g.w + b + j) * g.C + p.c);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        float most = above.most[j][e];
        lower[j][e] = above.at[j][e];
        if (middle.most[j][e] > most || a == 0)
          most = middle.most[j][e], lower[j][e] = 3 + middle.at[j][e];
        if (below.most[j][e] > most) lower[j][e] = 6 + below.at[j][e];
      }
    }
    if (a > first) {
      float d[4][V], sum[4][V];  // of both windows above, then of both below
      unpack(upper_d[0], d[0]);
      unpack(upper_d[1], d[1]);
      unpack(lower_d[0], d[2]);
      unpack(lower_d[1], d[3]);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const auto add = [&](int k, int place, int wanted, float of) {
          if (place == wanted) sum[k][e] += of;
        };
        sum[0][e] = upper[0][e] == 4 ? d[0][e] : 0.0f;
        sum[1][e] = upper[0][e] == 5 ? d[0][e] : 0.0f;
        add(1, upper[1][e], 3, d[1][e]);
        sum[2][e] = upper[0][e] == 7 ? d[0][e] : 0.0f;
        add(2, lower[0][e], 1, d[2][e]);
        sum[3][e] = upper[0][e] == 8 ? d[0][e] : 0.0f;
        add(3, upper[1][e], 6, d[1][e]);
        add(3, lower[0][e], 2, d[2][e]);
        add(3, lower[1][e], 0, d[3][e]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = 2 * (a - 1) + k / 2, column = 2 * b + k % 2;
        if (row < g.H && column < g.W)
          store_vec<V>(to, (static_cast<std::int64_t>(row) * g.W + column) * g.C + p.c,
                       pack<T, V>(sum[k]));
      }
    }
    above = below;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      upper_d[j] = lower_d[j];
#pragma unroll
      for (int e = 0; e < V; ++e) upper[j][e] = lower[j][e];
    }
  }
}

// Pixels [begin, end), as ops::adaptive_range(i, n, L); `by` divides by n.
struct Pixels {
  unsigned begin, end;
  __device__ __forceinline__ Pixels(unsigned i, const Divisor& by, unsigned n, unsigned L)
      : begin(by.divide(i * L)), end(by.divide((i + 1) * L + n - 1)) {}
};

// A block has 8 accesses of each pixel of a rectangle, `lines` pixels at a time.
constexpr int adaptive_width = 8;
template <int V, class T>
__global__ void __launch_bounds__(4 * threads)
    adaptive_kernel(const T* x, WindowGrid g, Places places, T* y) {
  constexpr int width = adaptive_width;
  float* shared = shared_memory<float>();  // [warps,V,width]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block_warps = blockDim.x / 32;
  const Places::Place p = places.of(blockIdx.x);
  const std::int64_t c = p.c * width + threadIdx.x % width;
  const Pixels rows(p.row, places.H, g.h, g.H), columns(p.column, places.W, g.w, g.W);
  const unsigned across = columns.end - columns.begin, area = (rows.end - rows.begin) * across;
  const unsigned lines = blockDim.x / width, line = threadIdx.x / width;
  // The pixel that is `lines` further is `down` rows and `right` columns away.
  const unsigned down = lines / across, right = lines - down * across;
  unsigned row = line / across, column = line - row * across;
  const T* const corner =
      x +
      (((static_cast<std::int64_t>(p.frame) * g.H + rows.begin) * g.W + columns.begin) * g.C + c) *
          V;
  float sum[V] = {};
  if (c < g.C)
#pragma unroll 4
    for (unsigned k = line; k < area; k += lines) {
      float from[V];
      unpack(load_vec<V>(corner, (static_cast<std::int64_t>(row) * g.W + column) * g.C), from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += from[e];
      row += down;
      column += right;
      if (column >= across) column -= across, ++row;
    }
#pragma unroll
  for (int e = 0; e < V; ++e) {
#pragma unroll
    for (int offset = 16; offset >= width; offset /= 2)
      sum[e] += __shfl_xor_sync(full_mask, sum[e], offset);
    if (lane < width) shared[(warp * V + e) * width + lane] = sum[e];
  }
  __syncthreads();
  if (warp > 0 || lane >= width || c >= g.C) return;
  for (int k = 1; k < block_warps; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += shared[(k * V + e) * width + lane];
  const float share = 1.0f / static_cast<float>(area);
#pragma unroll
  for (int e = 0; e < V; ++e) sum[e] *= share;
  const std::int64_t pixel = (static_cast<std::int64_t>(p.frame) * g.h + p.row) * g.w + p.column;
  store_vec<V>(y, pixel * g.C + c, pack<T, V>(sum));
}

// `places` are dx's, `h` and `w` divide by dy's rows and columns. A thread has `each` accesses of a
// pixel: finding out the pixel's rectangles takes longer than moving 16 bytes.
template <int V, int each, class T>
__global__ void __launch_bounds__(threads)
    adaptive_backward_kernel(const T* dy, WindowGrid g, Places places, Divisor h, Divisor w, T* dx,
                             bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Places::Place p = places.of(i);
  const std::int64_t apart = g.C / each;
  const std::int64_t at =
      ((static_cast<std::int64_t>(p.frame) * g.H + p.row) * g.W + p.column) * g.C + p.c;
  const Pixels rows(p.row, places.H, g.H, g.h), columns(p.column, places.W, g.W, g.w);
  float sum[each][V] = {};
  if (accumulate)
#pragma unroll
    for (int j = 0; j < each; ++j)
      unpack(load_vec<V>(static_cast<const T*>(dx), at + j * apart), sum[j]);
#pragma unroll 1
  for (unsigned r = rows.begin; r < rows.end; ++r) {
    const Pixels down(r, h, g.h, g.H);
#pragma unroll 1
    for (unsigned q = columns.begin; q < columns.end; ++q) {
      const Pixels across(q, w, g.w, g.W);
      const float share =
          1.0f / static_cast<float>((down.end - down.begin) * (across.end - across.begin));
      const std::int64_t from =
          ((static_cast<std::int64_t>(p.frame) * g.h + r) * g.w + q) * g.C + p.c;
#pragma unroll
      for (int j = 0; j < each; ++j) {
        float d[V];
        unpack(load_vec<V>(dy, from + j * apart), d);
#pragma unroll
        for (int e = 0; e < V; ++e) sum[j][e] += share * d[e];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < each; ++j) store_vec<V>(dx, at + j * apart, pack<T, V>(sum[j]));
}

// `x` the side before the pooling, `y` behind it.
WindowGrid window_grid(const Tensor& x, const Tensor& y, int V,
                       ops::PoolWindow window = {1, 1, 0}) {
  return {static_cast<int>(x.dim(2)),
          static_cast<int>(x.dim(3)),
          static_cast<int>(y.dim(2)),
          static_cast<int>(y.dim(3)),
          x.dim(4) / V,
          window,
          Divisor(window.stride)};
}
// The places of [frames,rows,columns] pixels of C accesses.
Places places_of(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t C) {
  WEFT_ASSERT(frames * rows * columns * C < std::int64_t{1} << 31);
  return {Divisor(C), Divisor(columns), Divisor(rows)};
}
Places places_of(const Tensor& t, int V) {
  return places_of(t.dim(0) * t.dim(1), t.dim(2), t.dim(3), t.dim(4) / V);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void max_pool_window_forward(const Tensor& x, PoolWindow window, Tensor& y) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        launch_items(window.size == 3   ? window_kernel<3, V, T>
                     : window.size == 2 ? window_kernel<2, V, T>
                                        : window_kernel<0, V, T>,
                     y.numel() / V, data<T>(x), window_grid(x, y, V, window), places_of(y, V),
                     data<T>(y));
      },
      x, y);
}

void max_pool_window_backward(const Tensor& x, PoolWindow window, const Tensor& dy, Tensor& dx) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const WindowGrid g = window_grid(x, dy, V, window);
        if (window.size != 3 || window.stride != 2 || window.padding != 1) {
          launch_items(window_backward_kernel<V, T>, dx.numel() / V, data<T>(x), g,
                       places_of(dx, V), data<T>(dy), data<T>(dx));
          return;
        }
        constexpr int steps = 8;
        const std::int64_t frames = x.dim(0) * x.dim(1), chunks = (g.h + steps - 1) / steps;
        const std::int64_t count = frames * chunks * g.w * g.C;
        launch(stem_backward_kernel<V, T>, dim3(blocks_for(count, stem_threads)),
               dim3(stem_threads), 0, data<T>(x), g, places_of(frames, chunks, g.w, g.C), steps,
               data<T>(dy), data<T>(dx), count);
      },
      x, dy, dx);
}

// An odd row or column lies in no window.
constexpr PoolWindow rectangle{2, 2, 0};
void max_pool_forward(const Tensor& x, Tensor& y) {
  if (y.numel() > 0) max_pool_window_forward(x, rectangle, y);
}
void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  if (dy.numel() > 0)
    max_pool_window_backward(x, rectangle, dy, dx);
  else if (dx.numel() > 0)
    device_runtime().zero(dx.raw(), dx.bytes(), Stream::compute);
}

void adaptive_pool_forward(const Tensor& x, Tensor& y) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const WindowGrid g = window_grid(x, y, V);
        const std::int64_t pieces = blocks_for(g.C, adaptive_width), frames = y.dim(0) * y.dim(1);
        // Few large rectangles need more threads each.
        const int block = g.H / g.h * (g.W / g.w) < 512 ? threads : 4 * threads;
        launch(adaptive_kernel<V, T>, dim3(static_cast<unsigned>(frames * g.h * g.w * pieces)),
               dim3(block), sizeof(float) * block / 32 * adaptive_width * V, data<T>(x), g,
               places_of(frames, g.h, g.w, pieces), data<T>(y));
      },
      x, y);
}

void adaptive_pool_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  by_access(
      dy.dim(-1),
      [&]<class T, int V>() {
        const WindowGrid g = window_grid(dx, dy, V);
        WEFT_ASSERT(std::max(g.H, g.W) * (std::max(g.h, g.w) + std::int64_t{1}) < std::int64_t{1}
                                                                                      << 31);
        const int each = g.C % 4 == 0 ? 4 : 1;
        launch_items(
            each > 1 ? adaptive_backward_kernel<V, 4, T> : adaptive_backward_kernel<V, 1, T>,
            dx.numel() / V / each, data<T>(dy), g, places_of(dx, V * each), Divisor(g.h),
            Divisor(g.w), data<T>(dx), accumulate);
      },
      dy, dx);
}

}  // namespace weft::ops::cuda
