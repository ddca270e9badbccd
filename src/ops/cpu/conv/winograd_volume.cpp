// 3x3x3 convolutions: Winograd's F(4x4, 3x3) in the planes, each frame's tiles transformed once,
// and among the frames one of two ways.
//
// Where the transformed weights are few, F(2, 3) among the frames too: two frames of results by
// four products instead of six,
//
//   y0 = m0 + m1 + m2    m0 = (d0 - d2) g0    m1 = (d1 + d2) (g0 + g1 + g2) / 2
//   y1 = m1 - m2 - m3    m3 = (d1 - d3) g2    m2 = (d2 - d1) (g0 - g1 + g2) / 2
//
// point by point of the plane, so that what lies between never leaves the second-level cache.
//
// Wide layers over small planes have more weights than activations; to transform them all into
// memory and read them again would take longer than the products. There each task is a panel of
// output channels: it transforms its weights a chunk of input channels at a time and multiplies
// with them at once.
#include <immintrin.h>
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
constexpr std::int64_t band_floats = 8 << 20, deep_frames = 64, deep_channels = 32;

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

// lanes: scratch for 27 channels' worth of vectors. to [3][36][channels][width]: the weights from
// input channels [c0, c0 + channels) to outputs [o0, o0 + width).
void take_weights(const Geometry& g, const float* w, std::int64_t o0, std::int64_t width,
                  std::int64_t c0, std::int64_t channels, float* lanes, float* to) {
  for (std::int64_t v = 0; v < width; v += W) {
    const int outs = static_cast<int>(std::clamp<std::int64_t>(g.cout - o0 - v, 0, W));
    gather_lanes(w + (o0 + v) * g.cin * 27, g.cin * 27, outs, c0 * 27, channels * 27, lanes);
    for (std::int64_t c = 0; c < channels; ++c)
      for (int a = 0; a < 3; ++a) {
        vf kernel[9], out[tile_points];
        for (int k = 0; k < 9; ++k) kernel[k] = load(lanes + (c * 27 + a * 9 + k) * W);
        both_ways<3, tile_in>(kernel, out, weight_line);
        float* at = to + (a * tile_points * channels + c) * width + v;
        for (int k = 0; k < tile_points; ++k) store(at + k * channels * width, out[k]);
      }
  }
}

// products [36][count][to][width] += inputs [36][.., t, in_stride], from tile `first` on and
// `apart` floats from point to point, times the weights of `channels` input channels.
void add_products(const Geometry& g, std::int64_t count, std::int64_t channels, std::int64_t width,
                  const float* inputs, std::int64_t in_stride, std::int64_t apart,
                  const float* weights, float* products) {
  for (std::int64_t a = 0; a < 3; ++a) {
    const std::int64_t shift = a - g.front, from = std::max<std::int64_t>(0, -shift),
                       to = std::min(g.to, g.t - shift);
    for (int k = 0; k < tile_points; ++k)
      for (std::int64_t tile = 0; tile < count && from < to; ++tile)
        small_gemm(to - from, width, channels,
                   inputs + k * apart + (tile * g.t + from + shift) * in_stride, in_stride, 1,
                   weights + (a * tile_points + k) * channels * width, width,
                   products + ((k * count + tile) * g.to + from) * width, width, true);
  }
}

void by_panels(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
               float* y) {
  const Tiles tiles(g);
  const std::int64_t in_stride = padded_stride(g.cin), of_tile = tile_points * g.t * in_stride;
  const std::int64_t band = std::clamp<std::int64_t>(band_floats / of_tile, 1, tiles.count);
  const std::int64_t block = std::clamp<std::int64_t>(deep_frames / g.to, 1, band);
  const std::int64_t outs = padded(g.cout), panels = (outs + panel_width - 1) / panel_width;
  const std::int64_t channels = std::min(deep_channels, g.cin);
  const std::int64_t of_lanes = channels * 27 * W,
                     of_weights = 3 * tile_points * channels * panel_width,
                     of_products = tile_points * block * g.to * panel_width,
                     each = of_lanes + of_weights + of_products;
  const int threads = static_cast<int>(
      std::min<std::int64_t>(omp_get_max_threads(), panels * ((band + block - 1) / block)));
  const Tensor transformed = floats(band * of_tile), between = floats(threads * each);
  if (planning()) return;
  float* inputs = transformed.data<float>();
  for (std::int64_t first = 0; first < tiles.count; first += band) {
    const std::int64_t count = std::min(band, tiles.count - first), apart = count * g.t * in_stride;
    const std::int64_t blocks = (count + block - 1) / block;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < count * g.t; ++i)
        take_frame(g, tiles, x, first + i / g.t, i % g.t, apart, inputs + i * in_stride);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t task = 0; task < panels * blocks; ++task) {
        float* lanes = between.data<float>() + omp_get_thread_num() * each;
        float *weights = lanes + of_lanes, *products = weights + of_weights;
        const std::int64_t at = task % blocks * block, some = std::min(block, count - at);
        const std::int64_t o0 = task / blocks * panel_width,
                           width = std::min(panel_width, outs - o0);
        std::fill_n(products, tile_points * some * g.to * width, 0.0f);
        for (std::int64_t c = 0; c < g.cin; c += channels) {
          const std::int64_t n = std::min(channels, g.cin - c);
          take_weights(g, w, o0, width, c, n, lanes, weights);
          add_products(g, some, n, width, inputs + at * g.t * in_stride + c, in_stride, apart,
                       weights, products);
        }
        for (std::int64_t i = 0; i < some * g.to; ++i)
          give_frame(g, tiles, products + i * width, some * g.to * width, first + at + i / g.to,
                     i % g.to, o0, std::min(width, g.cout - o0), bias, add, y);
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
    by_panels(g, x, w, bias, add, y);
}

WEFT_CPU_END
