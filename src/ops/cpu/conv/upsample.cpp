// 3x3 of a frame seen at twice its height and width, without that frame. In one dimension the rows
// 2i and 2i + 1 of the result see, of the small frame x and the kernel (a, b, c),
//
//   y[2i]     = a x[i-1] + (b + c) x[i]     = s x[i] - a (x[i] - x[i-1])        s = a + b + c
//   y[2i + 1] = (a + b) x[i] + c x[i+1]     = s x[i] + c (x[i+1] - x[i])
//
// three products for two results, and nine for four in the plane, as Winograd's F(4x4,3x3) would
// take; but no tile has to fit into the frame, weights stay as many as they are, and all constants
// are 1. Kernels of several frames are the sum over them. Each task is a panel of output channels
// at some pixels: it takes the weights from where they lie, a chunk of input channels at a time.
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
#include "ops/cpu/gemm_tile.h"
//
#include "ops/cpu/conv/panel.h"

constexpr int points = 9;  // products a small pixel
// Rows (pixels of frames) of a task, and input channels at a time: what they take stays in the
// second-level cache.
constexpr std::int64_t most_rows = 128, most_channels = 64;

struct Plan {
  Geometry g;                   // of the small frame, but for ho and wo
  std::int64_t samples, depth;  // a kernel of one frame sees all frames as samples of depth 1
  std::int64_t pixels;          // of all samples
  std::int64_t block, blocks;   // of pixels
  std::int64_t panels;
  std::int64_t channels;  // at a time
};

Plan plan(const Geometry& g) {
  Plan p;
  p.g = g;
  p.samples = g.kt == 1 ? g.n * g.t : g.n;
  p.depth = g.kt == 1 ? 1 : g.t;
  p.pixels = p.samples * g.h * g.w;
  p.block = std::max<std::int64_t>(1, most_rows / p.depth);
  p.blocks = (p.pixels + p.block - 1) / p.block;
  p.panels = (g.cout + panel_width - 1) / panel_width;
  p.channels = std::min(g.cin, most_channels);
  return p;
}

// Pixel number `at` of the samples, frame t: its place in x.
struct Place {
  std::int64_t sample, row, column;
};
Place place(const Plan& p, std::int64_t at) {
  return {at / (p.g.h * p.g.w), at / p.g.w % p.g.h, at % p.g.w};
}

// to [9][count][depth][channels]: the inputs of the products of pixels [first, first + count) and
// channels [c0, c0 + channels).
void take_inputs(const Plan& p, const float* x, std::int64_t first, std::int64_t count,
                 std::int64_t c0, std::int64_t channels, float* to) {
  const Geometry& g = p.g;
  const std::int64_t apart = count * p.depth * channels;
  for (std::int64_t pixel = 0; pixel < count; ++pixel) {
    const Place q = place(p, first + pixel);
    for (std::int64_t t = 0; t < p.depth; ++t) {
      const float* from[9];  // the neighbours; null where there is only padding
      for (int k = 0; k < 9; ++k) {
        const std::int64_t i = q.row + k / 3 - 1, j = q.column + k % 3 - 1;
        from[k] = i < 0 || j < 0 || i >= g.h || j >= g.w
                      ? nullptr
                      : x + (((q.sample * p.depth + t) * g.h + i) * g.w + j) * g.cin + c0;
      }
      float* at = to + (pixel * p.depth + t) * channels;
      for_vectors(channels, [&](std::int64_t c, int n) {
        vf half[9], all[9];
        for (int i = 0; i < 3; ++i) {
          vf v[3];
          for (int j = 0; j < 3; ++j)
            v[j] = from[3 * i + j] ? load_n(from[3 * i + j] + c, n) : vf{};
          half[3 * i] = v[1], half[3 * i + 1] = v[1] - v[0], half[3 * i + 2] = v[2] - v[1];
        }
        for (int j = 0; j < 3; ++j) {
          all[j] = half[3 + j];
          all[3 + j] = half[3 + j] - half[j];
          all[6 + j] = half[6 + j] - half[3 + j];
        }
        for (int k = 0; k < points; ++k) store_n(at + k * apart + c, all[k], n);
      });
    }
  }
}

// to [kt][9][channels][width]: the weights of the products for outputs [o0, o0 + width). `lanes`:
// scratch.
void take_weights(const Plan& p, const float* w, std::int64_t o0, std::int64_t width,
                  std::int64_t c0, std::int64_t channels, float* lanes, float* to) {
  const Geometry& g = p.g;
  const std::int64_t taps = g.kt * 9;
  for (std::int64_t v = 0; v < width; v += W) {
    const int outs = static_cast<int>(std::clamp<std::int64_t>(g.cout - o0 - v, 0, W));
    gather_lanes(w + (o0 + v) * g.cin * taps, g.cin * taps, outs, c0 * taps, channels * taps,
                 lanes);
    for (std::int64_t c = 0; c < channels; ++c)
      for (std::int64_t a = 0; a < g.kt; ++a) {
        const float* from = lanes + (c * taps + a * 9) * W;
        vf half[9], all[9];
        for (int i = 0; i < 3; ++i) {
          const vf first = load(from + 3 * i * W), last = load(from + (3 * i + 2) * W);
          half[3 * i] = first + load(from + (3 * i + 1) * W) + last;
          half[3 * i + 1] = -first, half[3 * i + 2] = last;
        }
        for (int j = 0; j < 3; ++j) {
          all[j] = half[j] + half[3 + j] + half[6 + j];
          all[3 + j] = -half[j], all[6 + j] = half[6 + j];
        }
        for (int k = 0; k < points; ++k)
          store(to + ((a * points + k) * channels + c) * width + v, all[k]);
      }
  }
}

// products [9][rows][width] (+)= inputs times weights, for all frames of the kernel.
void multiply(const Plan& p, std::int64_t count, std::int64_t channels, std::int64_t width,
              const float* inputs, const float* weights, bool accumulate, float* products) {
  const Geometry& g = p.g;
  const std::int64_t rows = count * p.depth;
  for (int k = 0; k < points; ++k) {
    const float* in = inputs + k * rows * channels;
    float* out = products + k * rows * width;
    // The tap that sees every frame comes first.
    for (std::int64_t i = 0; i < g.kt; ++i) {
      const std::int64_t a = (g.front + i) % g.kt, shift = a - g.front;
      const float* b = weights + (a * points + k) * channels * width;
      if (g.kt == 1) {
        small_gemm(rows, width, channels, in, channels, 1, b, width, out, width, accumulate);
        continue;
      }
      const std::int64_t from = std::max<std::int64_t>(0, -shift),
                         to = std::min(p.depth, p.depth - shift);
      for (std::int64_t pixel = 0; pixel < count && from < to; ++pixel)
        small_gemm(to - from, width, channels, in + (pixel * p.depth + from + shift) * channels,
                   channels, 1, b, width, out + (pixel * p.depth + from) * width, width,
                   accumulate || i > 0);
    }
  }
}

// The results of pixels [first, first + count), outputs [o0, o0 + width).
void give_outputs(const Plan& p, std::int64_t first, std::int64_t count, std::int64_t o0,
                  std::int64_t width, const float* products, const float* bias, bool add,
                  float* y) {
  const Geometry& g = p.g;
  const std::int64_t rows = count * p.depth, outs = std::min(width, g.cout - o0);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Place q = place(p, first + r / p.depth);
    const std::int64_t frame = q.sample * p.depth + r % p.depth;
    float* to = y + ((frame * 2 * g.h + 2 * q.row) * 2 * g.w + 2 * q.column) * g.cout + o0;
    for_vectors(outs, [&](std::int64_t c, int n) {
      vf m[9];
      for (int k = 0; k < points; ++k) m[k] = load(products + (k * rows + r) * width + c);
      const vf b = bias ? load_n(bias + o0 + c, n) : vf{};
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
          float* at = to + (i * 2 * g.w + j) * g.cout + c;
          vf v = (m[0] + m[1 + j]) + (m[3 + 3 * i] + m[4 + 3 * i + j]) + b;
          if (add) v += load_n(at, n);
          store_n(at, v, n);
        }
    });
  }
}

}  // namespace

void upsample_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y) {
  detail::add_flops(g.flops());
  const Plan p = plan(g);
  const std::int64_t tasks = p.blocks * p.panels, rows = p.block * p.depth;
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), tasks));
  const std::int64_t inputs = points * rows * padded_stride(p.channels),
                     weights = points * g.kt * p.channels * panel_width,
                     products = points * rows * panel_width, lanes = g.kt * 9 * p.channels * W;
  const std::int64_t each = inputs + weights + products + lanes;
  const Tensor scratch = floats(threads * each);
  if (planning()) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t task = 0; task < tasks; ++task) {
    float* in = scratch.data<float>() + omp_get_thread_num() * each;
    float *of_weights = in + inputs, *out = of_weights + weights, *of_lanes = out + products;
    const std::int64_t first = task / p.panels * p.block,
                       count = std::min(p.block, p.pixels - first);
    const std::int64_t o0 = task % p.panels * panel_width,
                       width = std::min(panel_width, (g.cout - o0 + W - 1) / W * W);
    for (std::int64_t c = 0; c < g.cin; c += p.channels) {
      const std::int64_t channels = std::min(p.channels, g.cin - c);
      take_inputs(p, x, first, count, c, channels, in);
      take_weights(p, w, o0, width, c, channels, of_lanes, of_weights);
      multiply(p, count, channels, width, in, of_weights, c > 0, out);
    }
    give_outputs(p, first, count, o0, width, out, bias, add, y);
  }
}

WEFT_CPU_END
