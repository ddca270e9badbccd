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

std::vector<BilinearTap> taps(std::int64_t in, std::int64_t out) {
  std::vector<BilinearTap> all;
  for (int o = 0; o < out; ++o)
    all.push_back(bilinear_tap(o, bilinear_ratio(in, out), static_cast<int>(in)));
  return all;
}

// The transpose along an axis: the outputs [begin, end) that pixel `from` has a share in.
struct Range {
  int begin, end;
};
std::vector<Range> ranges(const std::vector<BilinearTap>& taps, std::int64_t in) {
  std::vector<Range> all(in, Range{0, 0});
  for (int o = 0; o < static_cast<int>(taps.size()); ++o)
    for (const int i : {taps[o].first, taps[o].second}) {
      if (all[i].end == 0) all[i].begin = o;
      all[i].end = o + 1;
    }
  return all;
}
float share_of(const BilinearTap& t, int from) {
  return (t.first == from ? 1.0f - t.share : 0.0f) + (t.second == from ? t.share : 0.0f);
}

// The same size: y (+)= x.
template <class T>
void copy(const T* x, std::int64_t count, T* y, bool accumulate) {
  constexpr std::int64_t piece = 1 << 16;
#pragma omp parallel for schedule(static) if (count > piece)
  for (std::int64_t b = 0; b < (count + piece - 1) / piece; ++b) {
    const std::int64_t first = b * piece, size = std::min(piece, count - first);
    if (accumulate)
      for_vectors(size, [&](std::int64_t i, int n) {
        store_n(y + first + i, load_n(y + first + i, n) + load_n(x + first + i, n), n);
      });
    else
      std::copy_n(x + first, size, y + first);
  }
}

}  // namespace

void bilinear_forward(const Tensor& x, Tensor& y, bool accumulate) {
  const std::int64_t frames = y.dim(0) * y.dim(1), H = y.dim(2), width = y.dim(3), C = y.dim(4);
  const std::int64_t h = x.dim(2), w = x.dim(3);
  WEFT_ASSERT(x.dim(0) * x.dim(1) == frames && x.dim(4) == C && x.dtype() == y.dtype());
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
    if (h == H && w == width) return copy(in, x.numel(), out, accumulate);
    const std::vector<BilinearTap> rows = taps(h, H), columns = taps(w, width);
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < frames * H; ++r) {
      const BilinearTap& row = rows[r % H];
      const T *upper = in + (r / H * h + row.first) * w * C,
              *lower = in + (r / H * h + row.second) * w * C;
      for (std::int64_t q = 0; q < width; ++q) {
        const BilinearTap& column = columns[q];
        const T *a = upper + column.first * C, *b = upper + column.second * C,
                *c = lower + column.first * C, *d = lower + column.second * C;
        const float sd = row.share * column.share, sc = row.share * (1.0f - column.share),
                    sb = (1.0f - row.share) * column.share,
                    sa = (1.0f - row.share) * (1.0f - column.share);
        T* to = out + (r * width + q) * C;
        for_vectors(C, [&](std::int64_t k, int n) {
          const vf v = sa * load_n(a + k, n) + sb * load_n(b + k, n) + sc * load_n(c + k, n) +
                       sd * load_n(d + k, n);
          store_n(to + k, accumulate ? load_n(to + k, n) + v : v, n);
        });
      }
    }
  });
}

void bilinear_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  const std::int64_t frames = dy.dim(0) * dy.dim(1), H = dy.dim(2), width = dy.dim(3),
                     C = dy.dim(4);
  const std::int64_t h = dx.dim(2), w = dx.dim(3);
  WEFT_ASSERT(dx.dim(0) * dx.dim(1) == frames && dx.dim(4) == C && dx.dtype() == dy.dtype());
  with_type(dy.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = dy.data<T>();
    T* out = dx.data<T>();
    if (h == H && w == width) return copy(in, dy.numel(), out, accumulate);
    const std::vector<BilinearTap> rows = taps(h, H), columns = taps(w, width);
    const std::vector<Range> down = ranges(rows, h), across = ranges(columns, w);
    // Pieces of the channels, too: a level of a pyramid may be one pixel of thousands of channels.
    constexpr int vectors = 4, piece = vectors * W;
    const std::int64_t pieces = (C + piece - 1) / piece;
#pragma omp parallel for schedule(static)
    for (std::int64_t task = 0; task < frames * h * w * pieces; ++task) {
      const std::int64_t first = task % pieces * piece, pixel = task / pieces;
      const int j = static_cast<int>(pixel % w), i = static_cast<int>(pixel / w % h);
      const T* frame = in + pixel / w / h * H * width * C;
      // f(vector, its sum, its lanes), the sum taken row by row.
      const auto gather = [&]<int count>(std::int64_t at, int n) {
        vf sum[count] = {};
        for (int r = down[i].begin; r < down[i].end; ++r) {
          vf part[count] = {};
          const T* from = frame + r * width * C + at;
          for (int q = across[j].begin; q < across[j].end; ++q) {
            const float s = share_of(columns[q], j);
            for (int v = 0; v < count; ++v) part[v] += s * load_n(from + q * C + v * W, n);
          }
          const float s = share_of(rows[r], i);
          for (int v = 0; v < count; ++v) sum[v] += s * part[v];
        }
        T* to = out + pixel * C + at;
        for (int v = 0; v < count; ++v)
          store_n(to + v * W, accumulate ? load_n(to + v * W, n) + sum[v] : sum[v], n);
      };
      if (first + piece <= C)
        gather.template operator()<vectors>(first, W);
      else
        for_vectors(C - first,
                    [&](std::int64_t k, int n) { gather.template operator()<1>(first + k, n); });
    }
  });
}

void nearest_forward(const Tensor& x, std::int64_t first, Tensor& y, bool accumulate) {
  const std::int64_t frames = y.dim(0) * y.dim(1), H = y.dim(2), width = y.dim(3), C = y.dim(4);
  const std::int64_t h = x.dim(2), w = x.dim(3), c = x.dim(4);
  WEFT_ASSERT(x.dim(0) * x.dim(1) == frames && first + c <= C && x.dtype() == y.dtype());
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>() + first;
#pragma omp parallel for schedule(static) if (frames * H * width * c > 16384)
    for (std::int64_t r = 0; r < frames * H; ++r) {
      const T* row = in + (r / H * h + nearest_source(r % H, h, H)) * w * c;
      for (std::int64_t q = 0; q < width; ++q) {
        const T* from = row + nearest_source(q, w, width) * c;
        T* to = out + (r * width + q) * C;
        for_vectors(c, [&](std::int64_t k, int n) {
          const vf v = load_n(from + k, n);
          store_n(to + k, accumulate ? load_n(to + k, n) + v : v, n);
        });
      }
    }
  });
}

void nearest_backward(const Tensor& dy, std::int64_t first, Tensor& dx, bool accumulate) {
  const std::int64_t H = dy.dim(2), width = dy.dim(3), C = dy.dim(4);
  const std::int64_t frames = dx.dim(0) * dx.dim(1), h = dx.dim(2), w = dx.dim(3), c = dx.dim(4);
  WEFT_ASSERT(dy.dim(0) * dy.dim(1) == frames && first + c <= C && dx.dtype() == dy.dtype());
  with_type(dy.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = dy.data<T>() + first;
    T* out = dx.data<T>();
#pragma omp parallel for schedule(static) if (frames * H * width * c > 16384)
    for (std::int64_t row = 0; row < frames * h; ++row) {
      const std::int64_t i = row % h;
      const std::int64_t top = nearest_first(i, h, H), bottom = nearest_first(i + 1, h, H);
      const T* frame = in + row / h * H * width * C;
      for (std::int64_t j = 0; j < w; ++j) {
        const std::int64_t left = nearest_first(j, w, width),
                           right = nearest_first(j + 1, w, width);
        T* to = out + (row * w + j) * c;
        const auto gather = [&]<int count>(std::int64_t k, int n) {
          vf sum[count] = {};
          for (std::int64_t r = top; r < bottom; ++r)
            for (std::int64_t q = left; q < right; ++q)
              for (int v = 0; v < count; ++v)
                sum[v] += load_n(frame + (r * width + q) * C + k + v * W, n);
          for (int v = 0; v < count; ++v) {
            T* at = to + k + v * W;
            store_n(at, accumulate ? load_n(at, n) + sum[v] : sum[v], n);
          }
        };
        constexpr int vectors = 4, piece = vectors * W;
        const std::int64_t whole = c / piece * piece;
        for (std::int64_t k = 0; k < whole; k += piece) gather.template operator()<vectors>(k, W);
        for_vectors(c - whole,
                    [&](std::int64_t k, int n) { gather.template operator()<1>(whole + k, n); });
      }
    }
  });
}

void reflect_border(const Tensor& x, int up, Tensor& y) {
  const std::int64_t frames = x.dim(0) * x.dim(1), h = x.dim(2), w = x.dim(3), C = x.dim(4);
  const std::int64_t H = y.dim(2), width = y.dim(3);
  WEFT_ASSERT((up == 1 || up == 2) && H == up * h + 2 && width == up * w + 2 && up * h > 1 &&
              up * w > 1 && x.dtype() == y.dtype());
  const std::size_t pixel = static_cast<std::size_t>(C) * size_of(x.dtype());
  const auto* in = static_cast<const std::byte*>(x.raw());
  auto* out = static_cast<std::byte*>(y.raw());
#pragma omp parallel for schedule(static) if (y.numel() > 16384)
  for (std::int64_t r = 0; r < frames * H; ++r) {
    const std::byte* row = in + (r / H * h + reflected_source(r % H, up * h) / up) * w * pixel;
    std::byte* to = out + r * width * pixel;
    if (up == 1) {
      std::memcpy(to + pixel, row, w * pixel);
      std::memcpy(to, row + pixel, pixel);
      std::memcpy(to + (w + 1) * pixel, row + (w - 2) * pixel, pixel);
    } else {
      for (std::int64_t q = 0; q < width; ++q)
        std::memcpy(to + q * pixel, row + reflected_source(q, 2 * w) / 2 * pixel, pixel);
    }
  }
}

WEFT_CPU_END
