// Convolutions to one to four channels (an image, a mask). Vectors run over the input channels, so
// that no lane is empty; sums over the lanes are taken once, at the end. A strip of rows of the
// result at a time, and of that some channels: its inputs are copied with their padding into a
// window that stays in the second-level cache and has channels side by side at a fixed distance.
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
#include "ops/cpu/simd.h"

constexpr std::int64_t chunk = 64;              // channels at a time
constexpr std::int64_t most_window = 64 << 10;  // floats

// Pixels of the result at a time: enough independent sums for the pipeline, few enough for the
// registers.
constexpr int pixels_for(int outs) { return outs == 1 ? 8 : outs == 2 ? 4 : outs == 3 ? 3 : 2; }

struct Plan {
  Geometry g;
  std::int64_t chunks;
  std::int64_t wide;          // columns of the result, in whole blocks of pixels
  std::int64_t rows, strips;  // of a strip; of all frames
  std::int64_t weights;       // floats
  std::int64_t window, sums;  // floats of a thread
};

Plan plan(const Geometry& g) {
  Plan p;
  p.g = g;
  p.chunks = (g.cin + chunk - 1) / chunk;
  const std::int64_t pixels = pixels_for(static_cast<int>(g.cout));
  p.wide = (g.wo + pixels - 1) / pixels * pixels;
  const std::int64_t row = (p.wide + g.kw - 1) * chunk;
  p.rows =
      std::clamp<std::int64_t>(most_window / row - (g.kh - 1), 1, std::min<std::int64_t>(g.ho, 16));
  p.strips = (g.ho + p.rows - 1) / p.rows;
  p.weights = p.chunks * g.kt * g.kh * g.kw * g.cout * chunk;
  p.window = (p.rows + g.kh - 1) * row;
  p.sums = p.rows * p.wide * g.cout * W;
  return p;
}

// to [chunks][kt][kh][vectors of the chunk][kw][cout][W], zero beyond the channels.
void order_weights(const Plan& p, const float* w, float* to) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kt * g.kh * g.kw;
#pragma omp parallel for schedule(static)
  for (std::int64_t k = 0; k < p.chunks; ++k) {
    float* at = to + k * taps * g.cout * chunk;
    for (std::int64_t row = 0; row < g.kt * g.kh; ++row)
      for (std::int64_t c = k * chunk; c < (k + 1) * chunk; c += W)
        for (std::int64_t tap = row * g.kw; tap < (row + 1) * g.kw; ++tap)
          for (std::int64_t o = 0; o < g.cout; ++o)
            for (std::int64_t lane = c; lane < c + W; ++lane)
              *at++ = lane < g.cin ? w[(o * g.cin + lane) * taps + tap] : 0.0f;
  }
}

// window [rows + kh - 1][wide + kw - 1][chunk] of the frame: rows from h on, channels from c on.
void take_window(const Plan& p, const float* frame, std::int64_t h, std::int64_t c, float* window) {
  const Geometry& g = p.g;
  const std::int64_t width = p.wide + g.kw - 1, channels = std::min(chunk, g.cin - c);
  for (std::int64_t i = 0; i < p.rows + g.kh - 1; ++i) {
    const std::int64_t row = h + i - g.top;
    for (std::int64_t j = 0; j < width; ++j, window += chunk) {
      const std::int64_t column = j - g.left;
      if (row < 0 || column < 0 || row >= g.h || column >= g.w) {
        for (int v = 0; v < chunk; v += W) store(window + v, vf{});
        continue;
      }
      const float* from = frame + (row * g.w + column) * g.cin + c;
      if (channels == chunk) {
        for (int v = 0; v < chunk; v += W) store(window + v, load(from + v));
        continue;
      }
      for (int v = 0; v < chunk; v += W) {
        const std::int64_t n = std::clamp<std::int64_t>(channels - v, 0, W);
        store(window + v, n > 0 ? load_n(from + v, static_cast<int>(n)) : vf{});
      }
    }
  }
}

// sums [pixels][outs][W] += the products of a block of pixels with the kernel's rows; `width`:
// columns of the window.
template <int taps, int outs>
[[gnu::noinline]] void add_block(std::int64_t kh, std::int64_t width, const float* window,
                                 const float* weights, float* sums) {
  constexpr int pixels = pixels_for(outs);
  vf acc[pixels][outs];
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p)
#pragma GCC unroll 4
    for (int o = 0; o < outs; ++o) acc[p][o] = load(sums + (p * outs + o) * W);
  for (std::int64_t b = 0; b < kh; ++b) {
    const float* x = window + b * width * chunk;
    for (int c = 0; c < chunk; c += W, weights += taps * outs * W) {
      if constexpr (outs == 1) {
        vf w[taps];
#pragma GCC unroll 9
        for (int k = 0; k < taps; ++k) w[k] = load(weights + k * W);
#pragma GCC unroll 16
        for (int j = 0; j < pixels + taps - 1; ++j) {
          const vf v = load(x + j * chunk + c);
#pragma GCC unroll 9
          for (int k = 0; k < taps; ++k)
            if (j - k >= 0 && j - k < pixels) acc[j - k][0] += v * w[k];
        }
      } else {
#pragma GCC unroll 9
        for (int k = 0; k < taps; ++k) {
          vf v[pixels];
#pragma GCC unroll 8
          for (int p = 0; p < pixels; ++p) v[p] = load(x + (p + k) * chunk + c);
#pragma GCC unroll 4
          for (int o = 0; o < outs; ++o) {
            const vf w = load(weights + (k * outs + o) * W);
#pragma GCC unroll 8
            for (int p = 0; p < pixels; ++p) acc[p][o] += v[p] * w;
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p)
#pragma GCC unroll 4
    for (int o = 0; o < outs; ++o) store(sums + (p * outs + o) * W, acc[p][o]);
}

using Block = void (*)(std::int64_t, std::int64_t, const float*, const float*, float*);
template <int taps>
Block block_of(std::int64_t outs) {
  constexpr Block blocks[] = {add_block<taps, 1>, add_block<taps, 2>, add_block<taps, 3>,
                              add_block<taps, 4>};
  return blocks[outs - 1];
}
Block block_for(const Geometry& g) {
  return g.kw == 3 ? block_of<3>(g.cout) : g.kw == 5 ? block_of<5>(g.cout) : block_of<7>(g.cout);
}

}  // namespace

bool narrow_fits(const Geometry& g) {
  return g.cout <= 4 && g.cin >= 16 && (g.kw == 3 || g.kw == 5 || g.kw == 7) && g.stride == 1 &&
         g.stride_t == 1 && g.dilation == 1 && g.groups == 1;
}

void narrow_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y) {
  detail::add_flops(g.flops());
  const Plan p = plan(g);
  const std::int64_t tasks = g.n * g.to * p.strips;
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), tasks));
  const Tensor weights = floats(p.weights), between = floats(threads * (p.window + p.sums));
  if (planning()) return;
  order_weights(p, w, weights.data<float>());
  const Block block = block_for(g);
  const std::int64_t pixels = pixels_for(static_cast<int>(g.cout)), width = p.wide + g.kw - 1,
                     of_tap = g.kh * g.kw * g.cout * chunk;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t task = 0; task < tasks; ++task) {
    float* window = between.data<float>() + omp_get_thread_num() * (p.window + p.sums);
    float* sums = window + p.window;
    const std::int64_t h = task % p.strips * p.rows, t = task / p.strips % g.to,
                       n = task / p.strips / g.to, rows = std::min(p.rows, g.ho - h);
    std::fill_n(sums, p.sums, 0.0f);
    for (std::int64_t k = 0; k < p.chunks; ++k)
      for (std::int64_t a = 0; a < g.kt; ++a) {
        const std::int64_t frame = t + a - g.front;
        if (frame < 0 || frame >= g.t) continue;
        take_window(p, x + (n * g.t + frame) * g.h * g.w * g.cin, h, k * chunk, window);
        const float* of_chunk = weights.data<float>() + (k * g.kt + a) * of_tap;
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t j = 0; j < p.wide; j += pixels)
            block(g.kh, width, window + (i * width + j) * chunk, of_chunk,
                  sums + (i * p.wide + j) * g.cout * W);
      }
    float* to = y + ((n * g.to + t) * g.ho + h) * g.wo * g.cout;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < g.wo; ++j)
        for (std::int64_t o = 0; o < g.cout; ++o, ++to) {
          const float v =
              hsum(load(sums + ((i * p.wide + j) * g.cout + o) * W)) + (bias ? bias[o] : 0.0f);
          *to = add ? *to + v : v;
        }
  }
}

WEFT_CPU_END
