// The weights' gradient of winograd.cpp's convolutions by the same transforms, the other way:
// results' gradients 4x4 -> 6x6, 36 products with the transformed inputs summed over all tiles, 6x6
// -> 3x3. A chunk of tiles at a time; the sums do not depend on the threads.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
namespace {
#include "ops/cpu/conv/winograd.h"

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

// dw (+)= the sums [36, depth, outs], transformed back.
void transform_sums(const Plan& p, const float* sums, float* dw, bool accumulate) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kt * 9;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < p.outs / W; ++v)
    for (std::int64_t i = 0; i < g.cin; ++i)
      for (std::int64_t a = 0; a < g.kt; ++a) {
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

void winograd_backward_weight(const Geometry& g, int up, const float* x, const float* dy, float* dw,
                              bool accumulate) {
  detail::add_flops(g.flops());
  const Plan p = plan(g, up, 0);
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
