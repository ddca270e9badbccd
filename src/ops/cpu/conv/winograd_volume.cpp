// 3x3x3 convolutions, and 3x3 convolutions of many channels: Winograd's F(4x4, 3x3) in the planes,
// each frame's tiles transformed once, and one of two methods along the frames.
//
// By pairs of frames, where the transformed weights fit: F(2, 3) along the frames too, two frames
// of results by four products instead of six,
//
//   y0 = m0 + m1 + m2    m0 = (d0 - d2) g0    m1 = (d1 + d2) (g0 + g1 + g2) / 2
//   y1 = m1 - m2 - m3    m3 = (d1 - d3) g2    m2 = (d2 - d1) (g0 - g1 + g2) / 2
//
// for one point of the plane after the other, so that intermediate values never leave the
// second-level cache.
//
// By groups of output channels, where they do not fit: to transform all weights into memory and to
// read them again would take longer than the products, where the planes are small. Weights are
// transformed for a group of output channels at a time, stay in the third-level cache, and all
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

constexpr int pair_points = 4;                      // products of two frames
constexpr std::int64_t max_pair_weights = 8 << 20;  // floats, transformed
constexpr std::int64_t max_block_frames = 96;       // frames of tiles in a thread's block

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

bool pair_weights_fit(const Geometry& g) {
  return tile_points * pair_points * g.cin * padded(g.cout) <= max_pair_weights;
}

// Transforms frame t of a tile: for each point [cin].
void transform_input_frame(const Geometry& g, const Tiles& tiles, const float* x, std::int64_t tile,
                           std::int64_t t, std::int64_t point_stride, float* to) {
  transform_input_tile(g, x + (tiles.sample(tile) * g.t + t) * g.h * g.w * g.cin, tiles.row(tile),
                       tiles.column(tile), point_stride, to);
}
void transform_output_frame(const Geometry& g, const Tiles& tiles, const float* products,
                            std::int64_t point_stride, std::int64_t tile, std::int64_t t,
                            const float* bias, bool add, float* y) {
  transform_output_tile(g, products, point_stride, tiles.row(tile), tiles.column(tile), 0, g.cout,
                        bias, add, y + (tiles.sample(tile) * g.to + t) * g.ho * g.wo * g.cout);
}

// ---- Pairs of frames ----

// Sizes and strides, and the buffers of a thread in floats.
struct Pairs {
  explicit Pairs(const Geometry& geometry) : g(geometry), tiles(g) {
    pairs = (g.to + 1) / 2;
    padded_cout = padded(g.cout);
    in_stride = padded_stride(g.cin);
    out_stride = padded_stride(g.cout);
    const std::int64_t threads = omp_get_max_threads();
    const std::int64_t max_block =
        std::max<std::int64_t>(1, max_block_frames / std::max(g.t, g.to));
    const std::int64_t rounds = (tiles.count + max_block * threads - 1) / (max_block * threads);
    block = (tiles.count + rounds * threads - 1) / (rounds * threads);
    blocks = (tiles.count + block - 1) / block;
    input_floats = tile_points * block * g.t * in_stride;
    result_floats = tile_points * block * g.to * out_stride;
    sum_floats = pair_points * block * pairs * in_stride;
    product_floats = pair_points * block * pairs * out_stride;
  }
  std::int64_t thread_floats() const {
    return input_floats + result_floats + sum_floats + product_floats;
  }

  Geometry g;
  Tiles tiles;
  std::int64_t pairs, padded_cout, in_stride, out_stride;
  std::int64_t block, blocks;  // tiles of a block, blocks
  std::int64_t input_floats, result_floats, sum_floats, product_floats;
};

// Transforms weights [cout,cin,3,3,3]: to [36][4][panels][cin][panel_width].
void transform_pair_weights(const Pairs& p, const float* w, float* to) {
  const Geometry& g = p.g;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < p.padded_cout; v += W)
    for (std::int64_t i = 0; i < g.cin; ++i) {
      const std::int64_t first = v / panel_width * panel_width;
      const std::int64_t width = std::min(panel_width, p.padded_cout - first);
      alignas(64) float gathered[27 * W];
      gather_lanes(w + v * g.cin * 27, g.cin * 27,
                   static_cast<int>(std::min<std::int64_t>(W, g.cout - v)), i * 27, 27, gathered);
      vf plane[3][tile_points];
      for (int a = 0; a < 3; ++a) {
        vf kernel[9];
        for (int k = 0; k < 9; ++k) kernel[k] = load(gathered + (a * 9 + k) * W);
        transform_2d<3, tile_in>(kernel, plane[a], weight_transform);
      }
      float* at = to + g.cin * first + i * width + v - first;
      for (int k = 0; k < tile_points; ++k) {
        const vf outer = (plane[0][k] + plane[2][k]) * 0.5f, inner = plane[1][k] * 0.5f;
        for (const vf& value : {plane[0][k], outer + inner, outer - inner, plane[2][k]}) {
          store(at, value);
          at += g.cin * p.padded_cout;
        }
      }
    }
}

// Transforms the frames of one point: sums [4][count][pairs][in_stride] from inputs
// [count][t][in_stride].
void transform_input_pairs(const Pairs& p, std::int64_t count, const float* inputs, float* sums) {
  const Geometry& g = p.g;
  const std::int64_t product_stride = count * p.pairs * p.in_stride;
  for (std::int64_t tile = 0; tile < count; ++tile)
    for (std::int64_t u = 0; u < p.pairs; ++u, sums += p.in_stride) {
      const float* from[4];  // null: a frame of zeros
      for (int k = 0; k < 4; ++k) {
        const std::int64_t t = 2 * u + k - g.front;
        from[k] = t < 0 || t >= g.t ? nullptr : inputs + (tile * g.t + t) * p.in_stride;
      }
      for (std::int64_t c = 0; c < g.cin; c += W) {
        vf d[4];
        for (int k = 0; k < 4; ++k) d[k] = from[k] ? load(from[k] + c) : vf{};
        store(sums + c, d[0] - d[2]);
        store(sums + product_stride + c, d[1] + d[2]);
        store(sums + 2 * product_stride + c, d[2] - d[1]);
        store(sums + 3 * product_stride + c, d[1] - d[3]);
      }
    }
}

// The same back: results [count][to][out_stride] from products [4][count][pairs][out_stride].
void transform_output_pairs(const Pairs& p, std::int64_t count, const float* products,
                            float* results) {
  const Geometry& g = p.g;
  const std::int64_t product_stride = count * p.pairs * p.out_stride;
  for (std::int64_t tile = 0; tile < count; ++tile)
    for (std::int64_t u = 0; u < p.pairs; ++u, products += p.out_stride) {
      float* to = results + (tile * g.to + 2 * u) * p.out_stride;
      const bool both = 2 * u + 1 < g.to;
      for (std::int64_t c = 0; c < p.padded_cout; c += W) {
        const vf m0 = load(products + c), m1 = load(products + product_stride + c);
        const vf m2 = load(products + 2 * product_stride + c),
                 m3 = load(products + 3 * product_stride + c);
        store(to + c, m0 + m1 + m2);
        if (both) store(to + p.out_stride + c, m1 - m2 - m3);
      }
    }
}

void forward_by_pairs(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  const Pairs p(g);
  const std::int64_t point_floats = g.cin * p.padded_cout;
  const Tensor transformed = floats(tile_points * pair_points * point_floats);
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), p.blocks));
  const Tensor buffers = floats(threads * p.thread_floats());
  if (planning()) return;
  transform_pair_weights(p, w, transformed.data<float>());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t k = 0; k < p.blocks; ++k) {
    const std::int64_t first = k * p.block, count = std::min(p.block, p.tiles.count - first);
    const std::int64_t in_point_stride = count * g.t * p.in_stride,
                       out_point_stride = count * g.to * p.out_stride, rows = count * p.pairs;
    float* inputs = buffers.data<float>() + omp_get_thread_num() * p.thread_floats();
    float *results = inputs + p.input_floats, *sums = results + p.result_floats,
          *products = sums + p.sum_floats;
    for (std::int64_t i = 0; i < count * g.t; ++i)
      transform_input_frame(g, p.tiles, x, first + i / g.t, i % g.t, in_point_stride,
                            inputs + i * p.in_stride);
    for (int point = 0; point < tile_points; ++point) {
      transform_input_pairs(p, count, inputs + point * in_point_stride, sums);
      const float* b = transformed.data<float>() + point * pair_points * point_floats;
      for (int m = 0; m < pair_points; ++m, b += point_floats)
        for (std::int64_t o = 0; o < p.padded_cout; o += panel_width)
          small_gemm(rows, std::min(panel_width, p.padded_cout - o), g.cin,
                     sums + m * rows * p.in_stride, p.in_stride, 1, b + o * g.cin,
                     std::min(panel_width, p.padded_cout - o),
                     products + m * rows * p.out_stride + o, p.out_stride, false);
      transform_output_pairs(p, count, products, results + point * out_point_stride);
    }
    for (std::int64_t i = 0; i < count * g.to; ++i)
      transform_output_frame(g, p.tiles, results + i * p.out_stride, out_point_stride,
                             first + i / g.to, i % g.to, bias, add, y);
  }
}

// ---- Groups of output channels ----

// Floats of a group's transformed weights, and of a band's transformed inputs: both stay in a
// third-level cache.
constexpr std::int64_t group_floats = 5 << 19, band_floats = 5 << 20;
constexpr std::int64_t max_cached_weights = 4 << 20;  // floats, transformed
constexpr std::int64_t channels_at_once = 32;  // input channels of weights gathered at a time

// Floats from one point to the next: an odd number of cache lines, so that the points of a value do
// not fall on few sets of a cache.
std::int64_t padded_point_stride(std::int64_t n) { return ((n + 15) / 16 | 1) * 16; }

// Sizes and strides. A band: the blocks of tiles whose inputs are transformed at a time.
struct Groups {
  explicit Groups(const Geometry& geometry) : g(geometry) {
    if (g.kt == 1) g.n *= g.t, g.t = g.to = 1;  // frames are independent
    Geometry planes = g;
    planes.to = 1;
    tiling = plan(planes);
    tiles = tiling.tiles;
    in_stride = padded_stride(g.cin);
    const std::int64_t threads = omp_get_max_threads();
    const std::int64_t max_block =
        std::max<std::int64_t>(1, max_block_frames / std::max(g.t, g.to));
    const std::int64_t rounds = (tiles + max_block * threads - 1) / (max_block * threads);
    block = (tiles + rounds * threads - 1) / (rounds * threads);
    input_floats = tile_points * padded_point_stride(block * g.t * in_stride);
    blocks = (tiles + block - 1) / block;
    band = std::min(blocks, std::max(threads, band_floats / input_floats / threads * threads));
    const std::int64_t vectors = padded(g.cout) / W;
    const std::int64_t fit =
        std::max<std::int64_t>(1, group_floats / (tile_points * g.kt * g.cin * W));
    const std::int64_t groups = (vectors + fit - 1) / fit;
    width = (vectors + groups - 1) / groups * W;
    // A task's results of all points stay in the second-level cache; and there are enough tasks.
    const std::int64_t parts = std::max((width + panel_width - 1) / panel_width,
                                        std::min(width / W, (threads + blocks - 1) / blocks));
    part = (width / W + parts - 1) / parts * W;
    point_floats = padded_point_stride(g.cin * width);
    product_floats = tile_points * padded_point_stride(block * g.to * part);
    gather_floats = channels_at_once * g.kt * 9 * W;
  }

  Geometry g;
  Plan tiling;
  std::int64_t tiles, in_stride;
  std::int64_t block, blocks, band;  // tiles of a block, blocks, blocks of a band
  std::int64_t width, part;          // of a group of output channels, and of a task's
  std::int64_t input_floats, point_floats, product_floats, gather_floats;
};

// Transforms weights of input channels [c0, c0 + channels) and a vector of output channels from
// o0 + v on: into to [kt][36][cin][width], of the group from o0 on. lanes: scratch.
void transform_group_weights(const Groups& p, const float* w, std::int64_t o0, std::int64_t v,
                             std::int64_t c0, std::int64_t channels, float* lanes, float* to) {
  const Geometry& g = p.g;
  const std::int64_t taps = 9 * g.kt;
  const int outputs = static_cast<int>(std::clamp<std::int64_t>(g.cout - o0 - v, 0, W));
  gather_lanes(w + (o0 + v) * g.cin * taps, g.cin * taps, outputs, c0 * taps, channels * taps,
               lanes);
  for (std::int64_t c = 0; c < channels; ++c)
    for (std::int64_t a = 0; a < g.kt; ++a) {
      vf kernel[9], out[tile_points];
      for (int k = 0; k < 9; ++k) kernel[k] = load(lanes + (c * taps + a * 9 + k) * W);
      transform_2d<3, tile_in>(kernel, out, weight_transform);
      float* at = to + a * tile_points * p.point_floats + (c0 + c) * p.width + v;
      for (int k = 0; k < tile_points; ++k) store(at + k * p.point_floats, out[k]);
    }
}

// Multiplies the frames of one point: products [to * count, columns] = inputs [t][count][in_stride]
// times `columns` columns of the weights, summed over the kernel's frames. The tiles of a frame lie
// together: those of all frames are the rows of one matrix, and the kernel's next frame sees the
// rows `count` below.
void multiply_frames(const Groups& p, std::int64_t count, std::int64_t columns, const float* inputs,
                     const float* weights, float* products) {
  const Geometry& g = p.g;
  // As in winograd.cpp: a sample's bits must not depend on which of the two computes its batch.
  constexpr std::int64_t row_block = 24, depth_block = 128;
  std::fill_n(products, count * g.to * columns, 0.0f);
  for (std::int64_t o = 0; o < columns; o += panel_width)
    for (std::int64_t a = 0; a < g.kt; ++a) {
      const std::int64_t shift = a - g.front, from = std::max<std::int64_t>(0, -shift) * count,
                         to = std::min(g.to, g.t - shift) * count;
      for (std::int64_t k = 0; k < g.cin; k += depth_block)
        for (std::int64_t r = from; r < to; r += row_block)
          small_gemm(std::min(row_block, to - r), std::min(panel_width, columns - o),
                     std::min(depth_block, g.cin - k),
                     inputs + (r + shift * count) * p.in_stride + k, p.in_stride, 1,
                     weights + a * tile_points * p.point_floats + k * p.width + o, p.width,
                     products + r * columns + o, columns, true);
    }
}

void forward_by_groups(const Geometry& geometry, const float* x, const float* w, const float* bias,
                       bool add, float* y) {
  const Groups p(geometry);
  const Geometry& g = p.g;
  const int threads = omp_get_max_threads();
  const std::int64_t thread_floats = std::max(p.product_floats, p.gather_floats);
  const Tensor input_buffer = floats(p.band * p.input_floats),
               weight_buffer = floats(g.kt * tile_points * p.point_floats),
               thread_buffers = floats(threads * thread_floats);
  if (planning()) return;
  float *inputs = input_buffer.data<float>(), *weights = weight_buffer.data<float>();
  const std::int64_t channel_runs = (g.cin + channels_at_once - 1) / channels_at_once;
  const std::int64_t parts = (p.width + p.part - 1) / p.part;
#pragma omp parallel num_threads(threads)
  {
    float* buffer = thread_buffers.data<float>() + omp_get_thread_num() * thread_floats;
    for (std::int64_t first = 0; first < p.blocks; first += p.band) {
      const std::int64_t band = std::min(p.band, p.blocks - first);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < band * g.t * p.block; ++i) {
        const std::int64_t b = i / (g.t * p.block), t = i / p.block % g.t, tile = i % p.block;
        const std::int64_t at = (first + b) * p.block, count = std::min(p.block, p.tiles - at);
        if (tile >= count) continue;
        const TileOrigin origin = tile_origin(p.tiling, at + tile);
        transform_input_tile(g, x + (origin.sample * g.t + t) * g.h * g.w * g.cin, origin.row,
                             origin.column, padded_point_stride(count * g.t * p.in_stride),
                             inputs + b * p.input_floats + (t * count + tile) * p.in_stride);
      }
      for (std::int64_t o0 = 0; o0 < g.cout; o0 += p.width) {
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < p.width / W * channel_runs; ++i) {
          const std::int64_t c0 = i % channel_runs * channels_at_once;
          transform_group_weights(p, w, o0, i / channel_runs * W, c0,
                                  std::min(channels_at_once, g.cin - c0), buffer, weights);
        }
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < band * parts; ++i) {
          const std::int64_t b = i / parts, o = i % parts * p.part,
                             columns = std::min(p.part, p.width - o);
          if (o0 + o >= g.cout) continue;
          const std::int64_t at = (first + b) * p.block, count = std::min(p.block, p.tiles - at);
          const std::int64_t in_point_stride = padded_point_stride(count * g.t * p.in_stride),
                             out_point_stride = padded_point_stride(count * g.to * columns);
          for (int k = 0; k < tile_points; ++k)
            multiply_frames(p, count, columns, inputs + b * p.input_floats + k * in_point_stride,
                            weights + k * p.point_floats + o, buffer + k * out_point_stride);
          for (std::int64_t r = 0; r < count * g.to; ++r) {
            const TileOrigin origin = tile_origin(p.tiling, at + r % count);
            transform_output_tile(g, buffer + r * columns, out_point_stride, origin.row,
                                  origin.column, o0 + o, std::min(columns, g.cout - o0 - o), bias,
                                  add,
                                  y + (origin.sample * g.to + r / count) * g.ho * g.wo * g.cout);
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
  if (pair_weights_fit(g))
    forward_by_pairs(g, x, w, bias, add, y);
  else
    forward_by_groups(g, x, w, bias, add, y);
}

bool wide_fits(const Geometry& g) {
  // With more tiles, transformed weights are read often enough to be worth writing to memory.
  constexpr std::int64_t max_tiles = 512;
  return g.kt == 1 && g.stride_t == 1 &&
         tile_points * g.cin * padded(g.cout) > max_cached_weights &&
         g.n * g.to * g.ho * g.wo <= max_tiles * tile_out * tile_out;
}

void wide_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                  float* y) {
  forward_by_groups(g, x, w, bias, add, y);
}

WEFT_CPU_END
