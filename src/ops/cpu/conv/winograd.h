// Winograd's F(4x4, 3x3): 4x4 results of a 3x3 kernel from 6x6 inputs by 36 products instead of 144
// (Lavin and Gray, arXiv:1509.09308). In one dimension y = A^T ((G g) * (B^T d)), from the
// polynomial with values at 0, +-a, +-b and infinity. a = 3/4, b = 3/2 rather than the usual 1, 2:
// all constants are exact, and the error is a third (largest error 3e-6 of the largest value at 256
// channels, a direct sum in f32 has 1.5e-6).
//
// Here the transforms of one tile, and what winograd.cpp and winograd_volume.cpp share. Included
// inside an unnamed namespace.

#pragma once

#include "ops/cpu/gemm_tile.h"

constexpr float pa = 0.75f, pb = 1.5f, pa2 = pa * pa, pb2 = pb * pb;
constexpr int tile_out = 4, tile_in = 6, tile_points = tile_in * tile_in;

// to = B^T d, elements `step` apart.
static inline void input_line(const vf* d, int step, vf* to, int to_step) {
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
static inline void output_line(const vf* m, int step, vf* to, int to_step) {
  const vf sum_a = m[step] + m[2 * step], difference_a = m[step] - m[2 * step];
  const vf sum_b = m[3 * step] + m[4 * step], difference_b = m[3 * step] - m[4 * step];
  to[0] = m[0] + sum_a + sum_b;
  to[to_step] = difference_a * pa + difference_b * pb;
  to[2 * to_step] = sum_a * pa2 + sum_b * pb2;
  to[3 * to_step] = difference_a * (pa2 * pa) + difference_b * (pb2 * pb) + m[5 * step];
}

// to = A y: 4 -> 6, the way back of output_line.
static inline void output_line_back(const vf* y, int step, vf* to, int to_step) {
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
static inline void weight_line(const vf* g, int step, vf* to, int to_step) {
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

// to = G^T u: 6 -> 3.
static inline void weight_line_back(const vf* u, int step, vf* to, int to_step) {
  const vf sum_a = (u[step] + u[2 * step]) * weight_a;
  const vf difference_a = (u[step] - u[2 * step]) * weight_a;
  const vf sum_b = (u[3 * step] + u[4 * step]) * weight_b;
  const vf difference_b = (u[3 * step] - u[4 * step]) * weight_b;
  to[0] = u[0] * weight_0 + sum_a + sum_b;
  to[to_step] = difference_a * pa + difference_b * pb;
  to[2 * to_step] = sum_a * pa2 + sum_b * pb2 + u[5 * step];
}

// A whole tile: `from` [rows][rows] by `line` in both directions into `to` [results][results].
template <int from_size, int to_size, class Line>
static inline void both_ways(const vf* from, vf* to, Line&& line) {
  vf half[to_size * from_size];
#pragma GCC unroll 6
  for (int j = 0; j < from_size; ++j) line(from + j, from_size, half + j, from_size);
#pragma GCC unroll 6
  for (int i = 0; i < to_size; ++i) line(half + i * from_size, 1, to + i * to_size, 1);
}

// Tiles along `size` pixels: those of the phases in turn, then their next ones. The last phases may
// have one fewer.
static inline std::int64_t tiles_along(std::int64_t size, std::int64_t d) {
  const std::int64_t span = d * tile_out, whole = size / span;
  return whole * d + std::min(d, size - whole * span);
}

static inline std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// The tiles of a result, and what follows from the channels. A kernel dilated by d is an ordinary
// one on each of the d x d phases of a frame (every d-th row and column): a tile's pixels are d
// apart.
struct Plan {
  Geometry g;
  std::int64_t rows, columns;  // of tiles, of all phases together
  std::int64_t depth;          // kt * cin, of the products
  std::int64_t outs;           // cout in whole vectors
  std::int64_t in_stride, out_stride;
  std::int64_t tiles, block, blocks;
};

// Tiles that a thread works on at a time: many, so that weights are read seldom; few enough to
// share them out evenly.
static inline Plan plan(const Geometry& g) {
  Plan p;
  p.g = g;
  p.rows = tiles_along(g.ho, g.dilation);
  p.columns = tiles_along(g.wo, g.dilation);
  p.depth = g.kt * g.cin;
  p.outs = padded(g.cout);
  p.in_stride = padded_stride(p.depth);
  p.out_stride = padded_stride(p.outs);
  p.tiles = g.n * g.to * p.rows * p.columns;
  const std::int64_t threads = omp_get_max_threads();
  constexpr std::int64_t most = 96;
  const std::int64_t rounds = (p.tiles + most * threads - 1) / (most * threads);
  p.block = std::min(p.tiles, (p.tiles + rounds * threads - 1) / (rounds * threads));
  p.blocks = (p.tiles + p.block - 1) / p.block;
  return p;
}

// Of `size` rows from `first` on those that a tile has, `apart` rows from one to the next.
static inline std::int64_t within(std::int64_t size, std::int64_t first, std::int64_t apart) {
  return std::clamp<std::int64_t>((size - first + apart - 1) / apart, 0, tile_out);
}

struct Place {
  std::int64_t sample, t, row, column;  // of a tile's first result
};
static inline Place place(const Plan& p, std::int64_t tile) {
  const std::int64_t d = p.g.dilation, column = tile % p.columns, row = tile / p.columns % p.rows;
  Place q;
  q.column = column / d * d * tile_out + column % d;
  q.row = row / d * d * tile_out + row % d;
  const std::int64_t frame = tile / (p.rows * p.columns);
  q.t = frame % p.g.to;
  q.sample = frame / p.g.to;
  return q;
}

// Inputs of the tile at (row, column) of a frame [h,w,cin], null for one of zeros, transformed: 36
// times [cin], `apart` floats from one to the next.
static inline void transform_tile(const Geometry& g, const float* frame, std::int64_t row,
                                  std::int64_t column, std::int64_t apart, float* to) {
  // Null where there is only padding.
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
    both_ways<tile_in, tile_in>(in, out, input_line);
    for (int k = 0; k < tile_points; ++k) store_n(to + k * apart + c, out[k], n);
  });
}

// Inputs of tiles [first, first + count) transformed: 36 times [count, in_stride], `apart` floats
// from one to the next.
static inline void transform_inputs(const Plan& p, const float* x, std::int64_t first,
                                    std::int64_t count, std::int64_t apart, float* to) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const Place q = place(p, first + tile);
    for (std::int64_t a = 0; a < g.kt; ++a) {
      const std::int64_t t = q.t * g.stride_t + a - g.front;
      const float* frame =
          t < 0 || t >= g.t ? nullptr : x + (q.sample * g.t + t) * g.h * g.w * g.cin;
      transform_tile(g, frame, q.row, q.column, apart, to + tile * p.in_stride + a * g.cin);
    }
  }
}

// Outputs [first, first + outs) of the tile at (row, column) of a frame [ho,wo,cout] from its
// products: 36 times [outs], `apart` floats from one to the next.
static inline void transform_result(const Geometry& g, const float* products, std::int64_t apart,
                                    std::int64_t row, std::int64_t column, std::int64_t first,
                                    std::int64_t outs, const float* bias, bool add, float* frame) {
  const std::int64_t d = g.dilation, rows = within(g.ho, row, d), columns = within(g.wo, column, d);
  if (rows * columns == 0) return;
  float* to = frame + (row * g.wo + column) * g.cout + first;
  for_vectors(outs, [&](std::int64_t c, int n) {
    vf in[tile_points], out[tile_out * tile_out];
    for (int k = 0; k < tile_points; ++k) in[k] = load(products + k * apart + c);
    both_ways<tile_in, tile_out>(in, out, output_line);
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
