// Winograd's F(4x4, 3x3): 4x4 results of a 3x3 kernel from 6x6 inputs by 36 products instead of 144
// (Lavin and Gray, arXiv:1509.09308). In one dimension y = A^T ((G g) * (B^T d)), from the
// polynomial with values at 0, +-a, +-b and infinity. a = 3/4, b = 3/2 rather than the usual 1, 2:
// all constants are exact, and the error is a third (largest error 3e-6 of the largest value at 256
// channels, a direct sum in f32 has 1.5e-6).
//
// This file has the transforms of one tile, and what winograd.cpp and winograd_volume.cpp share. It
// is included inside an unnamed namespace.

#pragma once

#include "ops/cpu/gemm_tile.h"

constexpr float pa = 0.75f, pb = 1.5f, pa2 = pa * pa, pb2 = pb * pb;
constexpr int tile_out = 4, tile_in = 6, tile_points = tile_in * tile_in;

// to = B^T d: 6 -> 6. Here and below, elements are `step` and `to_step` vectors apart.
static inline void input_transform(const vf* d, int step, vf* to, int to_step) {
  const vf d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step];
  to[0] = d[0] * (pa2 * pb2) - d2 * (pa2 + pb2) + d4;
  const vf even_a = d4 - d2 * pb2, odd_a = (d3 - d1 * pb2) * pa;
  to[to_step] = even_a + odd_a;
  to[2 * to_step] = even_a - odd_a;
  const vf even_b = d4 - d2 * pa2, odd_b = (d3 - d1 * pa2) * pb;
  to[3 * to_step] = even_b + odd_b;
  to[4 * to_step] = even_b - odd_b;
  to[5 * to_step] = d1 * (pa2 * pb2) - d3 * (pa2 + pb2) + d[5 * step];
}

// to = A^T m: 6 -> 4.
static inline void output_transform(const vf* m, int step, vf* to, int to_step) {
  const vf sum_a = m[step] + m[2 * step], difference_a = m[step] - m[2 * step];
  const vf sum_b = m[3 * step] + m[4 * step], difference_b = m[3 * step] - m[4 * step];
  to[0] = m[0] + sum_a + sum_b;
  to[to_step] = difference_a * pa + difference_b * pb;
  to[2 * to_step] = sum_a * pa2 + sum_b * pb2;
  to[3 * to_step] = difference_a * (pa2 * pa) + difference_b * (pb2 * pb) + m[5 * step];
}

// to = A y: 4 -> 6, the transpose of output_transform.
static inline void output_transform_transposed(const vf* y, int step, vf* to, int to_step) {
  const vf y1 = y[step], y2 = y[2 * step], y3 = y[3 * step];
  to[0] = y[0];
  const vf even_a = y[0] + y2 * pa2, odd_a = y1 * pa + y3 * (pa2 * pa);
  to[to_step] = even_a + odd_a;
  to[2 * to_step] = even_a - odd_a;
  const vf even_b = y[0] + y2 * pb2, odd_b = y1 * pb + y3 * (pb2 * pb);
  to[3 * to_step] = even_b + odd_b;
  to[4 * to_step] = even_b - odd_b;
  to[5 * to_step] = y3;
}

constexpr float weight_0 = 1 / (pa2 * pb2), weight_a = 1 / (2 * pa2 * (pa2 - pb2)),
                weight_b = 1 / (2 * pb2 * (pb2 - pa2));

// to = G g: 3 -> 6.
static inline void weight_transform(const vf* g, int step, vf* to, int to_step) {
  const vf g1 = g[step], g2 = g[2 * step];
  to[0] = g[0] * weight_0;
  const vf even_a = (g[0] + g2 * pa2) * weight_a, odd_a = g1 * (pa * weight_a);
  to[to_step] = even_a + odd_a;
  to[2 * to_step] = even_a - odd_a;
  const vf even_b = (g[0] + g2 * pb2) * weight_b, odd_b = g1 * (pb * weight_b);
  to[3 * to_step] = even_b + odd_b;
  to[4 * to_step] = even_b - odd_b;
  to[5 * to_step] = g2;
}

// to = G^T u: 6 -> 3, the transpose of weight_transform.
static inline void weight_transform_transposed(const vf* u, int step, vf* to, int to_step) {
  const vf sum_a = (u[step] + u[2 * step]) * weight_a;
  const vf difference_a = (u[step] - u[2 * step]) * weight_a;
  const vf sum_b = (u[3 * step] + u[4 * step]) * weight_b;
  const vf difference_b = (u[3 * step] - u[4 * step]) * weight_b;
  to[0] = u[0] * weight_0 + sum_a + sum_b;
  to[to_step] = difference_a * pa + difference_b * pb;
  to[2 * to_step] = sum_a * pa2 + sum_b * pb2 + u[5 * step];
}

// A tile in two dimensions: `from` [from_size][from_size] -> `to` [to_size][to_size], columns
// first, then rows, by the one-dimensional transform.
template <int from_size, int to_size, class Transform>
static inline void transform_2d(const vf* from, vf* to, Transform&& transform) {
  vf half[to_size * from_size];
#pragma GCC unroll 6
  for (int j = 0; j < from_size; ++j) transform(from + j, from_size, half + j, from_size);
#pragma GCC unroll 6
  for (int i = 0; i < to_size; ++i) transform(half + i * from_size, 1, to + i * to_size, 1);
}

// Number of tiles along `size` pixels with dilation d. Tiles are numbered phase by phase: the first
// tile of each of the d phases, then the second of each. The last phases may have one fewer.
static inline std::int64_t tiles_along(std::int64_t size, std::int64_t d) {
  const std::int64_t span = d * tile_out, whole = size / span;
  return whole * d + std::min(d, size - whole * span);
}

// n rounded up to whole vectors.
static inline std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// The tiles of a result, and strides that follow from the channels. A convolution with dilation d
// is an ordinary one on each of the d x d phases of a frame (every d-th row and column): a tile's
// pixels are d apart.
struct Plan {
  Geometry g;
  std::int64_t rows, columns;          // of tiles, of all phases together
  std::int64_t depth;                  // kt * cin, of the products
  std::int64_t padded_cout;            // in whole vectors
  std::int64_t in_stride, out_stride;  // from one tile to the next: of depth, of padded_cout
  std::int64_t tiles, block, blocks;   // tiles, tiles in a block, blocks
};

// A thread computes a block of tiles at a time: large, so that weights are read seldom; small
// enough for the threads to have equal shares.
static inline Plan plan(const Geometry& g) {
  Plan p;
  p.g = g;
  p.rows = tiles_along(g.ho, g.dilation);
  p.columns = tiles_along(g.wo, g.dilation);
  p.depth = g.kt * g.cin;
  p.padded_cout = padded(g.cout);
  p.in_stride = padded_stride(p.depth);
  p.out_stride = padded_stride(p.padded_cout);
  p.tiles = g.n * g.to * p.rows * p.columns;
  const std::int64_t threads = omp_get_max_threads();
  constexpr std::int64_t max_block = 96;
  const std::int64_t rounds = (p.tiles + max_block * threads - 1) / (max_block * threads);
  p.block = std::min(p.tiles, (p.tiles + rounds * threads - 1) / (rounds * threads));
  p.blocks = (p.tiles + p.block - 1) / p.block;
  return p;
}

// How many rows (or columns) of a tile lie inside a frame: the tile's first is `first`, and the
// others follow `dilation` apart.
static inline std::int64_t results_in_tile(std::int64_t size, std::int64_t first,
                                           std::int64_t dilation) {
  return std::clamp<std::int64_t>((size - first + dilation - 1) / dilation, 0, tile_out);
}

// Where a tile's first result is.
struct TileOrigin {
  std::int64_t sample, t, row, column;
};
static inline TileOrigin tile_origin(const Plan& p, std::int64_t tile) {
  const std::int64_t d = p.g.dilation, column = tile % p.columns, row = tile / p.columns % p.rows;
  TileOrigin o;
  o.column = column / d * d * tile_out + column % d;
  o.row = row / d * d * tile_out + row % d;
  const std::int64_t frame = tile / (p.rows * p.columns);
  o.t = frame % p.g.to;
  o.sample = frame / p.g.to;
  return o;
}

// Transforms the inputs of the tile at (row, column) of a frame [h,w,cin] (null: a frame of zeros)
// into `to`: for each of the 36 points [cin], `point_stride` floats from one point to the next.
static inline void transform_input_tile(const Geometry& g, const float* frame, std::int64_t row,
                                        std::int64_t column, std::int64_t point_stride, float* to) {
  // Null in the padding.
  const float* from[tile_points];
  for (int i = 0; i < tile_in; ++i)
    for (int j = 0; j < tile_in; ++j) {
      const std::int64_t h = row + i * g.dilation - g.top, w = column + j * g.dilation - g.left;
      from[i * tile_in + j] = frame == nullptr || h < 0 || w < 0 || h >= g.h || w >= g.w
                                  ? nullptr
                                  : frame + (h * g.w + w) * g.cin;
    }
  for_vectors(g.cin, [&](std::int64_t c, int n) {
    vf in[tile_points], out[tile_points];
    for (int k = 0; k < tile_points; ++k) in[k] = from[k] ? load_n(from[k] + c, n) : vf{};
    transform_2d<tile_in, tile_in>(in, out, input_transform);
    for (int k = 0; k < tile_points; ++k) store_n(to + k * point_stride + c, out[k], n);
  });
}

// The same for tiles [first, first + count) and the kernel's kt frames: for each point
// [count, in_stride].
static inline void transform_inputs(const Plan& p, const float* x, std::int64_t first,
                                    std::int64_t count, std::int64_t point_stride, float* to) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const TileOrigin origin = tile_origin(p, first + tile);
    for (std::int64_t a = 0; a < g.kt; ++a) {
      const std::int64_t t = origin.t * g.stride_t + a - g.front;
      const float* frame =
          t < 0 || t >= g.t ? nullptr : x + (origin.sample * g.t + t) * g.h * g.w * g.cin;
      transform_input_tile(g, frame, origin.row, origin.column, point_stride,
                           to + tile * p.in_stride + a * g.cin);
    }
  }
}

// Computes output channels [first, first + channels) of the tile at (row, column) of a frame
// [ho,wo,cout] from its products: for each point [channels], `point_stride` floats from one point
// to the next.
static inline void transform_output_tile(const Geometry& g, const float* products,
                                         std::int64_t point_stride, std::int64_t row,
                                         std::int64_t column, std::int64_t first,
                                         std::int64_t channels, const float* bias, bool add,
                                         float* frame) {
  const std::int64_t d = g.dilation, rows = results_in_tile(g.ho, row, d),
                     columns = results_in_tile(g.wo, column, d);
  if (rows * columns == 0) return;
  float* to = frame + (row * g.wo + column) * g.cout + first;
  for_vectors(channels, [&](std::int64_t c, int n) {
    vf in[tile_points], out[tile_out * tile_out];
    for (int k = 0; k < tile_points; ++k) in[k] = load(products + k * point_stride + c);
    transform_2d<tile_in, tile_out>(in, out, output_transform);
    const vf b = bias ? load_n(bias + first + c, n) : vf{};
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        float* at = to + d * (i * g.wo + j) * g.cout + c;
        vf v = out[i * tile_out + j] + b;
        if (add) v += load_n(at, n);
        store_n(at, v, n);
      }
  });
}
