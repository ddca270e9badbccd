// Large kernels (5x5 to 9x9, of one or several frames) by Fourier transforms of 16x16 tiles of the
// planes: 16 - kh + 1 by 16 - kw + 1 results of a tile from 130 complex products a pair of
// channels, an eighth of what a 7x7 kernel takes. Frames are summed over among the products, so
// that a 7x7x7 kernel is transformed as seven planes. Errors are those of short sums: about 1e-6 of
// the greatest value. A band of tiles at a time: inputs transformed, a matrix product for every
// point, results transformed back.
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

// The Fourier transform of a real 16x16 tile and back, a vector of channels at a time.

constexpr int ft_size = 16;
// Those of the transform's 256 values that the others follow from: 7 columns of 16, and 9 each of
// the columns 0 and 8, which belong to real sequences.
constexpr int ft_points = 7 * ft_size + 2 * 9;

// The discrete transform of 4 values `step` apart.
template <int step>
static inline void transform_four(vf* re, vf* im) {
  const vf sr = re[0] + re[2 * step], si = im[0] + im[2 * step];
  const vf dr = re[0] - re[2 * step], di = im[0] - im[2 * step];
  const vf tr = re[step] + re[3 * step], ti = im[step] + im[3 * step];
  const vf er = re[step] - re[3 * step], ei = im[step] - im[3 * step];
  re[0] = sr + tr, im[0] = si + ti;
  re[step] = dr + ei, im[step] = di - er;
  re[2 * step] = sr - tr, im[2 * step] = si - ti;
  re[3 * step] = dr - ei, im[3 * step] = di + er;
}

// X[k] = sum of x[n] e^(-2 pi i n k / 16), in place, by 4 x 4. With re and im exchanged the way
// back, times 16.
[[gnu::noinline]] static void transform_sixteen(vf* re, vf* im) {
  constexpr float c1 = 0.92387953251128676f, s1 = 0.38268343236508977f, h = 0.70710678118654752f;
  // cos and sin of 2 pi n k / 16.
  constexpr float cosine[4][4] = {{1, 1, 1, 1}, {1, c1, h, s1}, {1, h, 0, -h}, {1, s1, -h, -c1}};
  constexpr float sine[4][4] = {{0, 0, 0, 0}, {0, s1, h, c1}, {0, h, 1, h}, {0, c1, h, -s1}};
  vf ar[ft_size], ai[ft_size];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    vf xr[4] = {re[n], re[n + 4], re[n + 8], re[n + 12]};
    vf xi[4] = {im[n], im[n + 4], im[n + 8], im[n + 12]};
    transform_four<1>(xr, xi);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const float c = cosine[n][k], s = sine[n][k];
      ar[4 * n + k] = n * k == 0 ? xr[k] : xr[k] * c + xi[k] * s;
      ai[4 * n + k] = n * k == 0 ? xi[k] : xi[k] * c - xr[k] * s;
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    transform_four<4>(ar + k, ai + k);
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) re[k + 4 * m] = ar[k + 4 * m], im[k + 4 * m] = ai[k + 4 * m];
  }
}

// to (re, im) = twice the transform of the tile [16][16], of which only the first `rows` rows, an
// even number, are not zero. Two real rows are one complex one, and so are columns 0 and 8.
static inline void tile_to_points(const vf* tile, int rows, vf* re, vf* im) {
  vf cr[8 * ft_size] = {}, ci[8 * ft_size] = {};  // [column][row], columns 0 and 8 together
  for (int i = 0; i < rows; i += 2) {
    vf zr[ft_size], zi[ft_size];
    for (int j = 0; j < ft_size; ++j) {
      zr[j] = tile[i * ft_size + j];
      zi[j] = tile[(i + 1) * ft_size + j];
    }
    transform_sixteen(zr, zi);
    cr[i] = zr[0], ci[i] = zr[8];
    cr[i + 1] = zi[0], ci[i + 1] = zi[8];
    for (int k = 1; k < 8; ++k) {
      vf *to_r = cr + k * ft_size + i, *to_i = ci + k * ft_size + i;
      to_r[0] = zr[k] + zr[16 - k], to_i[0] = zi[k] - zi[16 - k];
      to_r[1] = zi[k] + zi[16 - k], to_i[1] = zr[16 - k] - zr[k];
    }
  }
  for (int k = 0; k < 8; ++k) transform_sixteen(cr + k * ft_size, ci + k * ft_size);
  for (int p = 0; p < 7 * ft_size; ++p) re[p] = cr[ft_size + p], im[p] = ci[ft_size + p];
  vf *r0 = re + 7 * ft_size, *i0 = im + 7 * ft_size;
  for (int k = 0; k < 9; ++k) {
    const int other = (ft_size - k) % ft_size;
    r0[k] = cr[k] + cr[other], i0[k] = ci[k] - ci[other];
    r0[9 + k] = ci[k] + ci[other], i0[9 + k] = cr[other] - cr[k];
  }
}

// tile [16][16] = 256 times the real tile with the transform (re, im).
static inline void points_to_tile(const vf* re, const vf* im, vf* tile) {
  vf cr[8 * ft_size], ci[8 * ft_size];
  for (int p = 0; p < 7 * ft_size; ++p) cr[ft_size + p] = re[p], ci[ft_size + p] = im[p];
  const vf *r0 = re + 7 * ft_size, *i0 = im + 7 * ft_size;
  for (int k = 0; k < 9; ++k) {
    const int other = (ft_size - k) % ft_size;
    cr[k] = r0[k] - i0[9 + k], ci[k] = i0[k] + r0[9 + k];
    if (other != k) cr[other] = r0[k] + i0[9 + k], ci[other] = r0[9 + k] - i0[k];
  }
  // The imaginary part of the values that are real by their place is not taken.
  for (const int k : {0, 8}) cr[k] = r0[k], ci[k] = r0[9 + k];
  for (int k = 0; k < 8; ++k) transform_sixteen(ci + k * ft_size, cr + k * ft_size);
  for (int i = 0; i < ft_size; i += 2) {
    vf *zr = tile + i * ft_size, *zi = zr + ft_size;
    zr[0] = cr[i], zr[8] = ci[i];
    zi[0] = cr[i + 1], zi[8] = ci[i + 1];
    for (int k = 1; k < 8; ++k) {
      const vf *from_r = cr + k * ft_size + i, *from_i = ci + k * ft_size + i;
      zr[k] = from_r[0] - from_i[1], zi[k] = from_i[0] + from_r[1];
      zr[16 - k] = from_r[0] + from_i[1], zi[16 - k] = from_r[1] - from_i[0];
    }
    transform_sixteen(zi, zr);
  }
}

#include "ops/cpu/conv/panel.h"

constexpr std::int64_t most_weights = 16 << 20, most_band = 16 << 20;  // floats

struct Plan {
  Geometry g;
  std::int64_t tall, wide;     // results of a tile
  std::int64_t rows, columns;  // of tiles
  std::int64_t between;        // zero frames in front of each tile's frames, and behind the last
  std::int64_t ins, outs;      // real and imaginary parts of the channels, in whole vectors
  std::int64_t tiles, band;
  std::int64_t of_weights, of_inputs, of_products;  // floats of a point, of a band
};

std::int64_t in_vectors(std::int64_t n) { return (n + W - 1) / W * W; }
// An odd number of cache lines, so that points do not fall on few sets.
std::int64_t padded_point_stride(std::int64_t n) { return ((n + 15) / 16 | 1) * 16; }

Plan plan(const Geometry& g) {
  Plan p;
  p.g = g;
  p.tall = ft_size - g.kh + 1, p.wide = ft_size - g.kw + 1;
  p.rows = (g.ho + p.tall - 1) / p.tall, p.columns = (g.wo + p.wide - 1) / p.wide;
  p.between = std::max(g.front, g.back);
  p.ins = 2 * in_vectors(g.cin), p.outs = 2 * in_vectors(g.cout);
  p.tiles = g.n * p.rows * p.columns;
  const std::int64_t each = ft_points * ((g.t + p.between) * p.ins + g.to * p.outs);
  const std::int64_t bands = (p.tiles * each + most_band - 1) / most_band;
  p.band = (p.tiles + bands - 1) / bands;
  p.of_weights = padded_point_stride(g.kt * p.ins * p.outs);
  p.of_inputs = padded_point_stride((p.band * (g.t + p.between) + p.between) * p.ins);
  p.of_products = padded_point_stride(p.band * g.to * p.outs);
  return p;
}

// to [130][kt][ins][outs]: products with X's real parts, then with its imaginary ones, give the
// real and then the imaginary parts of X times the conjugate of the kernel's transform.
void transform_weights(const Plan& p, const float* w, float* to) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kh * g.kw, half_in = p.ins / 2, half_out = p.outs / 2;
  const int rows = static_cast<int>((g.kh + 1) / 2 * 2);
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t v = 0; v < half_out; v += W)
    for (std::int64_t c = 0; c < half_in; ++c)
      for (std::int64_t a = 0; a < g.kt; ++a) {
        const int lanes = c < g.cin ? static_cast<int>(std::min<std::int64_t>(W, g.cout - v)) : 0;
        alignas(64) float kernel[(ft_size - 7) * (ft_size - 7) * W];
        vf tile[ft_size * ft_size] = {}, re[ft_points], im[ft_points];
        if (lanes > 0)
          gather_lanes(w + v * g.cin * g.kt * taps, g.cin * g.kt * taps, lanes,
                       (c * g.kt + a) * taps, taps, kernel);
        for (std::int64_t k = 0; k < taps && lanes > 0; ++k)
          tile[k / g.kw * ft_size + k % g.kw] = load(kernel + k * W) * (1.0f / 1024);
        tile_to_points(tile, rows, re, im);
        float* at = to + (a * p.ins + c) * p.outs + v;
        for (int k = 0; k < ft_points; ++k, at += p.of_weights) {
          store(at, re[k]), store(at + half_out, -im[k]);
          float* imaginary = at + half_in * p.outs;
          store(imaginary, im[k]), store(imaginary + half_out, re[k]);
        }
      }
}

struct TileOrigin {
  std::int64_t sample, row, column;  // of a tile's first result
};
TileOrigin tile_origin(const Plan& p, std::int64_t tile) {
  return {tile / (p.rows * p.columns), tile / p.columns % p.rows * p.tall,
          tile % p.columns * p.wide};
}

// Frame t of a tile into `to`, of the points [130][ins].
void transform_input(const Plan& p, const float* x, std::int64_t tile, std::int64_t t, float* to) {
  const Geometry& g = p.g;
  const TileOrigin q = tile_origin(p, tile);
  const float* frame = x + (q.sample * g.t + t) * g.h * g.w * g.cin;
  const std::int64_t half = p.ins / 2;
  for (std::int64_t c = 0; c < half; c += W) {
    const int n = static_cast<int>(std::min<std::int64_t>(W, g.cin - c));
    vf in[ft_size * ft_size], re[ft_points], im[ft_points];
    for (int i = 0; i < ft_size; ++i)
      for (int j = 0; j < ft_size; ++j) {
        const std::int64_t h = q.row + i - g.top, u = q.column + j - g.left;
        in[i * ft_size + j] = h < 0 || u < 0 || h >= g.h || u >= g.w
                                  ? vf{}
                                  : load_n(frame + (h * g.w + u) * g.cin + c, n);
      }
    tile_to_points(in, ft_size, re, im);
    for (int k = 0; k < ft_points; ++k) {
      store(to + k * p.of_inputs + c, re[k]);
      store(to + k * p.of_inputs + half + c, im[k]);
    }
  }
}

// The results of frame t of a tile from their points [130][outs].
void transform_output(const Plan& p, const float* from, const float* bias, bool add,
                      std::int64_t tile, std::int64_t t, float* y) {
  const Geometry& g = p.g;
  const TileOrigin q = tile_origin(p, tile);
  const std::int64_t rows = std::min(p.tall, g.ho - q.row),
                     columns = std::min(p.wide, g.wo - q.column), half = p.outs / 2;
  float* to = y + (((q.sample * g.to + t) * g.ho + q.row) * g.wo + q.column) * g.cout;
  for_vectors(g.cout, [&](std::int64_t c, int n) {
    vf out[ft_size * ft_size], re[ft_points], im[ft_points];
    for (int k = 0; k < ft_points; ++k) {
      re[k] = load(from + k * p.of_products + c);
      im[k] = load(from + k * p.of_products + half + c);
    }
    points_to_tile(re, im, out);
    const vf b = bias ? load_n(bias + c, n) : vf{};
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        float* at = to + (i * g.wo + j) * g.cout + c;
        vf v = out[i * ft_size + j] + b;
        if (add) v += load_n(at, n);
        store_n(at, v, n);
      }
  });
}

}  // namespace

bool fourier_fits(const Geometry& g) {
  const auto large = [](std::int64_t k) { return k >= 5 && k <= 9; };
  // Frames and zeros in front of them and behind are one run: more zeros than a kernel sees are not
  // among them.
  return large(g.kh) && large(g.kw) && g.stride == 1 && g.stride_t == 1 && g.dilation == 1 &&
         g.groups == 1 && g.cin >= 16 && g.cout >= 8 && g.ho >= 8 && g.wo >= 8 && g.front < g.kt &&
         g.back >= 0 && g.back < g.kt &&
         ft_points * g.kt * 4 * in_vectors(g.cin) * in_vectors(g.cout) <= most_weights;
}

void fourier_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                     float* y) {
  const Plan p = plan(g);
  const Tensor weights = floats(ft_points * p.of_weights), inputs = floats(ft_points * p.of_inputs),
               products = floats(ft_points * p.of_products);
  if (planning()) return;
  transform_weights(p, w, weights.data<float>());
  float *in = inputs.data<float>(), *out = products.data<float>();
  const std::int64_t step = (g.t + p.between) * p.ins, zeros = p.between * p.ins;
  for (std::int64_t first = 0; first < p.tiles; first += p.band) {
    const std::int64_t count = std::min(p.band, p.tiles - first);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (std::int64_t tile = 0; tile < count; ++tile)
        for (std::int64_t t = 0; t < g.t; ++t)
          transform_input(p, x, first + tile, t, in + tile * step + zeros + t * p.ins);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t k = 0; k < ft_points; ++k) {
        float* rows = in + k * p.of_inputs;
        for (std::int64_t tile = 0; tile <= count; ++tile)
          std::fill_n(rows + tile * step, zeros, 0.0f);
        const float* b = weights.data<float>() + k * p.of_weights;
        float* to = out + k * p.of_products;
        // A row and those of the frames behind it lie one behind the other: the sum over frames is
        // part of the depth.
        const float* from = rows + zeros - g.front * p.ins;
        const std::int64_t run = g.kt == 1 ? count * g.to : g.to;
        for (std::int64_t tile = 0; tile < (g.kt == 1 ? 1 : count); ++tile)
          small_gemm(run, p.outs, g.kt * p.ins, from + tile * step, p.ins, 1, b, p.outs,
                     to + tile * g.to * p.outs, p.outs, false);
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (std::int64_t tile = 0; tile < count; ++tile)
        for (std::int64_t t = 0; t < g.to; ++t)
          transform_output(p, out + (tile * g.to + t) * p.outs, bias, add, first + tile, t, y);
    }
  }
}

WEFT_CPU_END
