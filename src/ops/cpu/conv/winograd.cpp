// 3x3 convolutions of stride 1 over planes by Winograd's F(4x4, 3x3): a quarter of the products.
// Kernels of several frames (kt, kh, kw) = (3, 3, 3) are the sum over kt of such, unless
// winograd_volume.cpp takes them. A block of tiles at a time: its inputs transformed, 36 matrix
// products with the transformed weights, results transformed back and stored with bias and
// residual; what lies between stays in the thread's second-level cache as far as the channels
// allow.
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

// Transformed weights [36][panels][depth][panel_width] from w [cout,cin,kt,3,3]: a panel's values
// of two inputs at a time, for the 36 matrices lie far apart, and transfers are faster in runs
// longer than a cache line.
void transform_weights(const Plan& p, const float* w, float* to) {
  const Geometry& g = p.g;
  constexpr std::int64_t some = 2, apart = some * panel_width + W;
  const std::int64_t panels = (p.outs + panel_width - 1) / panel_width, taps = g.kt * 9;
  const std::int64_t matrix = p.depth * p.outs;
#pragma omp parallel
  {
    alignas(64) float between[tile_points * apart];
#pragma omp for schedule(static) collapse(2)
    for (std::int64_t panel = 0; panel < panels; ++panel)
      for (std::int64_t first = 0; first < g.cin; first += some)
        for (std::int64_t a = 0; a < g.kt; ++a) {
          const std::int64_t out = panel * panel_width, width = std::min(panel_width, p.outs - out);
          const std::int64_t count = std::min(some, g.cin - first);
          for (std::int64_t v = 0; v < width; v += W)
            for (std::int64_t i = 0; i < count; ++i) {
              const int lanes = static_cast<int>(std::min<std::int64_t>(W, g.cout - out - v));
              alignas(64) float taken[9 * W];
              gather_lanes(w + (out + v) * g.cin * taps, g.cin * taps, lanes,
                           (first + i) * taps + a * 9, 9, taken);
              vf kernel[9], values[tile_points];
              for (int k = 0; k < 9; ++k) kernel[k] = load(taken + k * W);
              both_ways<3, tile_in>(kernel, values, weight_line);
              for (int k = 0; k < tile_points; ++k)
                store(between + k * apart + i * width + v, values[k]);
            }
          float* at = to + p.depth * out + (a * g.cin + first) * width;
          for (int k = 0; k < tile_points; ++k)
            std::copy_n(between + k * apart, count * width, at + k * matrix);
        }
  }
}

// y of tiles [first, first + count) from their products [36][count][out_stride].
void transform_outputs(const Plan& p, const float* products, const float* bias, bool add,
                       std::int64_t first, std::int64_t count, float* y) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const Place q = place(p, first + tile);
    transform_result(g, products + tile * p.out_stride, count * p.out_stride, q.row, q.column, 0,
                     g.cout, bias, add, y + (q.sample * g.to + q.t) * g.ho * g.wo * g.cout);
  }
}

// out [count, outs] = in [count, depth] times the weights of one point. Weights stay in the
// first-level cache over the rows in pieces, and the piece after is fetched meanwhile: they come
// from far, once for every block of tiles.
void multiply(const Plan& p, std::int64_t count, const float* in, const float* weights,
              float* out) {
  constexpr std::int64_t piece = 128, rows = 24, line = 16;
  for (std::int64_t o = 0; o < p.outs; o += panel_width) {
    const std::int64_t width = std::min(panel_width, p.outs - o);
    for (std::int64_t k = 0; k < p.depth; k += piece) {
      const std::int64_t deep = std::min(piece, p.depth - k);
      const float* b = weights + o * p.depth + k * width;
      const float* ahead = b + deep * width;
      const std::int64_t share = deep * width * rows / count / line * line + line;
      for (std::int64_t r = 0; r < count; r += rows) {
        for (std::int64_t f = 0; f < share; f += line) __builtin_prefetch(ahead + f, 0, 2);
        ahead += share;
        small_gemm(std::min(rows, count - r), width, deep, in + r * p.in_stride + k, p.in_stride, 1,
                   b, width, out + r * p.out_stride + o, p.out_stride, k > 0);
      }
    }
  }
}

// ---- The weights' gradient ----

// Tiles whose products are added at a time: many, so that the sums are read and written seldom and
// threads wait for each other seldom; few enough that the transformed values are still in a cache
// when they are multiplied (8 MiB where the channels allow it).
std::int64_t chunk_of(const Plan& p) {
  return std::clamp<std::int64_t>((2 << 20) / (tile_points * (p.in_stride + p.out_stride)), 192,
                                  2048);
}
// Tiles that a thread transforms at a time, and inputs that it multiplies.
constexpr std::int64_t share = 8, inputs_share = 96;

// dy of tiles [first, first + count), transformed: 36 times [count, out_stride], `apart` floats
// from one to the next.
void transform_gradients(const Plan& p, const float* dy, std::int64_t first, std::int64_t count,
                         std::int64_t apart, float* to) {
  const Geometry& g = p.g;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const Place q = place(p, first + tile);
    const float* from = dy + (((q.sample * g.to + q.t) * g.ho + q.row) * g.wo + q.column) * g.cout;
    const std::int64_t d = g.dilation, rows = within(g.ho, q.row, d),
                       columns = within(g.wo, q.column, d);
    for_vectors(g.cout, [&](std::int64_t c, int n) {
      vf in[tile_out * tile_out], out[tile_points];
      for (int i = 0; i < tile_out; ++i)
        for (int j = 0; j < tile_out; ++j)
          in[i * tile_out + j] =
              i < rows && j < columns ? load_n(from + d * (i * g.wo + j) * g.cout + c, n) : vf{};
      both_ways<tile_out, tile_in>(in, out, output_line_back);
      for (int k = 0; k < tile_points; ++k) store(to + k * apart + tile * p.out_stride + c, out[k]);
    });
  }
}

// dw (+)= the sums [36, depth, outs], transformed back. The 36 matrices are walked along in the
// order of memory: they come from far.
void transform_sums(const Plan& p, const float* sums, float* dw, bool accumulate) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kt * 9;
#pragma omp parallel for schedule(static) collapse(3)
  for (std::int64_t i = 0; i < g.cin; ++i)
    for (std::int64_t a = 0; a < g.kt; ++a)
      for (std::int64_t v = 0; v < p.outs / W; ++v) {
        vf in[tile_points], kernel[9];
        for (int k = 0; k < tile_points; ++k)
          in[k] = load(sums + (k * p.depth + a * g.cin + i) * p.outs + v * W);
        both_ways<tile_in, 3>(in, kernel, weight_line_back);
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
  // Small ones gain nothing, and keep the smaller rounding errors of sums without transforms. A
  // sample's own size counts, so that its result does not depend on the batch it is in.
  const std::int64_t frames = g.kt == 1 ? g.t : 1, pixels = g.y_numel() / g.cout / g.n / frames;
  if (g.flops() / static_cast<double>(g.n * frames) < 2.5e8 || pixels < 200) return false;
  // Tiles of small phases are mostly padding, which must not eat up what they save.
  const std::int64_t d = g.dilation, span = d * tile_out;
  const std::int64_t rows = (g.ho + span - 1) / span, columns = (g.wo + span - 1) / span;
  return d == 1 || rows * columns * span * span <= 2 * g.ho * g.wo;
}

void winograd_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  if (wide_fits(g)) return wide_forward(g, x, w, bias, add, y);
  const Plan p = plan(g);
  const Tensor transformed = floats(tile_points * p.outs * p.depth);
  // Inputs and products of a block, for each thread.
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), p.blocks));
  const std::int64_t inputs = tile_points * p.block * p.in_stride,
                     products = tile_points * p.block * p.out_stride;
  const Tensor between = floats(threads * (inputs + products));
  if (planning()) return;
  transform_weights(p, w, transformed.data<float>());
  const float* weights = transformed.data<float>();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t k = 0; k < p.blocks; ++k) {
    const std::int64_t first = k * p.block, count = std::min(p.block, p.tiles - first);
    float* in = between.data<float>() + omp_get_thread_num() * (inputs + products);
    float* out = in + inputs;
    transform_inputs(p, x, first, count, count * p.in_stride, in);
    for (int point = 0; point < tile_points; ++point)
      multiply(p, count, in + point * count * p.in_stride, weights + point * p.outs * p.depth,
               out + point * count * p.out_stride);
    transform_outputs(p, out, bias, add, first, count, y);
  }
}

void winograd_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  const Plan p = plan(g);
  const std::int64_t chunk = std::min(p.tiles, chunk_of(p));
  const std::int64_t in_apart = chunk * p.in_stride, out_apart = chunk * p.out_stride;
  const Tensor of_inputs = floats(tile_points * in_apart),
               of_gradients = floats(tile_points * out_apart),
               of_sums = floats(tile_points * p.depth * p.outs);
  if (planning()) return;
  float *inputs = of_inputs.data<float>(), *gradients = of_gradients.data<float>(),
        *sums = of_sums.data<float>();
  for (std::int64_t first = 0; first < p.tiles; first += chunk) {
    const std::int64_t count = std::min(chunk, p.tiles - first);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t t = 0; t < count; t += share) {
        const std::int64_t n = std::min(share, count - t);
        transform_inputs(p, x, first + t, n, in_apart, inputs + t * p.in_stride);
        transform_gradients(p, dy, first + t, n, out_apart, gradients + t * p.out_stride);
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (std::int64_t k = 0; k < tile_points; ++k)
        for (std::int64_t i = 0; i < p.depth; i += inputs_share)
          small_gemm(std::min(inputs_share, p.depth - i), p.outs, count, inputs + k * in_apart + i,
                     1, p.in_stride, gradients + k * out_apart, p.out_stride,
                     sums + (k * p.depth + i) * p.outs, p.outs, first > 0);
    }
  }
  transform_sums(p, sums, dw, accumulate);
}

WEFT_CPU_END
