// CPU side of the packed products of ops/matmul.h, on register tiles of 6 x 64 (AVX2, NEON: 6 x
// 16). Work: 2 M N K operations on packed_rows(M) rows; the weights are read once for each 480
// rows, in the order in which they lie, the next piece fetched while one is multiplied. What a
// thread has in hand fits its second-level cache: 480 x 256 of x, 256 x 64 of w twice, 480 x 256 of
// y. With plain rows of 4096 floats it would not, for those fall on few sets of it.
#include "ops/matmul.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/gemm_tile.h"

constexpr int R = 6;  // rows of a tile
static_assert(packed_rows(1) == R);
constexpr std::int64_t panel_columns = 64, depth_block = 256, row_block = 480, most_panels = 4;
constexpr int NV = vector_registers == 32 ? 4 : 2;  // vectors of a tile
constexpr std::int64_t line = 16;                   // floats of a cache line
constexpr std::int64_t ahead = 48;  // of the depth: how far x is fetched before it is used

// c [R,64] (+)= a [depth,R] b [depth,64]. With each k the next F lines are fetched from next + k
// step on: a few at a time, for many at once would hold up the loads of what is multiplied.
template <int F>
void multiply(std::int64_t depth, const float* a, const float* b, const float* next,
              std::int64_t step, float* c, bool accumulate) {
  for (int j = 0; j < panel_columns; j += NV * W) {
    vf sum[R][NV];
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
        sum[i][v] = accumulate ? load(c + i * panel_columns + j + v * W) : vf{};
    const float* fetch = next;
    for (std::int64_t k = 0; k < depth; ++k, fetch += step) {
#pragma GCC unroll 4
      for (int f = 0; f < F; ++f) __builtin_prefetch(fetch + f * line, 0, 2);
      __builtin_prefetch(a + (k + ahead) * R);
      vf columns[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) columns[v] = load(b + k * panel_columns + j + v * W);
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) {
        const vf row = splat(a[k * R + i]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[i][v] += row * columns[v];
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store(c + i * panel_columns + j + v * W, sum[i][v]);
  }
}

// c [tiles][R,64] (+)= a [tiles][depth,R] b [depth,64]. Meanwhile the piece of weights at `next` is
// fetched, a part by each tile.
void multiply(std::int64_t tiles, std::int64_t depth, const float* a, const float* b,
              const float* next, float* c, bool accumulate) {
  const std::int64_t step = (panel_columns + tiles - 1) / tiles;
  const auto one = step > 2 * line ? multiply<4> : step > line ? multiply<2> : multiply<1>;
  for (std::int64_t t = 0; t < tiles; ++t)
    one(depth, a + t * depth * R, b, next + t * depth * step, step, c + t * R * panel_columns,
        accumulate);
}

// y [rows,width] (ld n) = c [tiles][R,64] + bias + residual.
void finish(std::int64_t rows, std::int64_t width, std::int64_t n, const float* c,
            const float* bias, const float* residual, float* y) {
  for (std::int64_t i = 0; i < rows; ++i)
    for_vectors(width, [&](std::int64_t j, int lanes) {
      vf v = load(c + i * panel_columns + j);
      if (bias != nullptr) v += load_n(bias + j, lanes);
      if (residual != nullptr) v += load_n(residual + i * n + j, lanes);
      store_n(y + i * n + j, v, lanes);
    });
}

}  // namespace

void pack_weight(Tensor& w) {
  const std::int64_t n = w.dim(0), k = w.numel() / n;
  float* data = w.data<float>();
#pragma omp parallel
  {
    std::vector<float> plain(panel_columns * k);
#pragma omp for schedule(static)
    for (std::int64_t j = 0; j < n; j += panel_columns) {
      const std::int64_t width = std::min(panel_columns, n - j);
      // Copied aside first: a panel takes the place of its own plain rows.
      std::copy_n(data + j * k, width * k, plain.data());
      transpose(plain.data(), k, width, k, data + j * k, width);
    }
  }
}

void pack_rows(const Tensor& x, Tensor& packed) {
  const std::int64_t m = x.dim(0), k = x.dim(1), padded = packed_rows(m);
  WEFT_ASSERT(packed.dim(0) == padded && packed.dim(1) == k);
  const float* from = x.data<float>();
  float* to = packed.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < m; i += R)
    for (std::int64_t k0 = 0; k0 < k; k0 += depth_block) {
      const std::int64_t depth = std::min(depth_block, k - k0),
                         rows = std::min<std::int64_t>(R, m - i);
      float* tile_of = to + k0 * padded + i * depth;
      if (rows < R) std::fill_n(tile_of, depth * R, 0.0f);
      transpose(from + i * k + k0, k, rows, depth, tile_of, R);
    }
}

void packed_linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                           const Tensor& residual, Tensor& y) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = y.numel() / n, padded = packed_rows(m);
  WEFT_ASSERT(x.numel() == padded * k && m * n == y.numel());
  const float *a = x.data<float>(), *b = w.data<float>();
  const float* add_bias = bias.defined() ? bias.data<float>() : nullptr;
  const float* add = residual.defined() ? residual.data<float>() : nullptr;
  float* out = y.data<float>();
  // A thread takes some panels at a time, so that a block of x is used for all of them; fewer where
  // there are many threads.
  const std::int64_t panels = (n + panel_columns - 1) / panel_columns;
  const std::int64_t together =
      std::clamp<std::int64_t>(panels / (2 * omp_get_max_threads()), 1, most_panels);
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < panels; first += together) {
    const std::int64_t last = std::min(panels, first + together);
    struct Sums;
    struct Narrow;
    float* sums = scratch<Sums>(most_panels * row_block * panel_columns);
    for (std::int64_t i = 0; i < m; i += row_block) {
      const std::int64_t rows = std::min(row_block, m - i), tiles = packed_rows(rows) / R;
      for (std::int64_t k0 = 0; k0 < k; k0 += depth_block) {
        const std::int64_t depth = std::min(depth_block, k - k0);
        for (std::int64_t p = first; p < last; ++p) {
          const std::int64_t width = std::min(panel_columns, n - p * panel_columns);
          const float* panel_of = b + p * panel_columns * k + k0 * width;
          // What this thread multiplies next is fetched meanwhile: the same depth of the next
          // panel, or the next depth of the first.
          const float* next = p + 1 < last
                                  ? panel_of + panel_columns * k
                                  : b + first * panel_columns * k + (k0 + depth) * panel_columns;
          if (width < panel_columns) {  // the last panel, widened by zeros
            float* wide = scratch<Narrow>(depth_block * panel_columns);
            std::fill_n(wide, depth * panel_columns, 0.0f);
            for (std::int64_t d = 0; d < depth; ++d)
              std::copy_n(panel_of + d * width, width, wide + d * panel_columns);
            panel_of = wide;
          }
          multiply(tiles, depth, a + k0 * padded + i * depth, panel_of, next,
                   sums + (p - first) * row_block * panel_columns, k0 > 0);
        }
      }
      for (std::int64_t p = first; p < last; ++p) {
        const std::int64_t j = p * panel_columns, at = i * n + j;
        finish(rows, std::min(panel_columns, n - j), n,
               sums + (p - first) * row_block * panel_columns,
               add_bias == nullptr ? nullptr : add_bias + j, add == nullptr ? nullptr : add + at,
               out + at);
      }
    }
  }
}

WEFT_CPU_END
