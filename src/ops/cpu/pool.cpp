// CPU side of ops/resize.h.
#include "ops/resize.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"
}  // namespace

void max_pool_forward(const Tensor& x, Tensor& y) {
  const std::int64_t W_in = x.dim(3), h = y.dim(2), w = y.dim(3), C = y.dim(4);
  const std::int64_t rows = y.dim(0) * y.dim(1) * h;
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto* top = in + (r / h * x.dim(2) + 2 * (r % h)) * W_in * C;
      for (std::int64_t i = 0; i < w; ++i) {
        const auto *a = top + 2 * i * C, *b = a + W_in * C;
        for_vectors(C, [&](std::int64_t c, int n) {
          const vf p = load_n(a + c, n), q = load_n(a + C + c, n);
          const vf s = load_n(b + c, n), t = load_n(b + C + c, n);
          const vf upper = p > q ? p : q, lower = s > t ? s : t;
          store_n(out + (r * w + i) * C + c, upper > lower ? upper : lower, n);
        });
      }
    }
  });
}

void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  const std::int64_t H = x.dim(2), W_in = x.dim(3), h = dy.dim(2), w = dy.dim(3), C = dy.dim(4);
  const std::int64_t frames = x.dim(0) * x.dim(1);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = x.data<T>(), *from = dy.data<T>();
    T* to = dx.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t f = 0; f < frames; ++f) {
      std::fill_n(to + f * H * W_in * C, H * W_in * C, T(0.0f));
      for (std::int64_t i = 0; i < h * w; ++i) {
        const std::int64_t corner = ((f * H + i / w * 2) * W_in + i % w * 2) * C;
        const std::int64_t at[4] = {corner, corner + C, corner + W_in * C, corner + (W_in + 1) * C};
        for (std::int64_t c = 0; c < C; ++c) {
          int best = 0;
          for (int k = 1; k < 4; ++k)
            // Strictly greater: of equal values the first gets the gradient.
            if (static_cast<float>(in[at[k] + c]) > static_cast<float>(in[at[best] + c])) best = k;
          to[at[best] + c] = from[(f * h * w + i) * C + c];
        }
      }
    }
  });
}

void average_pool_2x2_forward(const Tensor& x, Tensor& y) {
  const std::int64_t w = y.dim(3), C = y.dim(4), rows = y.dim(0) * y.dim(1) * y.dim(2);
  WEFT_ASSERT(x.dim(2) == 2 * y.dim(2) && x.dim(3) == 2 * w && x.numel() == 4 * y.numel());
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < w; ++i) {
        const auto *a = in + (4 * r * w + 2 * i) * C, *b = a + 2 * w * C;
        for_vectors(C, [&](std::int64_t c, int n) {
          const vf sum =
              (load_n(a + c, n) + load_n(a + C + c, n)) + (load_n(b + c, n) + load_n(b + C + c, n));
          store_n(out + (r * w + i) * C + c, 0.25f * sum, n);
        });
      }
  });
}

void average_pool_2x2_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  const std::int64_t w = dy.dim(3), C = dy.dim(4), rows = dy.dim(0) * dy.dim(1) * dy.dim(2);
  WEFT_ASSERT(dx.dim(2) == 2 * dy.dim(2) && dx.dim(3) == 2 * w && dx.numel() == 4 * dy.numel());
  with_type(dx.dtype(), [&](auto type) {
    const auto* in = dy.data<decltype(type)>();
    auto* out = dx.data<decltype(type)>();
#pragma omp parallel for schedule(static) if (dx.numel() > 16384)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < w; ++i) {
        auto *a = out + (4 * r * w + 2 * i) * C, *b = a + 2 * w * C;
        for_vectors(C, [&](std::int64_t c, int n) {
          const vf d = 0.25f * load_n(in + (r * w + i) * C + c, n);
          for (auto* to : {a + c, a + C + c, b + c, b + C + c})
            store_n(to, accumulate ? load_n(to, n) + d : d, n);
        });
      }
  });
}

void max_pool_window_forward(const Tensor& x, PoolWindow k, Tensor& y) {
  const std::int64_t H = x.dim(2), W_in = x.dim(3), h = y.dim(2), w = y.dim(3), C = y.dim(4);
  WEFT_ASSERT(h == k.count(H) && w == k.count(W_in) && k.padding < k.size);
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < y.dim(0) * y.dim(1) * h; ++r) {
      const auto* frame = in + r / h * H * W_in * C;
      const std::int64_t top = r % h * k.stride - k.padding;
      for (std::int64_t i = 0; i < w; ++i) {
        const std::int64_t left = i * k.stride - k.padding;
        const std::int64_t r0 = std::max<std::int64_t>(top, 0), r1 = std::min(top + k.size, H),
                           c0 = std::max<std::int64_t>(left, 0), c1 = std::min(left + k.size, W_in);
        for_vectors(C, [&](std::int64_t c, int n) {
          vf most = load_n(frame + (r0 * W_in + c0) * C + c, n);
          for (std::int64_t row = r0; row < r1; ++row)
            for (std::int64_t column = c0; column < c1; ++column)
              most = vmax(load_n(frame + (row * W_in + column) * C + c, n), most);
          store_n(out + (r * w + i) * C + c, most, n);
        });
      }
    }
  });
}

// A task has a band of a frame's rows and 64 of its channels, and goes down the
// squares that touch it row by row. Rows of dx that no later square touches are written; the `size`
// rows under way are sums in a ring.
void max_pool_window_backward(const Tensor& x, PoolWindow k, const Tensor& dy, Tensor& dx) {
  const std::int64_t H = x.dim(2), W_in = x.dim(3), h = dy.dim(2), w = dy.dim(3), C = dy.dim(4);
  WEFT_ASSERT(h == k.count(H) && w == k.count(W_in) && k.padding < k.size);
  constexpr std::int64_t piece = 64, band = 64;
  const std::int64_t pieces = (C + piece - 1) / piece, bands = (H + band - 1) / band;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = x.data<T>(), *from = dy.data<T>();
    T* to = dx.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t task = 0; task < x.dim(0) * x.dim(1) * bands * pieces; ++task) {
      const std::int64_t f = task / pieces / bands, c = task % pieces * piece;
      const std::int64_t first = task / pieces % bands * band, last = std::min(first + band, H);
      const std::int64_t n = std::min(piece, C - c);
      struct Ring;
      float* ring = scratch<Ring>(static_cast<std::size_t>(k.size * W_in * piece));
      std::fill_n(ring, k.size * W_in * piece, 0.0f);
      const auto sums = [&](std::int64_t row) { return ring + row % k.size * W_in * piece; };
      std::int64_t written = first;
      const auto write_until = [&](std::int64_t end) {
        for (; written < end; ++written) {
          float* row = sums(written);
          for (std::int64_t j = 0; j < W_in; ++j, row += piece)
            for_vectors(n, [&](std::int64_t i, int lanes) {
              store_n(to + ((f * H + written) * W_in + j) * C + c + i, load(row + i), lanes);
              store(row + i, vf{});
            });
        }
      };
      const std::int64_t begin =
          std::max<std::int64_t>(0, (first + k.padding - k.size + k.stride) / k.stride);
      const std::int64_t end = std::min(h, (last - 1 + k.padding) / k.stride + 1);
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t top = r * k.stride - k.padding;
        const std::int64_t r0 = std::max<std::int64_t>(top, 0), r1 = std::min(top + k.size, H);
        write_until(std::min(r0, last));
        for (std::int64_t i = 0; i < w; ++i) {
          const std::int64_t left = i * k.stride - k.padding;
          const std::int64_t c0 = std::max<std::int64_t>(left, 0),
                             c1 = std::min(left + k.size, W_in);
          for_vectors(n, [&](std::int64_t at, int lanes) {
            vf most = splat(-INFINITY);
            vi best{};
            int place = 0;
            for (std::int64_t row = r0; row < r1; ++row)
              for (std::int64_t j = c0; j < c1; ++j, ++place) {
                const vf v = load_n(in + ((f * H + row) * W_in + j) * C + c + at, lanes);
                // Strictly greater: of equal values the first gets the gradient.
                best = v > most ? vi{} + place : best;
                most = vmax(v, most);
              }
            const vf d = load_n(from + ((f * h + r) * w + i) * C + c + at, lanes);
            for (std::int64_t row = std::max(r0, first); row < std::min(r1, last); ++row)
              for (std::int64_t j = c0; j < c1; ++j) {
                const int here = static_cast<int>((row - r0) * (c1 - c0) + j - c0);
                float* sum = sums(row) + j * piece + at;
                store(sum, load(sum) + (best == here ? d : vf{}));
              }
          });
        }
      }
      write_until(last);
    }
  });
}

namespace {

// to [n] (+)= factor * the sum of the vectors at from + (r * width + j) * C over the rectangle, row
// by row.
template <int count, class T>
void add_rectangle(const T* from, std::int64_t width, std::int64_t C, PoolRange rows,
                   PoolRange columns, float factor, T* to, int n) {
  vf sum[count] = {};
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    vf part[count] = {};
    for (std::int64_t j = columns.begin; j < columns.end; ++j)
      for (int v = 0; v < count; ++v) part[v] += load_n(from + (r * width + j) * C + v * W, n);
    for (int v = 0; v < count; ++v) sum[v] += part[v];
  }
  for (int v = 0; v < count; ++v) store_n(to + v * W, factor * sum[v], n);
}

}  // namespace

void adaptive_pool_forward(const Tensor& x, Tensor& y) {
  const std::int64_t H = x.dim(2), W_in = x.dim(3), h = y.dim(2), w = y.dim(3), C = y.dim(4);
  // Pieces of the channels, too: one rectangle of thousands of channels is common.
  constexpr int vectors = 4, piece = vectors * W;
  const std::int64_t pieces = (C + piece - 1) / piece;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t task = 0; task < y.dim(0) * y.dim(1) * h * w * pieces; ++task) {
      const std::int64_t first = task % pieces * piece, pixel = task / pieces;
      const PoolRange columns = adaptive_range(pixel % w, w, W_in),
                      rows = adaptive_range(pixel / w % h, h, H);
      const float factor =
          1.0f / static_cast<float>((rows.end - rows.begin) * (columns.end - columns.begin));
      const T* from = in + pixel / w / h * H * W_in * C + first;
      T* to = out + pixel * C + first;
      if (first + piece <= C)
        add_rectangle<vectors>(from, W_in, C, rows, columns, factor, to, W);
      else
        for_vectors(C - first, [&](std::int64_t c, int n) {
          add_rectangle<1>(from + c, W_in, C, rows, columns, factor, to + c, n);
        });
    }
  });
}

void adaptive_pool_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  const std::int64_t H = dx.dim(2), W_in = dx.dim(3), h = dy.dim(2), w = dy.dim(3), C = dy.dim(4);
  with_type(dx.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = dy.data<T>();
    T* out = dx.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < dx.dim(0) * dx.dim(1) * H; ++row) {
      const PoolRange rows = adaptive_range(row % H, H, h);
      const T* frame = in + row / H * h * w * C;
      for (std::int64_t j = 0; j < W_in; ++j) {
        const PoolRange columns = adaptive_range(j, W_in, w);
        T* to = out + (row * W_in + j) * C;
        for_vectors(C, [&](std::int64_t c, int n) {
          vf sum = accumulate ? load_n(to + c, n) : vf{};
          for (std::int64_t r = rows.begin; r < rows.end; ++r)
            for (std::int64_t q = columns.begin; q < columns.end; ++q) {
              const PoolRange down = adaptive_range(r, h, H), across = adaptive_range(q, w, W_in);
              const auto area =
                  static_cast<float>((down.end - down.begin) * (across.end - across.begin));
              sum += load_n(frame + (r * w + q) * C + c, n) * (1.0f / area);
            }
          store_n(to + c, sum, n);
        });
      }
    }
  });
}

WEFT_CPU_END
