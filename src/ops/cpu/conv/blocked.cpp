// Convolutions of any stride and dilation as matrix products of rows of pixels, a tap of the kernel
// and some input channels at a time: nothing is copied but the weights. What it is for is rounding:
// each of these products is summed by itself before it is added, where oneDNN's kernels add all
// products of an output one after the other. The error of 4608 products is a quarter of that, and a
// ReLU whose input is near zero tips the less often.
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
#include "ops/cpu/gemm_tile.h"
//
#include "ops/cpu/conv/panel.h"

// Input channels and pixels of a block: the weights of a block stay in the first-level cache while
// its rows pass, its sums in the second.
constexpr std::int64_t block_channels = 128, block_pixels = 256;

std::int64_t whole_vectors(std::int64_t n) { return (n + W - 1) / W * W; }

// Weights as [panels][taps][cin][panel_width] from w [cout,cin,taps].
void pack_weights(const Geometry& g, const float* w, float* to) {
  const std::int64_t taps = g.kt * g.kh * g.kw, outs = whole_vectors(g.cout);
  constexpr std::int64_t channels = 16;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < outs; v += W)
    for (std::int64_t i = 0; i < g.cin; i += channels) {
      const std::int64_t first = v / panel_width * panel_width;
      const std::int64_t width = std::min(panel_width, outs - first);
      const int lanes = static_cast<int>(std::min<std::int64_t>(W, g.cout - v));
      float* panel = to + first * taps * g.cin + v - first;
      for (std::int64_t c = i; c < std::min(i + channels, g.cin); ++c)
        for (std::int64_t k = 0; k < taps; k += W) {
          alignas(64) float gathered[W * W];
          const std::int64_t n = std::min<std::int64_t>(W, taps - k);
          gather_lanes(w + v * g.cin * taps, g.cin * taps, lanes, c * taps + k, n, gathered);
          for (std::int64_t j = 0; j < n; ++j)
            store(panel + ((k + j) * g.cin + c) * width, load(gathered + j * W));
        }
    }
}

// Which of `size` results have their input inside: result i reads element first + i * stride of
// `inputs`.
struct Range {
  std::int64_t from, to;
};
Range inside(std::int64_t size, std::int64_t first, std::int64_t stride, std::int64_t inputs) {
  const std::int64_t from = first < 0 ? (-first + stride - 1) / stride : 0;
  const std::int64_t to = first < inputs ? (inputs - first + stride - 1) / stride : 0;
  return {from, std::min(size, to)};
}

// sums [rows * wo, width] = rows [first, first + rows) of the result, of a panel of outputs.
void sum_rows(const Geometry& g, const float* x, const float* weights, std::int64_t width,
              std::int64_t first, std::int64_t rows, float* sums) {
  std::fill_n(sums, rows * g.wo * width, 0.0f);
  for (std::int64_t a = 0; a < g.kt; ++a)
    for (std::int64_t b = 0; b < g.kh; ++b)
      for (std::int64_t c = 0; c < g.kw; ++c) {
        const std::int64_t left = c * g.dilation - g.left;
        const Range columns = inside(g.wo, left, g.stride, g.w);
        const float* tap = weights + ((a * g.kh + b) * g.kw + c) * g.cin * width;
        for (std::int64_t i = 0; i < g.cin && columns.from < columns.to; i += block_channels)
          for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t row = (first + r) % g.ho, frame = (first + r) / g.ho;
            const std::int64_t t = frame % g.to * g.stride_t + a - g.front,
                               h = row * g.stride + b * g.dilation - g.top;
            if (t < 0 || t >= g.t || h < 0 || h >= g.h) continue;
            const std::int64_t pixel =
                ((frame / g.to * g.t + t) * g.h + h) * g.w + left + columns.from * g.stride;
            small_gemm(columns.to - columns.from, width, std::min(block_channels, g.cin - i),
                       x + pixel * g.cin + i, g.stride * g.cin, 1, tap + i * width, width,
                       sums + (r * g.wo + columns.from) * width, width, true);
          }
      }
}

}  // namespace

bool blocked_fits(const Geometry& g) {
  // Few products have small errors anyway, and fill no vectors here.
  return g.groups == 1 && g.cin >= 32 && g.cout >= 8;
}

void blocked_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                     float* y) {
  const std::int64_t taps = g.kt * g.kh * g.kw, outs = whole_vectors(g.cout);
  const std::int64_t panels = (outs + panel_width - 1) / panel_width;
  const std::int64_t rows = g.n * g.to * g.ho,
                     block = std::clamp<std::int64_t>(block_pixels / g.wo, 1, rows),
                     blocks = (rows + block - 1) / block;
  const int threads =
      static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), panels * blocks));
  const Tensor packed = floats(taps * g.cin * outs),
               of_sums = floats(threads * block * g.wo * panel_width);
  if (planning()) return;
  pack_weights(g, w, packed.data<float>());
  const float* weights = packed.data<float>();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t task = 0; task < panels * blocks; ++task) {
    const std::int64_t o = task / blocks * panel_width, first = task % blocks * block;
    const std::int64_t width = std::min(panel_width, outs - o),
                       count = std::min(block, rows - first);
    float* sums = of_sums.data<float>() + omp_get_thread_num() * block * g.wo * panel_width;
    sum_rows(g, x, weights + o * taps * g.cin, width, first, count, sums);
    for (std::int64_t p = 0; p < count * g.wo; ++p) {
      float* to = y + (first * g.wo + p) * g.cout + o;
      for_vectors(std::min(width, g.cout - o), [&](std::int64_t c, int n) {
        vf v = load(sums + p * width + c);
        if (bias) v += load_n(bias + o + c, n);
        if (add) v += load_n(to + c, n);
        store_n(to + c, v, n);
      });
    }
  }
}

WEFT_CPU_END
