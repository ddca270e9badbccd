// CPU side of ops/norm.h, bound by memory: with v for one map, statistics 1 v, the norm 4 v
// (3.25 from a map of half the size).
#include "ops/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Rows of a piece that are added in registers before a sum is touched.
constexpr std::int64_t rows_at_once = 4;

}  // namespace

// Sums of x - x at the sample's first position, channel by channel: what is left is of the size of
// the deviation, whatever the mean, and nothing cancels.
void instance_statistics(const Tensor& x, Tensor& statistics) {
  const std::int64_t N = x.dim(0), C = x.dim(-1);
  if (planning() || x.numel() == 0) return;
  const std::int64_t P = x.numel() / (N * C);
  const InstancePieces pieces = instance_pieces(P);
  WEFT_ASSERT(statistics.shape() == Shape({N, 2, C}));
  struct Partials;
  float* const partial = scratch<Partials>(static_cast<std::size_t>(N * pieces.count * 2 * C));
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* const from = x.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t piece = 0; piece < N * pieces.count; ++piece) {
      const T* const sample = from + piece / pieces.count * P * C;
      const std::int64_t first = piece % pieces.count * pieces.length,
                         last = std::min(first + pieces.length, P);
      float *const sums = partial + piece * 2 * C, *const squares = sums + C;
      std::fill_n(sums, 2 * C, 0.0f);
      const auto add = [&](std::int64_t row, std::int64_t rows) {
        for_vectors(C, [&](std::int64_t c, int lanes) {
          const vf pivot = load_n(sample + c, lanes);
          vf s{}, q{};
          for (std::int64_t r = row; r < row + rows; ++r) {
            const vf d = load_n(sample + r * C + c, lanes) - pivot;
            s += d;
            q += d * d;
          }
          store_n(sums + c, load_n(sums + c, lanes) + s, lanes);
          store_n(squares + c, load_n(squares + c, lanes) + q, lanes);
        });
      };
      std::int64_t row = first;
      for (; row + rows_at_once <= last; row += rows_at_once) add(row, rows_at_once);
      for (; row < last; ++row) add(row, 1);
    }
    const auto count = static_cast<double>(P);
#pragma omp parallel for schedule(static) if (N * pieces.count * C > 1 << 14)
    for (std::int64_t i = 0; i < N * C; ++i) {
      const std::int64_t n = i / C, c = i % C;
      double sum = 0, square = 0;
      for (std::int64_t piece = n * pieces.count; piece < (n + 1) * pieces.count; ++piece) {
        sum += static_cast<double>(partial[piece * 2 * C + c]);
        square += static_cast<double>(partial[(piece * 2 + 1) * C + c]);
      }
      const double mean = sum / count, variance = std::max(square / count - mean * mean, 0.0);
      float* const to = statistics.data<float>() + n * 2 * C + c;
      to[0] =
          static_cast<float>(static_cast<double>(static_cast<float>(from[n * P * C + c])) + mean);
      to[C] =
          static_cast<float>(1.0 / std::sqrt(variance + static_cast<double>(instance_norm_eps)));
    }
  });
}

void spade(const Tensor& x, const Tensor& statistics, const Tensor& gamma_beta, bool upsample,
           float slope, Tensor& y) {
  const std::int64_t H = y.dim(2), width = y.dim(3), C = y.dim(4), times = upsample ? 2 : 1;
  WEFT_ASSERT(y.dim(1) == 1 && x.shape() == Shape({y.dim(0), 1, H / times, width / times, C}));
  WEFT_ASSERT(H % times == 0 && width % times == 0);
  WEFT_ASSERT(gamma_beta.shape() == Shape({y.dim(0), 1, H, width, 2 * C}));
  WEFT_ASSERT(statistics.shape() == Shape({y.dim(0), 2, C}));
  const float* const stats = statistics.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *const from = x.data<T>(), *const maps = gamma_beta.data<T>();
    T* const to = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < y.dim(0) * H; ++row) {
      const float *const mean = stats + row / H * 2 * C, *const rstd = mean + C;
      const T* const in = from + row / times * (width / times) * C;
      for (std::int64_t i = 0; i < width; ++i) {
        const T *const own = in + i / times * C, *const gamma = maps + (row * width + i) * 2 * C;
        for_vectors(C, [&](std::int64_t c, int lanes) {
          const vf v = (load_n(own + c, lanes) - load_n(mean + c, lanes)) * load_n(rstd + c, lanes);
          const vf z = v * (1.0f + load_n(gamma + c, lanes)) + load_n(gamma + C + c, lanes);
          store_n(to + (row * width + i) * C + c, z < 0.0f ? z * slope : z, lanes);
        });
      }
    }
  });
}

WEFT_CPU_END
