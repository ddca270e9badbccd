// 3x3x3 convolutions, and planes of many channels: Winograd's F(4x4, 3x3) in the planes, each
// frame's tiles transformed once, and among the frames one of two ways.
//
// Where the transformed weights are few, F(2, 3) among the frames too: two frames of results by
// four products instead of six,
//
//   y0 = m0 + m1 + m2    m0 = (d0 - d2) g0    m1 = (d1 + d2) (g0 + g1 + g2) / 2
//   y1 = m1 - m2 - m3    m3 = (d1 - d3) g2    m2 = (d2 - d1) (g0 - g1 + g2) / 2
//
// point by point of the plane, so that what lies between never leaves the second-level cache.
//
// Wide layers have more weights than that: to transform them all into memory and to read them
// again would take longer than the products, where the planes are small. There a group of output
// channels goes at a time, whose transformed weights stay in the third-level cache, and all
// threads multiply with them. The transformed inputs are kept for the next group.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/conv/winograd.h"
//
#include "ops/cpu/conv/panel.h"

constexpr int pair_points = 4;                  // products of two frames
constexpr std::int64_t most_weights = 8 << 20;  // floats, transformed
constexpr std::int64_t block_frames = 96;       // tiles of a thread's block

// The tiles of all planes.
struct Tiles {
  explicit Tiles(const Geometry& g)
      : rows((g.ho + tile_out - 1) / tile_out),
        columns((g.wo + tile_out - 1) / tile_out),
        count(g.n * rows * columns) {}
  std::int64_t sample(std::int64_t tile) const { return tile / (rows * columns); }
  std::int64_t row(std::int64_t tile) const { return tile / columns % rows * tile_out; }
  std::int64_t column(std::int64_t tile) const { return tile % columns * tile_out; }
  std::int64_t rows, columns, count;
};

bool has_few_weights(const Geometry& g) {
  return tile_points * pair_points * g.cin * padded(g.cout) <= most_weights;
}

// Frame t of a tile into 36 times [cin].
void take_frame(const Geometry& g, const Tiles& tiles, const float* x, std::int64_t tile,
                std::int64_t t, std::int64_t apart, float* to) {
  transform_tile(g, x + (tiles.sample(tile) * g.t + t) * g.h * g.w * g.cin, tiles.row(tile),
                 tiles.column(tile), apart, to);
}
void give_frame(const Geometry& g, const Tiles& tiles, const float* products, std::int64_t apart,
                std::int64_t tile, std::int64_t t, std::int64_t first, std::int64_t outs,
                const float* bias, bool add, float* y) {
  transform_result(g, products, apart, tiles.row(tile), tiles.column(tile), first, outs, bias, add,
                   y + (tiles.sample(tile) * g.to + t) * g.ho * g.wo * g.cout);
}

// ---- Pairs of frames ----

struct Pairs {
  explicit Pairs(const Geometry& geometry) : g(geometry), tiles(g) {
    pairs = (g.to + 1) / 2;
    outs = padded(g.cout);
    in_stride = padded_stride(g.cin);
    out_stride = padded_stride(g.cout);
    const std::int64_t threads = omp_get_max_threads();
    const std::int64_t most = std::max<std::int64_t>(1, block_frames / std::max(g.t, g.to));
    const std::int64_t rounds = (tiles.count + most * threads - 1) / (most * threads);
    block = (tiles.count + rounds * threads - 1) / (rounds * threads);
    blocks = (tiles.count + block - 1) / block;
    of_inputs = tile_points * block * g.t * in_stride;
    of_results = tile_points * block * g.to * out_stride;
    of_sums = pair_points * block * pairs * in_stride;
    of_products = pair_points * block * pairs * out_stride;
  }
  std::int64_t floats_of_thread() const { return of_inputs + of_results + of_sums + of_products; }

  Geometry g;
  Tiles tiles;
  std::int64_t pairs, outs, in_stride, out_stride;
  std::int64_t block, blocks;  // of tiles
  std::int64_t of_inputs, of_results, of_sums, of_products;
};

// to [36][4][panels][cin][panel_width].
void transform_pair_weights(const Pairs& p, const float* w, float* to) {
  const Geometry& g = p.g;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < p.outs; v += W)
    for (std::int64_t i = 0; i < g.cin; ++i) {
      const std::int64_t first = v / panel_width * panel_width;
      const std::int64_t width = std::min(panel_width, p.outs - first);
      alignas(64) float taken[27 * W];
      gather_lanes(w + v * g.cin * 27, g.cin * 27,
                   static_cast<int>(std::min<std::int64_t>(W, g.cout - v)), i * 27, 27, taken);
      vf plane[3][tile_points];
      for (int a = 0; a < 3; ++a) {
        vf kernel[9];
        for (int k = 0; k < 9; ++k) kernel[k] = load(taken + (a * 9 + k) * W);
        both_ways<3, tile_in>(kernel, plane[a], weight_line);
      }
      float* at = to + g.cin * first + i * width + v - first;
      for (int k = 0; k < tile_points; ++k) {
        const vf outer = (plane[0][k] + plane[2][k]) * 0.5f, inner = plane[1][k] * 0.5f;
        for (const vf& value : {plane[0][k], outer + inner, outer - inner, plane[2][k]}) {
          store(at, value);
          at += g.cin * p.outs;
        }
      }
    }
}

// sums [4][count][pairs][in_stride] of inputs [count][t][in_stride], of one point.
void take_pairs(const Pairs& p, std::int64_t count, const float* inputs, float* sums) {
  const Geometry& g = p.g;
  const std::int64_t apart = count * p.pairs * p.in_stride;
  for (std::int64_t tile = 0; tile < count; ++tile)
    for (std::int64_t u = 0; u < p.pairs; ++u, sums += p.in_stride) {
      const float* from[4];  // null for frames of zeros
      for (int k = 0; k < 4; ++k) {
        const std::int64_t t = 2 * u + k - g.front;
        from[k] = t < 0 || t >= g.t ? nullptr : inputs + (tile * g.t + t) * p.in_stride;
      }
      for (std::int64_t c = 0; c < g.cin; c += W) {
        vf d[4];
        for (int k = 0; k < 4; ++k) d[k] = from[k] ? load(from[k] + c) : vf{};
        store(sums + c, d[0] - d[2]);
        store(sums + apart + c, d[1] + d[2]);
        store(sums + 2 * apart + c, d[2] - d[1]);
        store(sums + 3 * apart + c, d[1] - d[3]);
      }
    }
}

// results [count][to][out_stride] of products [4][count][pairs][out_stride], of one point.
void give_pairs(const Pairs& p, std::int64_t count, const float* products, float* results) {
  const Geometry& g = p.g;
  const std::int64_t apart = count * p.pairs * p.out_stride;
  for (std::int64_t tile = 0; tile < count; ++tile)
    for (std::int64_t u = 0; u < p.pairs; ++u, products += p.out_stride) {
      float* to = results + (tile * g.to + 2 * u) * p.out_stride;
      const bool both = 2 * u + 1 < g.to;
      for (std::int64_t c = 0; c < p.outs; c += W) {
        const vf m0 = load(products + c), m1 = load(products + apart + c);
        const vf m2 = load(products + 2 * apart + c), m3 = load(products + 3 * apart + c);
        store(to + c, m0 + m1 + m2);
        if (both) store(to + p.out_stride + c, m1 - m2 - m3);
      }
    }
}

void by_pairs(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
              float* y) {
  const Pairs p(g);
  const std::int64_t of_point = g.cin * p.outs;
  const Tensor transformed = floats(tile_points * pair_points * of_point);
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), p.blocks));
  const Tensor between = floats(threads * p.floats_of_thread());
  if (planning()) return;
  transform_pair_weights(p, w, transformed.data<float>());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t k = 0; k < p.blocks; ++k) {
    const std::int64_t first = k * p.block, count = std::min(p.block, p.tiles.count - first);
    const std::int64_t in_apart = count * g.t * p.in_stride,
                       out_apart = count * g.to * p.out_stride, rows = count * p.pairs;
    float* inputs = between.data<float>() + omp_get_thread_num() * p.floats_of_thread();
    float *results = inputs + p.of_inputs, *sums = results + p.of_results,
          *products = sums + p.of_sums;
    for (std::int64_t i = 0; i < count * g.t; ++i)
      take_frame(g, p.tiles, x, first + i / g.t, i % g.t, in_apart, inputs + i * p.in_stride);
    for (int point = 0; point < tile_points; ++point) {
      take_pairs(p, count, inputs + point * in_apart, sums);
      const float* b = transformed.data<float>() + point * pair_points * of_point;
      for (int m = 0; m < pair_points; ++m, b += of_point)
        for (std::int64_t o = 0; o < p.outs; o += panel_width)
          small_gemm(rows, std::min(panel_width, p.outs - o), g.cin, sums + m * rows * p.in_stride,
                     p.in_stride, 1, b + o * g.cin, std::min(panel_width, p.outs - o),
                     products + m * rows * p.out_stride + o, p.out_stride, false);
      give_pairs(p, count, products, results + point * out_apart);
    }
    for (std::int64_t i = 0; i < count * g.to; ++i)
      give_frame(g, p.tiles, results + i * p.out_stride, out_apart, first + i / g.to, i % g.to, 0,
                 g.cout, bias, add, y);
  }
}

// ---- Many weights ----

// Floats of transformed weights and of transformed inputs that are in memory at a time: both stay
// in a third-level cache.
constexpr std::int64_t group_floats = 5 << 19, band_floats = 5 << 20;
constexpr std::int64_t largest_cached = 4 << 20;  // floats
constexpr std::int64_t block_rows = 96;           // frames of tiles of a thread's block
constexpr std::int64_t channels_at_once = 32;     // of weights that are gathered

// From one point to the next: an odd number of cache lines, so that points do not fall on few sets.
std::int64_t apart(std::int64_t n) { return ((n + 15) / 16 | 1) * 16; }

struct Groups {
  explicit Groups(const Geometry& geometry) : g(geometry) {
    if (g.kt == 1) g.n *= g.t, g.t = g.to = 1;  // frames know nothing of each other
    Geometry planes = g;
    planes.to = 1;
    places = plan(planes);
    tiles = places.tiles;
    in_stride = padded_stride(g.cin);
    const std::int64_t threads = omp_get_max_threads();
    const std::int64_t most = std::max<std::int64_t>(1, block_rows / std::max(g.t, g.to));
    const std::int64_t rounds = (tiles + most * threads - 1) / (most * threads);
    block = (tiles + rounds * threads - 1) / (rounds * threads);
    of_inputs = tile_points * apart(block * g.t * in_stride);
    blocks = (tiles + block - 1) / block;
    band = std::min(blocks, std::max(threads, band_floats / of_inputs / threads * threads));
    const std::int64_t vectors = padded(g.cout) / W;
    const std::int64_t fit =
        std::max<std::int64_t>(1, group_floats / (tile_points * g.kt * g.cin * W));
    const std::int64_t groups = (vectors + fit - 1) / fit;
    width = (vectors + groups - 1) / groups * W;
    // A task's results of all points stay in the second-level cache; and there are enough tasks.
    const std::int64_t parts = std::max((width + panel_width - 1) / panel_width,
                                        std::min(width / W, (threads + blocks - 1) / blocks));
    part = (width / W + parts - 1) / parts * W;
    of_point = apart(g.cin * width);
    of_products = tile_points * apart(block * g.to * part);
    of_lanes = channels_at_once * g.kt * 9 * W;
  }

  Geometry g;
  Plan places;
  std::int64_t tiles, in_stride;
  std::int64_t block, blocks, band;  // tiles of a block, blocks, blocks of a band
  std::int64_t width, part;          // of a group of output channels, and of a task's
  std::int64_t of_inputs, of_point, of_products, of_lanes;
};

// Weights from `channels` input channels, c0 and on, to the vector of outputs o0 + v: into
// to [kt][36][cin][width]. lanes: scratch.
void take_weights(const Groups& p, const float* w, std::int64_t o0, std::int64_t v, std::int64_t c0,
                  std::int64_t channels, float* lanes, float* to) {
  const Geometry& g = p.g;
  const std::int64_t taps = 9 * g.kt;
  const int outs = static_cast<int>(std::clamp<std::int64_t>(g.cout - o0 - v, 0, W));
  gather_lanes(w + (o0 + v) * g.cin * taps, g.cin * taps, outs, c0 * taps, channels * taps, lanes);
  for (std::int64_t c = 0; c < channels; ++c)
    for (std::int64_t a = 0; a < g.kt; ++a) {
      vf kernel[9], out[tile_points];
      for (int k = 0; k < 9; ++k) kernel[k] = load(lanes + (c * taps + a * 9 + k) * W);
      both_ways<3, tile_in>(kernel, out, weight_line);
      float* at = to + a * tile_points * p.of_point + (c0 + c) * p.width + v;
      for (int k = 0; k < tile_points; ++k) store(at + k * p.of_point, out[k]);
    }
}

// products [to * count, columns] = inputs [t][count][in_stride] times as many columns of the
// weights, of one point. A frame's tiles lie together: those of all frames are the rows of one
// matrix, and what the kernel's next frame sees are the rows `count` below.
void add_frames(const Groups& p, std::int64_t count, std::int64_t columns, const float* inputs,
                const float* weights, float* products) {
  const Geometry& g = p.g;
  constexpr std::int64_t rows_at_once = 24, piece = 128;  // as winograd.cpp has them
  std::fill_n(products, count * g.to * columns, 0.0f);
  for (std::int64_t o = 0; o < columns; o += panel_width)
    for (std::int64_t a = 0; a < g.kt; ++a) {
      const std::int64_t shift = a - g.front, from = std::max<std::int64_t>(0, -shift) * count,
                         to = std::min(g.to, g.t - shift) * count;
      for (std::int64_t k = 0; k < g.cin; k += piece)
        for (std::int64_t r = from; r < to; r += rows_at_once)
          small_gemm(std::min(rows_at_once, to - r), std::min(panel_width, columns - o),
                     std::min(piece, g.cin - k), inputs + (r + shift * count) * p.in_stride + k,
                     p.in_stride, 1, weights + a * tile_points * p.of_point + k * p.width + o,
                     p.width, products + r * columns + o, columns, true);
    }
}

void by_groups(const Geometry& geometry, const float* x, const float* w, const float* bias,
               bool add, float* y) {
  const Groups p(geometry);
  const Geometry& g = p.g;
  const int threads = omp_get_max_threads();
  const std::int64_t each = std::max(p.of_products, p.of_lanes);
  const Tensor of_inputs = floats(p.band * p.of_inputs),
               of_weights = floats(g.kt * tile_points * p.of_point),
               of_threads = floats(threads * each);
  if (planning()) return;
  float *inputs = of_inputs.data<float>(), *weights = of_weights.data<float>();
  const std::int64_t runs = (g.cin + channels_at_once - 1) / channels_at_once;
  const std::int64_t parts = (p.width + p.part - 1) / p.part;
#pragma omp parallel num_threads(threads)
  {
    float* own = of_threads.data<float>() + omp_get_thread_num() * each;
    for (std::int64_t first = 0; first < p.blocks; first += p.band) {
      const std::int64_t band = std::min(p.band, p.blocks - first);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < band * g.t * p.block; ++i) {
        const std::int64_t b = i / (g.t * p.block), t = i / p.block % g.t, tile = i % p.block;
        const std::int64_t at = (first + b) * p.block, count = std::min(p.block, p.tiles - at);
        if (tile >= count) continue;
        const Place q = place(p.places, at + tile);
        transform_tile(g, x + (q.sample * g.t + t) * g.h * g.w * g.cin, q.row, q.column,
                       apart(count * g.t * p.in_stride),
                       inputs + b * p.of_inputs + (t * count + tile) * p.in_stride);
      }
      for (std::int64_t o0 = 0; o0 < g.cout; o0 += p.width) {
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < p.width / W * runs; ++i) {
          const std::int64_t c0 = i % runs * channels_at_once;
          take_weights(p, w, o0, i / runs * W, c0, std::min(channels_at_once, g.cin - c0), own,
                       weights);
        }
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < band * parts; ++i) {
          const std::int64_t b = i / parts, o = i % parts * p.part,
                             columns = std::min(p.part, p.width - o);
          if (o0 + o >= g.cout) continue;
          const std::int64_t at = (first + b) * p.block, count = std::min(p.block, p.tiles - at);
          const std::int64_t in_apart = apart(count * g.t * p.in_stride),
                             out_apart = apart(count * g.to * columns);
          for (int k = 0; k < tile_points; ++k)
            add_frames(p, count, columns, inputs + b * p.of_inputs + k * in_apart,
                       weights + k * p.of_point + o, own + k * out_apart);
          for (std::int64_t r = 0; r < count * g.to; ++r) {
            const Place q = place(p.places, at + r % count);
            transform_result(g, own + r * columns, out_apart, q.row, q.column, o0 + o,
                             std::min(columns, g.cout - o0 - o), bias, add,
                             y + (q.sample * g.to + r / count) * g.ho * g.wo * g.cout);
          }
        }
      }
    }
  }
}

}  // namespace

bool volume_fits(const Geometry& g) {
  return g.kt == 3 && g.stride_t == 1 && g.dilation == 1 && winograd_fits(g);
}

void volume_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y) {
  if (has_few_weights(g))
    by_pairs(g, x, w, bias, add, y);
  else
    by_groups(g, x, w, bias, add, y);
}

bool wide_fits(const Geometry& g) {
  // With many tiles transformed weights are read often enough to be worth their way to memory.
  constexpr std::int64_t most_tiles = 512;
  return g.kt == 1 && g.stride_t == 1 && tile_points * g.cin * padded(g.cout) > largest_cached &&
         g.n * g.to * g.ho * g.wo <= most_tiles * tile_out * tile_out;
}

void wide_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                  float* y) {
  by_groups(g, x, w, bias, add, y);
}

WEFT_CPU_END
