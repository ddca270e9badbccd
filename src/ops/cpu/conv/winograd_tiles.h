// What the forward and the weights' gradient of Winograd's convolutions share: the tiles of a result, and the inputs of tiles
// transformed. Included inside an unnamed namespace, after gemm_tile.h.

#pragma once

#include "ops/cpu/conv/winograd_transforms.h"

static inline std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// The tiles of a result, and what follows from the channels. `up`: rows and columns of x are seen twice. `fold`: two rows
// and columns of the result are added into one of y.
struct Plan {
  Geometry g;
  int up, fold;
  std::int64_t rows, columns;  // of tiles in a frame
  std::int64_t depth;          // kt * cin, of the products
  std::int64_t outs;           // cout in whole vectors
  std::int64_t in_stride, out_stride;
  std::int64_t tiles, block, blocks;
};

// Tiles that a thread works on at a time: many, so that weights are read seldom; few enough to share them out evenly.
static inline Plan plan(const Geometry& g, int up, int fold) {
  Plan p;
  p.g = g;
  p.up = up;
  p.fold = fold;
  p.rows = (g.ho + tile_out - 1) / tile_out;
  p.columns = (g.wo + tile_out - 1) / tile_out;
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

struct Place {
  std::int64_t sample, t, row, column;  // of a tile's first result
};
static inline Place place(const Plan& p, std::int64_t tile) {
  Place q;
  q.column = tile % p.columns * tile_out;
  q.row = tile / p.columns % p.rows * tile_out;
  const std::int64_t frame = tile / (p.rows * p.columns);
  q.t = frame % p.g.to;
  q.sample = frame / p.g.to;
  return q;
}

// Inputs of tiles [first, first + count) transformed: 36 times [count, in_stride], `apart` floats from one to the next.
static inline void transform_inputs(const Plan& p, const float* x, std::int64_t first,
                                    std::int64_t count, std::int64_t apart, float* to) {
  const Geometry& g = p.g;
  const std::int64_t height = g.h << p.up, width = g.w << p.up;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const Place q = place(p, first + tile);
    for (std::int64_t a = 0; a < g.kt; ++a) {
      float* at = to + tile * p.in_stride + a * g.cin;
      const std::int64_t t = q.t * g.stride_t + a - g.front;
      const bool outside = t < 0 || t >= g.t;
      const float* frame = x + (q.sample * g.t + t) * g.h * g.w * g.cin;
      // Null where there is only padding.
      const float* from[tile_points];
      for (int i = 0; i < tile_in; ++i)
        for (int j = 0; j < tile_in; ++j) {
          const std::int64_t h = q.row + i - g.top, w = q.column + j - g.left;
          from[i * tile_in + j] = outside || h < 0 || w < 0 || h >= height || w >= width
                                      ? nullptr
                                      : frame + ((h >> p.up) * g.w + (w >> p.up)) * g.cin;
        }
      for_vectors(g.cin, [&](std::int64_t c, int n) {
        vf in[tile_points], out[tile_points];
        for (int k = 0; k < tile_points; ++k) in[k] = from[k] ? load_n(from[k] + c, n) : vf{};
        both_ways<tile_in, tile_in>(in, out, input_line);
        for (int k = 0; k < tile_points; ++k) store_n(at + k * apart + c, out[k], n);
      });
    }
  }
}
