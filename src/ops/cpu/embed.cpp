// CPU side of ops/layout.h. These run once a step on little data; clear loops are enough.
#include "ops/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"
}  // namespace

void position_embedding(int H, int Wn, double scale, Tensor& p) {
  const std::int64_t C = p.dim(1), quarter = C / 4;
  // Python's round(): halves to even, which is the default rounding of nearbyint.
  const double base = std::nearbyint(std::sqrt(static_cast<double>(H) * Wn));
  // Two separate f32 operations, as in the original: divide by scale, then multiply by the ratio.
  const float divisor = static_cast<float>(scale);
  const float ratio_w = static_cast<float>(base / Wn), ratio_h = static_cast<float>(base / H);
  float* out = p.data<float>();
#pragma omp parallel for schedule(static)
  for (int j = 0; j < H; ++j)
    for (int i = 0; i < Wn; ++i) {
      float* row = out + (static_cast<std::int64_t>(j) * Wn + i) * C;
      const float gx = static_cast<float>(i) / divisor * ratio_w;
      const float gy = static_cast<float>(j) / divisor * ratio_h;
      for (std::int64_t k = 0; k < quarter; ++k) {
        const float frequency = static_cast<float>(
            1.0 / std::pow(10000.0, static_cast<double>(k) / static_cast<double>(quarter)));
        row[k] = std::sin(gx * frequency);
        row[quarter + k] = std::cos(gx * frequency);
        row[2 * quarter + k] = std::sin(gy * frequency);
        row[3 * quarter + k] = std::cos(gy * frequency);
      }
    }
}

void add_position(const Tensor& p, Tensor& x) {
  const std::int64_t size = p.numel(), c = p.dim(1), tokens = p.dim(0), frames = x.numel() / size;
  const float* ps = p.data<float>();
  with_type(x.dtype(), [&](auto type) {
    auto* xs = x.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < frames * tokens; ++row)
      for_vectors(c, [&](std::int64_t i, int n) {
        auto* at = xs + row * c + i;
        store_n(at, load_n(at, n) + load_n(ps + row % tokens * c + i, n), n);
      });
  });
}

void timestep_embedding(const Tensor& s, Tensor& e) {
  const std::int64_t count = s.numel(), half = e.dim(1) / 2;
  const float* in = s.data<float>();
  float* out = e.data<float>();
  for (std::int64_t k = 0; k < half; ++k) {
    // The frequency and the angle are each rounded to f32: at s ~ 1000 more precision would change
    // the output.
    const float frequency = std::exp(static_cast<float>(-std::log(10000.0)) *
                                     static_cast<float>(k) / static_cast<float>(half));
    for (std::int64_t i = 0; i < count; ++i) {
      const float angle = in[i] * frequency;
      out[i * 2 * half + k] = std::cos(angle);
      out[i * 2 * half + half + k] = std::sin(angle);
    }
  }
}

void rope_table(const Tensor& freqs, Tensor& rope) {
  const std::int64_t positions = rope.dim(0), half = rope.dim(1);
  const float* f = freqs.data<float>();
  float* out = rope.data<float>();
  for (std::int64_t p = 0; p < positions; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * f[i];
      out[(p * half + i) * 2] = std::cos(angle);
      out[(p * half + i) * 2 + 1] = std::sin(angle);
    }
}

void rope_table_3d(int rows, int columns, std::int64_t first, Tensor& rope) {
  const std::int64_t count = rope.dim(0), half = rope.dim(1), third = half / 3;
  const std::int64_t last = first + count, frame = std::int64_t{rows} * columns;
  if (count == 0) return;
  // (cos, sin) of every position of an axis from `from` on; tokens are put together of these.
  struct Axis {
    std::int64_t from, pairs;
    std::vector<float> turns;
    void copy_to(float*& out, std::int64_t position) const {
      out = std::copy_n(turns.data() + (position - from) * 2 * pairs, 2 * pairs, out);
    }
  };
  const auto axis = [](std::int64_t from, std::int64_t to, std::int64_t pairs) {
    Axis a{from, pairs, {}};
    for (std::int64_t at = from; at < to; ++at)
      for (std::int64_t i = 0; i < pairs; ++i) {
        const double angle =
            static_cast<double>(at) *
            std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(pairs));
        a.turns.push_back(static_cast<float>(std::cos(angle)));
        a.turns.push_back(static_cast<float>(std::sin(angle)));
      }
    return a;
  };
  const Axis by_frame = axis(first / frame, (last - 1) / frame + 1, half - 2 * third);
  const Axis by_row = axis(0, rows, third), by_column = axis(0, columns, third);
  float* out = rope.data<float>();
  for (std::int64_t n = first; n < last; ++n) {
    by_frame.copy_to(out, n / frame);
    by_row.copy_to(out, n / columns % rows);
    by_column.copy_to(out, n % columns);
  }
}

void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y) {
  const std::int64_t c = table.dim(1), rows = ids.numel();
  const std::int32_t* id = ids.data<std::int32_t>();
  with_type(table.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = table.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for schedule(static) if (rows * c > 65536)
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(from + id[r] * c, c, to + r * c);
  });
}

void gather_captions(const Tensor& y, const Tensor& null_caption, const Tensor& index,
                     Tensor& rows) {
  const std::int64_t c = rows.dim(-1);
  const std::int32_t* at = index.data<std::int32_t>();
  const float* from = y.defined() ? y.data<float>() : nullptr;
  with_type(rows.dtype(), [&](auto type) {
    auto* out = rows.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < index.numel(); ++r) {
      if (at[r] == padding_row) {
        std::fill_n(out + r * c, c, decltype(type)(0.0f));
        continue;
      }
      const float* row =
          at[r] >= 0 ? from + at[r] * c : null_caption.data<float>() + (-1 - at[r]) * c;
      for_vectors(c,
                  [&](std::int64_t i, int n) { store_n(out + r * c + i, load_n(row + i, n), n); });
    }
  });
}

void gather_captions_backward(const Tensor& drows, const Tensor& index, Tensor& dy) {
  const std::int64_t c = drows.dim(-1);
  const std::int32_t* at = index.data<std::int32_t>();
  float* out = dy.data<float>();
  with_type(drows.dtype(), [&](auto type) {
    const auto* in = drows.data<decltype(type)>();
    for (std::int64_t r = 0; r < index.numel(); ++r)
      if (at[r] >= 0)
        for (std::int64_t i = 0; i < c; ++i)
          out[at[r] * c + i] += static_cast<float>(in[r * c + i]);
  });
}

WEFT_CPU_END
