// 3x3 convolutions of stride 1 over planes by Winograd's F(4x4, 3x3): a quarter of the products.
// Kernels of several frames (kt, kh, kw) = (3, 3, 3) are the sum over kt of such, unless
// winograd_volume.cpp takes them. A block of tiles at a time: its inputs transformed, 36 matrix
// products with the transformed weights, results transformed back and stored with bias and
// residual. Transformed inputs and products stay in the thread's second-level cache as far as the
// channels allow.
//
// The weights' gradient goes the other way: results' gradients 4x4 -> 6x6, 36 products with the
// transformed inputs summed over all tiles, 6x6 -> 3x3. A chunk of tiles at a time; the sums do not
// depend on the threads.
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

// ---- The forward ----

// Transforms weights: to [36][panels][depth][panel_width] from w [cout,cin,kt,3,3]. Two input
// channels of a panel are collected and copied at a time: the 36 matrices lie far apart in memory,
// and runs longer than a cache line transfer faster.
void transform_weights(const Plan& p, const float* w, float* to) {
  const Geometry& g = p.g;
  constexpr std::int64_t inputs_at_once = 2, point_stride = inputs_at_once * panel_width + W;
  const std::int64_t panels = (p.padded_cout + panel_width - 1) / panel_width, taps = g.kt * 9;
  const std::int64_t matrix = p.depth * p.padded_cout;
#pragma omp parallel
  {
    alignas(64) float buffer[tile_points * point_stride];
#pragma omp for schedule(static) collapse(2)
    for (std::int64_t panel = 0; panel < panels; ++panel)
      for (std::int64_t first = 0; first < g.cin; first += inputs_at_once)
        for (std::int64_t a = 0; a < g.kt; ++a) {
          const std::int64_t out = panel * panel_width,
                             width = std::min(panel_width, p.padded_cout - out);
          const std::int64_t count = std::min(inputs_at_once, g.cin - first);
          for (std::int64_t v = 0; v < width; v += W)
            for (std::int64_t i = 0; i < count; ++i) {
              const int lanes = static_cast<int>(std::min<std::int64_t>(W, g.cout - out - v));
              alignas(64) float gathered[9 * W];
              gather_lanes(w + (out + v) * g.cin * taps, g.cin * taps, lanes,
                           (first + i) * taps + a * 9, 9, gathered);
              vf kernel[9], values[tile_points];
              for (int k = 0; k < 9; ++k) kernel[k] = load(gathered + k * W);
              transform_2d<3, tile_in>(kernel, values, weight_transform);
              for (int k = 0; k < tile_points; ++k)
                store(buffer + k * point_stride + i * width + v, values[k]);
            }
          float* at = to + p.depth * out + (a * g.cin + first) * width;
          for (int k = 0; k < tile_points; ++k)
            std::copy_n(buffer + k * point_stride, count * width, at + k * matrix);
        }
  }
}

// Writes y of tiles [first, first + count) from their products [36][count][out_stride].
void transform_outputs(const Plan& p, const float* products, const float* bias, bool add,
                       std::int64_t first, std::int64_t count, float* y) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const TileOrigin origin = tile_origin(p, first + tile);
    transform_output_tile(g, products + tile * p.out_stride, count * p.out_stride, origin.row,
                          origin.column, 0, g.cout, bias, add,
                          y + (origin.sample * g.to + origin.t) * g.ho * g.wo * g.cout);
  }
}

// out [count, padded_cout] = in [count, depth] times the weights of one point. A block of weights
// stays in the first-level cache while the rows pass. The block after it is prefetched meanwhile:
// weights come from memory, or the third-level cache, once for every block of tiles.
void multiply(const Plan& p, std::int64_t count, const float* in, const float* weights,
              float* out) {
  constexpr std::int64_t depth_block = 128, row_block = 24, cache_line = 16;
  for (std::int64_t o = 0; o < p.padded_cout; o += panel_width) {
    const std::int64_t width = std::min(panel_width, p.padded_cout - o);
    for (std::int64_t k = 0; k < p.depth; k += depth_block) {
      const std::int64_t depth = std::min(depth_block, p.depth - k);
      const float* b = weights + o * p.depth + k * width;
      const float* next = b + depth * width;
      const std::int64_t prefetched =
          depth * width * row_block / count / cache_line * cache_line + cache_line;
      for (std::int64_t r = 0; r < count; r += row_block) {
        for (std::int64_t f = 0; f < prefetched; f += cache_line)
          __builtin_prefetch(next + f, 0, 2);
        next += prefetched;
        small_gemm(std::min(row_block, count - r), width, depth, in + r * p.in_stride + k,
                   p.in_stride, 1, b, width, out + r * p.out_stride + o, p.out_stride, k > 0);
      }
    }
  }
}

// ---- The weights' gradient ----

// Tiles of a chunk: many, so that the sums are read and written seldom and threads wait for each
// other seldom; few enough that the transformed values are still in a cache when they are
// multiplied (8 MiB where the channels allow it).
std::int64_t chunk_tiles(const Plan& p) {
  return std::clamp<std::int64_t>((2 << 20) / (tile_points * (p.in_stride + p.out_stride)), 192,
                                  2048);
}
// Tiles that a thread transforms at a time, and input channels that it multiplies at a time.
constexpr std::int64_t tiles_at_once = 8, channels_at_once = 96;

// Transforms dy of tiles [first, first + count): for each point [count, out_stride], `point_stride`
// floats from one point to the next.
void transform_gradients(const Plan& p, const float* dy, std::int64_t first, std::int64_t count,
                         std::int64_t point_stride, float* to) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const TileOrigin origin = tile_origin(p, first + tile);
    const float* from =
        dy +
        (((origin.sample * g.to + origin.t) * g.ho + origin.row) * g.wo + origin.column) * g.cout;
    const std::int64_t d = g.dilation, rows = results_in_tile(g.ho, origin.row, d),
                       columns = results_in_tile(g.wo, origin.column, d);
    for_vectors(g.cout, [&](std::int64_t c, int n) {
      vf in[tile_out * tile_out], out[tile_points];
      for (int i = 0; i < tile_out; ++i)
        for (int j = 0; j < tile_out; ++j)
          in[i * tile_out + j] =
              i < rows && j < columns ? load_n(from + d * (i * g.wo + j) * g.cout + c, n) : vf{};
      transform_2d<tile_out, tile_in>(in, out, output_transform_transposed);
      for (int k = 0; k < tile_points; ++k)
        store(to + k * point_stride + tile * p.out_stride + c, out[k]);
    });
  }
}

// dw (+)= the sums [36, depth, padded_cout], transformed back. The 36 matrices are read in the
// order of memory: they are larger than the caches.
void transform_weight_gradients(const Plan& p, const float* sums, float* dw, bool accumulate) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kt * 9;
#pragma omp parallel for schedule(static) collapse(3)
  for (std::int64_t i = 0; i < g.cin; ++i)
    for (std::int64_t a = 0; a < g.kt; ++a)
      for (std::int64_t v = 0; v < p.padded_cout / W; ++v) {
        vf in[tile_points], kernel[9];
        for (int k = 0; k < tile_points; ++k)
          in[k] = load(sums + (k * p.depth + a * g.cin + i) * p.padded_cout + v * W);
        transform_2d<tile_in, 3>(in, kernel, weight_transform_transposed);
        const std::int64_t lanes = std::min<std::int64_t>(W, g.cout - v * W);
        for (std::int64_t o = 0; o < lanes; ++o) {
          float* to = dw + ((v * W + o) * g.cin + i) * taps + a * 9;
          for (int k = 0; k < 9; ++k) to[k] = accumulate ? to[k] + kernel[k][o] : kernel[k][o];
        }
      }
}

}  // namespace

bool winograd_fits(const Geometry& g) {
  if (g.kh != 3 || g.kw != 3 || g.stride != 1 || g.groups != 1 || g.cin < 32 || g.cout < 8)
    return false;
  // Small ones gain nothing, and keep the smaller rounding errors of sums without transforms. The
  // size of one sample decides, so that its result does not depend on the batch it is in.
  const std::int64_t frames = g.kt == 1 ? g.t : 1, pixels = g.y_numel() / g.cout / g.n / frames;
  if (g.flops() / static_cast<double>(g.n * frames) < 2.5e8 || pixels < 200) return false;
  // Where the phases of a dilated one are small, tiles are mostly padding: that must not cost more
  // than the transforms save.
  const std::int64_t d = g.dilation, span = d * tile_out;
  const std::int64_t rows = (g.ho + span - 1) / span, columns = (g.wo + span - 1) / span;
  return d == 1 || rows * columns * span * span <= 2 * g.ho * g.wo;
}

void winograd_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  if (wide_fits(g)) return wide_forward(g, x, w, bias, add, y);
  const Plan p = plan(g);
  const Tensor transformed = floats(tile_points * p.padded_cout * p.depth);
  // Each thread's buffer: transformed inputs and products of a block.
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), p.blocks));
  const std::int64_t inputs = tile_points * p.block * p.in_stride,
                     products = tile_points * p.block * p.out_stride;
  const Tensor buffers = floats(threads * (inputs + products));
  if (planning()) return;
  transform_weights(p, w, transformed.data<float>());
  const float* weights = transformed.data<float>();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t k = 0; k < p.blocks; ++k) {
    const std::int64_t first = k * p.block, count = std::min(p.block, p.tiles - first);
    float* in = buffers.data<float>() + omp_get_thread_num() * (inputs + products);
    float* out = in + inputs;
    transform_inputs(p, x, first, count, count * p.in_stride, in);
    for (int point = 0; point < tile_points; ++point)
      multiply(p, count, in + point * count * p.in_stride,
               weights + point * p.padded_cout * p.depth, out + point * count * p.out_stride);
    transform_outputs(p, out, bias, add, first, count, y);
  }
}

void winograd_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  const Plan p = plan(g);
  const std::int64_t chunk = std::min(p.tiles, chunk_tiles(p));
  const std::int64_t in_point_stride = chunk * p.in_stride, out_point_stride = chunk * p.out_stride;
  const Tensor input_buffer = floats(tile_points * in_point_stride),
               gradient_buffer = floats(tile_points * out_point_stride),
               sum_buffer = floats(tile_points * p.depth * p.padded_cout);
  if (planning()) return;
  float *inputs = input_buffer.data<float>(), *gradients = gradient_buffer.data<float>(),
        *sums = sum_buffer.data<float>();
  for (std::int64_t first = 0; first < p.tiles; first += chunk) {
    const std::int64_t count = std::min(chunk, p.tiles - first);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t t = 0; t < count; t += tiles_at_once) {
        const std::int64_t n = std::min(tiles_at_once, count - t);
        transform_inputs(p, x, first + t, n, in_point_stride, inputs + t * p.in_stride);
        transform_gradients(p, dy, first + t, n, out_point_stride, gradients + t * p.out_stride);
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (std::int64_t k = 0; k < tile_points; ++k)
        for (std::int64_t i = 0; i < p.depth; i += channels_at_once)
          small_gemm(std::min(channels_at_once, p.depth - i), p.padded_cout, count,
                     inputs + k * in_point_stride + i, 1, p.in_stride,
                     gradients + k * out_point_stride, p.out_stride,
                     sums + (k * p.depth + i) * p.padded_cout, p.padded_cout, first > 0);
    }
  }
  transform_weight_gradients(p, sums, dw, accumulate);
}

WEFT_CPU_END
