// CPU side of ops/conv.h.
#include "ops/conv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// weights [cells][3]: those of a line's cells in the pixels before, at and after `pixel` of `size`.
void line_weights(std::int64_t pixel, std::int64_t size, std::int64_t cells, float* weights) {
  std::fill_n(weights, cells * 3, 0.0f);
  for (std::int64_t u = 0; u < 3; ++u) {
    const std::int64_t p = pixel + u - 1;
    if (p < 0 || p >= size) continue;
    const float scale = static_cast<float>(cells) / static_cast<float>(size);
    const float at = std::max(0.0f, (static_cast<float>(p) + 0.5f) * scale - 0.5f);
    const std::int64_t low = std::min(static_cast<std::int64_t>(at), cells - 1);
    const float share = at - static_cast<float>(low);
    weights[low * 3 + u] += 1.0f - share;
    weights[std::min(low + 1, cells - 1) * 3 + u] += share;
  }
}

// Calls f(element of dense, element of w) for all of the chosen channels; `taps_first` says which
// order dense has.
template <class F>
void each_weight(const Shape& w, std::int64_t first, std::int64_t count, bool taps_first, F&& f) {
  const std::int64_t outs = w[0], ins = w[1], taps = w[2] * w[3];
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < outs; ++o) {
    const std::int64_t at = (o * ins + first) * taps;
    if (taps_first)
      for (std::int64_t k = 0; k < taps; ++k)
        for (std::int64_t c = 0; c < count; ++c) f((k * outs + o) * count + c, at + c * taps + k);
    else
      for (std::int64_t i = 0; i < count * taps; ++i) f(o * count * taps + i, at + i);
  }
}

}  // namespace

void resize_taps(std::int64_t s, std::int64_t first, Tensor& a) {
  const std::int64_t H = a.dim(0), width = a.dim(1), K = a.dim(2);
  WEFT_ASSERT(s > 0 && first >= 0 && first + 9 * s * s <= K);
  std::vector<float> of_rows(H * s * 3), of_columns(static_cast<std::size_t>(width * s * 3));
  for (std::int64_t h = 0; h < H; ++h) line_weights(h, H, s, of_rows.data() + h * s * 3);
  for (std::int64_t w = 0; w < width; ++w) line_weights(w, width, s, of_columns.data() + w * s * 3);
  with_type(a.dtype(), [&](auto type) {
    using T = decltype(type);
    T* const to = a.data<T>();
#pragma omp parallel for schedule(static) collapse(2)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t w = 0; w < width; ++w) {
        T* at = to + (h * width + w) * K + first;
        const float* row = of_rows.data() + h * s * 3;
        for (std::int64_t i = 0; i < s; ++i, row += 3) {
          const float* column = of_columns.data() + w * s * 3;
          for (std::int64_t j = 0; j < s; ++j, column += 3)
            for (int u = 0; u < 3; ++u)
              for (int v = 0; v < 3; ++v) *at++ = T(row[u] * column[v]);
        }
      }
  });
}

void take_input_channels(const Tensor& w, std::int64_t first, Tensor& to) {
  const bool taps_first = to.shape().rank() == 3;
  with_type(w.dtype(), [&](auto type) {
    const auto* from = w.data<decltype(type)>();
    auto* dense = to.data<decltype(type)>();
    each_weight(w.shape(), first, to.dim(taps_first ? 2 : 1), taps_first,
                [&](std::int64_t i, std::int64_t at) { dense[i] = from[at]; });
  });
}

void give_input_channels(const Tensor& from, std::int64_t first, Tensor& dw, bool accumulate) {
  const bool taps_first = from.shape().rank() == 3;
  const float* dense = from.data<float>();
  float* to = dw.data<float>();
  each_weight(
      dw.shape(), first, from.dim(taps_first ? 2 : 1), taps_first,
      [&](std::int64_t i, std::int64_t at) { to[at] = accumulate ? to[at] + dense[i] : dense[i]; });
}

WEFT_CPU_END
