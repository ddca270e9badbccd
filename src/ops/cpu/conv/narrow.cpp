// Convolutions to few channels, such as a picture's colours or a mask: a vector of outputs would be
// mostly empty. A row of pixels times the weights of all taps is one matrix product, with a column
// for each tap and output; the columns are then added, each moved by its tap.
#include <immintrin.h>
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

constexpr std::int64_t least_rows = 16;  // of a task: those beside them are multiplied twice

struct Columns {
  explicit Columns(const Geometry& g)
      : taps(g.kh * g.kw), all((taps * g.cout + W - 1) / W * W), stride(padded_stride(all)) {}
  std::int64_t taps, all, stride;  // of a product: columns, floats from row to row
};

// to [kt][cin][columns]: column (tap, output).
void order_weights(const Geometry& g, const Columns& c, const float* w, float* to) {
  std::fill_n(to, g.kt * g.cin * c.all, 0.0f);
  for (std::int64_t o = 0; o < g.cout; ++o)
    for (std::int64_t i = 0; i < g.cin; ++i)
      for (std::int64_t a = 0; a < g.kt; ++a)
        for (std::int64_t k = 0; k < c.taps; ++k)
          to[(a * g.cin + i) * c.all + k * g.cout + o] =
              w[((o * g.cin + i) * g.kt + a) * c.taps + k];
}

// Adds to row y [wo,cout] the columns of the kernel's row b, from products of a row of pixels.
void add_columns(const Geometry& g, const Columns& c, const float* products, std::int64_t b,
                 float* y) {
  for (std::int64_t k = 0; k < g.kw; ++k) {
    const std::int64_t move = k - g.left, first = std::max<std::int64_t>(0, -move),
                       last = std::min(g.wo, g.w - move);
    const float* from = products + (first + move) * c.stride + (b * g.kw + k) * g.cout;
    for (std::int64_t j = first; j < last; ++j, from += c.stride)
      for (std::int64_t o = 0; o < g.cout; ++o) y[j * g.cout + o] += from[o];
  }
}

}  // namespace

bool narrow_fits(const Geometry& g) {
  return g.cout <= 4 && g.cin >= 32 && g.groups == 1 && g.stride == 1 && g.stride_t == 1 &&
         g.dilation == 1 && g.kh > 1 && g.kw > 1 && g.kh * g.kw <= 49 && g.ho * g.wo >= 1024;
}

void narrow_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y) {
  const Columns c(g);
  const std::int64_t threads = omp_get_max_threads(), frames = g.n * g.to;
  const std::int64_t rows =
      std::min(g.ho, std::max(least_rows, (frames * g.ho + threads - 1) / threads));
  const std::int64_t tasks = (g.ho + rows - 1) / rows;  // of a frame
  const Tensor weights = floats(g.kt * g.cin * c.all), scratch = floats(threads * g.w * c.stride);
  if (planning()) return;
  order_weights(g, c, w, weights.data<float>());
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(threads))
  for (std::int64_t task = 0; task < frames * tasks; ++task) {
    const std::int64_t frame = task / tasks, n = frame / g.to, t = frame % g.to;
    const std::int64_t begin = task % tasks * rows, end = std::min(g.ho, begin + rows);
    float* const out = y + frame * g.ho * g.wo * g.cout;
    float* const products = scratch.data<float>() + omp_get_thread_num() * g.w * c.stride;
    for (std::int64_t i = begin * g.wo; i < end * g.wo; ++i)
      for (std::int64_t o = 0; o < g.cout; ++o)
        out[i * g.cout + o] = (add ? out[i * g.cout + o] : 0.0f) + (bias ? bias[o] : 0.0f);
    for (std::int64_t a = 0; a < g.kt; ++a) {
      const std::int64_t from = t + a - g.front;
      if (from < 0 || from >= g.t) continue;
      for (std::int64_t r = std::max<std::int64_t>(0, begin - g.top);
           r < std::min(g.h, end - g.top + g.kh - 1); ++r) {
        small_gemm(g.w, c.all, g.cin, x + ((n * g.t + from) * g.h + r) * g.w * g.cin, g.cin, 1,
                   weights.data<float>() + a * g.cin * c.all, c.all, products, c.stride, false);
        for (std::int64_t b = 0; b < g.kh; ++b)
          if (const std::int64_t row = r + g.top - b; row >= begin && row < end)
            add_columns(g, c, products, b, out + row * g.wo * g.cout);
      }
    }
  }
}

WEFT_CPU_END
