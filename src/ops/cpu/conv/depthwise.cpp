// Depthwise convolutions: each channel has its own kernel, so vectors of channels are multiplied
// and added, and memory is the limit. A result's pixel is the sum over those taps of the kernel
// whose source lies inside; forward and backward differ only in which those are, so both are one
// loop over lists of them. The weights' gradient sums chunks of rows, whose number does not depend
// on the threads.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/simd.h"

// A tap of the kernel along one axis, and the line (row or column) of the source that it
// multiplies.
struct Tap {
  std::int64_t tap, from;
};
using Taps = std::vector<std::vector<Tap>>;  // for each line of the result

// Along one axis: y's line i reads x's line i * stride + tap * dilation - before.
Taps of_result(std::int64_t result, std::int64_t source, std::int64_t taps, const Conv& c,
               std::int64_t before) {
  Taps all(static_cast<std::size_t>(result));
  for (std::int64_t i = 0; i < result; ++i)
    for (std::int64_t k = 0; k < taps; ++k)
      if (const std::int64_t at = i * c.stride + k * c.dilation - before; at >= 0 && at < source)
        all[i].push_back({k, at});
  return all;
}

// The same for each line of x: the taps by which y's lines read it.
Taps transposed(const Taps& of_y, std::int64_t lines) {
  Taps all(static_cast<std::size_t>(lines));
  for (std::size_t i = 0; i < of_y.size(); ++i)
    for (const Tap& m : of_y[i]) all[m.from].push_back({m.tap, static_cast<std::int64_t>(i)});
  return all;
}

// to [taps][C], f32, = w [C][taps].
template <class T>
void taps_first(const T* w, std::int64_t C, std::int64_t taps, float* to) {
  for (std::int64_t c = 0; c < C; ++c)
    for (std::int64_t k = 0; k < taps; ++k) to[k * C + c] = static_cast<float>(w[c * taps + k]);
}

// What a frame of the result is made of.
template <class T>
struct Sums {
  const T* source;    // [frames][source_rows][source_columns][C]
  const float* w;     // [taps][C]
  const float* bias;  // [C], or null
  const T* added;     // of the result's shape (it may be the result), or null
  T* result;          // [frames][rows][columns][C]
  std::int64_t frames, source_rows, source_columns, C, kw;
  Taps rows, columns;
};

// A whole vector (n is W), or the first n lanes of one: known when compiled, for the loops below.
template <bool whole, class T>
vf load_lanes(const T* p, int n) {
  return whole ? load(p) : load_part(p, n);
}
template <bool whole, class T>
void store_lanes(T* p, vf v, int n) {
  if constexpr (whole)
    store(p, v);
  else
    store_part(p, v, n);
}

// Calls f<V, whole>(first, lanes) for all channels: four vectors at a time, then fewer.
template <class F>
void for_channels(std::int64_t C, F&& f) {
  std::int64_t c = 0;
  for (; c + 4 * W <= C; c += 4 * W) f.template operator()<4, true>(c, W);
  for (; c + 2 * W <= C; c += 2 * W) f.template operator()<2, true>(c, W);
  for (; c + W <= C; c += W) f.template operator()<1, true>(c, W);
  if (c < C) f.template operator()<1, false>(c, static_cast<int>(C - c));
}

// Channels that are worked on at a time: long enough runs of memory, and the kernel's weights and
// the source's pixels around the result's stay in the first-level cache.
constexpr std::int64_t channels_at_once = 256;

// V vectors from channel c on of pixel j of a row of the result.
template <int V, bool whole, class T>
void sum_pixel(const Sums<T>& s, const T* frame, const std::vector<Tap>& rows,
               const std::vector<Tap>& columns, std::int64_t pixel, std::int64_t c, int n) {
  const std::int64_t at = pixel * s.C + c;
  vf sum[V];
  for (int v = 0; v < V; ++v) {
    sum[v] = s.bias ? load_lanes<whole>(s.bias + c + v * W, n) : vf{};
    if (s.added) sum[v] += load_lanes<whole>(s.added + at + v * W, n);
  }
  for (const Tap& r : rows) {
    const T* line = frame + r.from * s.source_columns * s.C + c;
    const float* weights = s.w + r.tap * s.kw * s.C + c;
    for (const Tap& m : columns)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        sum[v] += load_lanes<whole>(line + m.from * s.C + v * W, n) *
                  load_lanes<whole>(weights + m.tap * s.C + v * W, n);
  }
  for (int v = 0; v < V; ++v) store_lanes<whole>(s.result + at + v * W, sum[v], n);
}

template <class T>
void add_up(const Sums<T>& s) {
  const auto rows = static_cast<std::int64_t>(s.rows.size()),
             columns = static_cast<std::int64_t>(s.columns.size());
  // Rows innermost: a thread finds those of the source that it has read before in its cache.
#pragma omp parallel for schedule(static) collapse(3)
  for (std::int64_t frame = 0; frame < s.frames; ++frame)
    for (std::int64_t first = 0; first < s.C; first += channels_at_once)
      for (std::int64_t row = 0; row < rows; ++row) {
        const T* source = s.source + frame * s.source_rows * s.source_columns * s.C;
        const auto& of_row = s.rows[row];
        for (std::int64_t j = 0; j < columns; ++j)
          for_channels(std::min(channels_at_once, s.C - first),
                       [&]<int V, bool whole>(std::int64_t c, int n) {
                         sum_pixel<V, whole>(s, source, of_row, s.columns[j],
                                             (frame * rows + row) * columns + j, first + c, n);
                       });
      }
}

// Chunks of rows that sum the weights' gradient on their own.
constexpr std::int64_t max_chunks = 32;
// Columns that are summed at a time, so that their rows stay in the first-level cache.
constexpr std::int64_t columns_at_once = 32;

// x and dy of the weights' gradient.
template <class T>
struct Gradient {
  const T *x, *dy;
  Shape x_shape, y_shape;
  Conv conv;
};

// sums [taps][C], vectors [c, c + V W), += those of `count` columns of dy's row, from `first` on.
template <int V, bool whole, class T>
void add_row(const Gradient<T>& g, std::int64_t frame, std::int64_t row, std::int64_t first,
             std::int64_t count, std::int64_t c, int n, float* sums) {
  const std::int64_t C = g.x_shape[4], width = g.x_shape[3], s = g.conv.stride;
  const T* const dy = g.dy + (frame * g.y_shape[2] + row) * g.y_shape[3] * C + c;
  for (std::int64_t a = 0; a < g.conv.kh; ++a) {
    const std::int64_t h = row * s + a * g.conv.dilation - g.conv.top;
    if (h < 0 || h >= g.x_shape[2]) continue;
    const T* const x = g.x + (frame * g.x_shape[2] + h) * width * C + c;
    for (std::int64_t b = 0; b < g.conv.kw; ++b) {
      // Column j of dy multiplies column j s + offset of x.
      const std::int64_t offset = b * g.conv.dilation - g.conv.left;
      const std::int64_t from = std::max(first, offset < 0 ? (-offset + s - 1) / s : 0);
      const std::int64_t to =
          offset < width ? std::min(first + count, (width - 1 - offset) / s + 1) : from;
      float* at = sums + (a * g.conv.kw + b) * C + c;
      vf sum[V];
      for (int v = 0; v < V; ++v) sum[v] = load_lanes<whole>(at + v * W, n);
      for (std::int64_t j = from; j < to; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          sum[v] += load_lanes<whole>(dy + j * C + v * W, n) *
                    load_lanes<whole>(x + (j * s + offset) * C + v * W, n);
      for (int v = 0; v < V; ++v) store_lanes<whole>(at + v * W, sum[v], n);
    }
  }
}

}  // namespace

bool is_depthwise(const Shape& x, std::int64_t cout, const Conv& c) {
  return c.groups > 1 && c.groups == x[4] && cout == x[4] && c.kt == 1 && c.stride_t == 1 &&
         c.front == 0 && !c.upsample;
}

void depthwise_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                       const Conv& c, Tensor& y) {
  const std::int64_t C = x.dim(4), taps = c.kh * c.kw;
  const Tensor weights = floats(taps * C);
  if (planning()) return;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    taps_first(w.data<T>(), C, taps, weights.data<float>());
    add_up<T>({x.data<T>(), weights.data<float>(), bias.defined() ? bias.data<float>() : nullptr,
               residual.defined() ? residual.data<T>() : nullptr, y.data<T>(), x.dim(0) * x.dim(1),
               x.dim(2), x.dim(3), C, c.kw, of_result(y.dim(2), x.dim(2), c.kh, c, c.top),
               of_result(y.dim(3), x.dim(3), c.kw, c, c.left)});
  });
}

void depthwise_backward_input(const Tensor& dy, const Tensor& w, const Conv& c, Tensor& dx,
                              bool accumulate) {
  const std::int64_t C = dx.dim(4), taps = c.kh * c.kw;
  const Tensor weights = floats(taps * C);
  if (planning()) return;
  with_type(dx.dtype(), [&](auto type) {
    using T = decltype(type);
    taps_first(w.data<T>(), C, taps, weights.data<float>());
    add_up<T>({dy.data<T>(), weights.data<float>(), nullptr, accumulate ? dx.data<T>() : nullptr,
               dx.data<T>(), dy.dim(0) * dy.dim(1), dy.dim(2), dy.dim(3), C, c.kw,
               transposed(of_result(dy.dim(2), dx.dim(2), c.kh, c, c.top), dx.dim(2)),
               transposed(of_result(dy.dim(3), dx.dim(3), c.kw, c, c.left), dx.dim(3))});
  });
}

void depthwise_backward_weight(const Tensor& x, const Tensor& dy, const Conv& c, Tensor& dw,
                               bool accumulate) {
  const std::int64_t C = x.dim(4), taps = c.kh * c.kw, columns = dy.dim(3);
  const std::int64_t rows = dy.dim(0) * dy.dim(1) * dy.dim(2);
  const std::int64_t chunk = (rows + max_chunks - 1) / max_chunks;
  const std::int64_t chunks = (rows + chunk - 1) / chunk;
  const Tensor partial = floats(chunks * taps * C);
  if (planning()) return;
  float* const sums = partial.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const Gradient<T> g{x.data<T>(), dy.data<T>(), x.shape(), dy.shape(), c};
#pragma omp parallel for schedule(static)
    for (std::int64_t k = 0; k < chunks; ++k) {
      float* to = sums + k * taps * C;
      std::fill_n(to, taps * C, 0.0f);
      for (std::int64_t r = k * chunk; r < std::min(rows, (k + 1) * chunk); ++r)
        for (std::int64_t j = 0; j < columns; j += columns_at_once) {
          const std::int64_t frame = r / dy.dim(2), row = r % dy.dim(2),
                             count = std::min(columns_at_once, columns - j);
          for_channels(C, [&]<int V, bool whole>(std::int64_t channel, int n) {
            add_row<V, whole>(g, frame, row, j, count, channel, n, to);
          });
        }
    }
  });
  float* const d = dw.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t channel = 0; channel < C; ++channel)
    for (std::int64_t t = 0; t < taps; ++t) {
      float sum = accumulate ? d[channel * taps + t] : 0.0f;
      for (std::int64_t k = 0; k < chunks; ++k) sum += sums[(k * taps + t) * C + channel];
      d[channel * taps + t] = sum;
    }
}

WEFT_CPU_END
