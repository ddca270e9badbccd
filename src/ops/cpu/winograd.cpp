// 3x3 convolutions of stride 1 over planes by Winograd's F(4x4, 3x3): a quarter of the products. Kernels of several frames
// (kt, kh, kw) = (3, 3, 3) are the sum over kt of such. A block of tiles at a time: its inputs transformed, 36 matrix
// products with the transformed weights, results transformed back and stored with bias and residual; what lies between
// stays in the thread's second-level cache as far as the channels allow. An upsampled frame is read through its small one.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv_parts.h"
namespace {
#include "ops/cpu/gemm_tile.h"
#include "ops/cpu/winograd_transforms.h"

std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// The tiles of a result, and what follows from the channels. `up`: rows and columns of x are seen twice.
struct Plan {
  Geometry g;
  int up;
  std::int64_t rows, columns;  // of tiles in a frame
  std::int64_t depth;          // kt * cin, of the products
  std::int64_t outs;           // cout in whole vectors
  std::int64_t in_stride, out_stride;
  std::int64_t tiles, block, blocks;
};

// Tiles that a thread works on at a time: many, so that weights are read seldom; few enough to share them out evenly.
Plan plan(const Geometry& g, int up) {
  Plan p;
  p.g = g;
  p.up = up;
  p.rows = (g.ho + tile_out - 1) / tile_out;
  p.columns = (g.wo + tile_out - 1) / tile_out;
  p.depth = g.kt * g.cin;
  p.outs = padded(g.cout);
  p.in_stride = padded_stride(p.depth);
  p.out_stride = padded_stride(p.outs);
  p.tiles = g.n * g.to * p.rows * p.columns;
  const std::int64_t threads = omp_get_max_threads();
  const std::int64_t most =
      std::clamp<std::int64_t>(400000 / (tile_points * (p.in_stride + p.out_stride)), 48, 96);
  const std::int64_t rounds = (p.tiles + most * threads - 1) / (most * threads);
  p.block = std::min(p.tiles, (p.tiles + rounds * threads - 1) / (rounds * threads));
  p.blocks = (p.tiles + p.block - 1) / p.block;
  return p;
}

struct Place {
  std::int64_t sample, t, row, column;  // of a tile's first result
};
Place place(const Plan& p, std::int64_t tile) {
  Place q;
  q.column = tile % p.columns * tile_out;
  q.row = tile / p.columns % p.rows * tile_out;
  const std::int64_t frame = tile / (p.rows * p.columns);
  q.t = frame % p.g.to;
  q.sample = frame / p.g.to;
  return q;
}

// Panels of columns, as wide as a register tile; each [depth][width].
constexpr std::int64_t panel_width = widest_tile * W;

// Transformed weights [36][panels][depth][panel_width] from w [cout,cin,kt,3,3].
struct Weights;
float* transform_weights(const Plan& p, const float* w) {
  const Geometry& g = p.g;
  const std::int64_t vectors = p.outs / W, taps = g.kt * 9;
  float* to = scratch<Weights>(static_cast<std::size_t>(tile_points * p.outs * p.depth));
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < vectors; ++v)
    for (std::int64_t i = 0; i < g.cin; ++i) {
      const std::int64_t panel = v * W / panel_width, first = panel * panel_width;
      const std::int64_t width = std::min(panel_width, p.outs - first);
      const int lanes = static_cast<int>(std::min<std::int64_t>(W, g.cout - v * W));
      for (std::int64_t a = 0; a < g.kt; ++a) {
        alignas(64) float taken[9][W] = {};
        for (int o = 0; o < lanes; ++o)
          for (int k = 0; k < 9; ++k) taken[k][o] = w[((v * W + o) * g.cin + i) * taps + a * 9 + k];
        vf kernel[9], out[tile_points];
        for (int k = 0; k < 9; ++k) kernel[k] = load(taken[k]);
        both_ways<3, tile_in>(kernel, out, weight_line);
        float* at = to + p.depth * first + (a * g.cin + i) * width + v * W - first;
        for (int k = 0; k < tile_points; ++k) store(at + k * p.depth * p.outs, out[k]);
      }
    }
  return to;
}

// Inputs of tiles [first, first + count) transformed: [36][count][in_stride].
void transform_inputs(const Plan& p, const float* x, std::int64_t first, std::int64_t count,
                      float* to) {
  const Geometry& g = p.g;
  const std::int64_t height = g.h << p.up, width = g.w << p.up, apart = count * p.in_stride;
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

// y of tiles [first, first + count) from their products [36][count][out_stride].
void transform_outputs(const Plan& p, const float* products, const float* bias, bool add,
                       std::int64_t first, std::int64_t count, float* y) {
  const Geometry& g = p.g;
  const std::int64_t apart = count * p.out_stride;
  for (std::int64_t tile = 0; tile < count; ++tile) {
    const Place q = place(p, first + tile);
    const std::int64_t rows = std::min<std::int64_t>(tile_out, g.ho - q.row);
    const std::int64_t columns = std::min<std::int64_t>(tile_out, g.wo - q.column);
    float* to = y + (((q.sample * g.to + q.t) * g.ho + q.row) * g.wo + q.column) * g.cout;
    for_vectors(g.cout, [&](std::int64_t c, int n) {
      vf in[tile_points], out[tile_out * tile_out];
      for (int k = 0; k < tile_points; ++k)
        in[k] = load(products + k * apart + tile * p.out_stride + c);
      both_ways<tile_in, tile_out>(in, out, output_line);
      const vf b = bias ? load_n(bias + c, n) : vf{};
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < columns; ++j) {
          float* at = to + (i * g.wo + j) * g.cout + c;
          const vf v = out[i * tile_out + j] + b;
          store_n(at, add ? v + load_n(at, n) : v, n);
        }
    });
  }
}

}  // namespace

bool winograd_fits(const Geometry& g) {
  return g.kh == 3 && g.kw == 3 && g.stride == 1 && g.cin >= 32 && g.cout >= 16;
}

void winograd_forward(const Geometry& g, int up, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  detail::add_flops(g.flops());
  const Plan p = plan(g, up);
  const float* weights = transform_weights(p, w);
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t k = 0; k < p.blocks; ++k) {
    struct Inputs;
    struct Products;
    const std::int64_t first = k * p.block, count = std::min(p.block, p.tiles - first);
    float* in = scratch<Inputs>(static_cast<std::size_t>(tile_points * p.block * p.in_stride));
    float* out = scratch<Products>(static_cast<std::size_t>(tile_points * p.block * p.out_stride));
    transform_inputs(p, x, first, count, in);
    for (int point = 0; point < tile_points; ++point)
      for (std::int64_t o = 0; o < p.outs; o += panel_width) {
        const std::int64_t width = std::min(panel_width, p.outs - o);
        small_gemm(count, width, p.depth, in + point * count * p.in_stride, p.in_stride, 1,
                   weights + (point * p.outs + o) * p.depth, width,
                   out + point * count * p.out_stride + o, p.out_stride, false);
      }
    transform_outputs(p, out, bias, add, first, count, y);
  }
}

WEFT_CPU_END
