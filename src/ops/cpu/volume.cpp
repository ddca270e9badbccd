// CPU side of ops/resize.h. A candidate's motion is the grid moved by one vector, so what an axis
// reads, and its factor of a heatmap, are the same for all rows, columns or slices: short tables,
// and a row is four rows of the features blended as whole vectors, then two neighbours a voxel.
#include "ops/resize.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr int most_candidates = 128;

// What a candidate does at one place of an axis.
struct AxisEntry {
  VolumeTap tap;
  float driving, source;  // factors of the two heatmaps; 0 for the background
};

float heat(float distance) { return std::exp(-distance * distance / (2.0f * heatmap_variance)); }

// entries [candidates, D + H + W] of a frame: slices, then rows, then columns.
void fill_axes(const std::int64_t (&size)[3], std::int64_t K, const float* source,
               const float* driving, AxisEntry* entries) {
  for (std::int64_t k = 0; k <= K; ++k)
    for (int axis = 2; axis >= 0; --axis)  // z first
      for (std::int64_t i = 0; i < size[axis]; ++i, ++entries) {
        const float g = volume_coordinate(i, size[axis]);
        if (k == 0) {
          *entries = {volume_tap(g, size[axis]), 0.0f, 0.0f};
          continue;
        }
        const float from = source[3 * (k - 1) + axis], to = driving[3 * (k - 1) + axis];
        *entries = {volume_tap(g - to + from, size[axis]), heat(g - to), heat(g - from)};
      }
}

// to [n] = the four rows, each times its factor.
template <class T>
void blend(const T* const (&rows)[4], const float (&factors)[4], std::int64_t n, float* to) {
  for_vectors(n, [&](std::int64_t i, int lanes) {
    vf sum = factors[0] * load_n(rows[0] + i, lanes);
    for (int r = 1; r < 4; ++r) sum += factors[r] * load_n(rows[r] + i, lanes);
    store_n(to + i, sum, lanes);
  });
}

// One row of a candidate: heatmap and features of each voxel, `step` values apart. `fixed`: the
// features' channels where they are known, else 0.
template <int fixed>
void candidate_row(const float* features, std::int64_t channels, const AxisEntry* columns,
                   std::int64_t width, float driving, float source, std::int64_t step, float* to) {
  const std::int64_t c = fixed > 0 ? fixed : channels;
  for (std::int64_t x = 0; x < width; ++x, to += step) {
    const AxisEntry& e = columns[x];
    const float *first = features + e.tap.voxel[0] * c, *second = features + e.tap.voxel[1] * c;
    to[0] = driving * e.driving - source * e.source;
    for (std::int64_t j = 0; j < c; ++j)
      to[1 + j] = first[j] * e.tap.share[0] + second[j] * e.tap.share[1];
  }
}

}  // namespace

void volume_sample(const Tensor& x, const Tensor& grid, Tensor& y) {
  const std::int64_t D = x.dim(1), H = x.dim(2), width = x.dim(3), C = x.dim(4);
  const std::int64_t places = grid.numel() / 3, own = grid.dim(0) > 0 ? places / grid.dim(0) : 0;
  const std::int64_t volume = x.dim(0) == 1 ? 0 : D * H * width * C;
  WEFT_ASSERT(x.dim(0) == 1 || x.dim(0) == grid.dim(0));
  WEFT_ASSERT(y.numel() == places * C && (y.numel() == 0 || x.numel() > 0));
  const float* at = grid.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = x.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t p = 0; p < places; ++p) {
      const T* const base = from + p / own * volume;
      const VolumeTap tx = volume_tap(at[3 * p], width), ty = volume_tap(at[3 * p + 1], H),
                      tz = volume_tap(at[3 * p + 2], D);
      const T* corners[8];
      float shares[8];
      for (int k = 0; k < 8; ++k) {
        const std::int64_t slice = tz.voxel[k / 4], row = ty.voxel[k / 2 % 2];
        corners[k] = base + ((slice * H + row) * width + tx.voxel[k % 2]) * C;
        shares[k] = tz.share[k / 4] * ty.share[k / 2 % 2] * tx.share[k % 2];
      }
      for_vectors(C, [&](std::int64_t c, int n) {
        vf sum = shares[0] * load_n(corners[0] + c, n);
        for (int k = 1; k < 8; ++k) sum += shares[k] * load_n(corners[k] + c, n);
        store_n(to + p * C + c, sum, n);
      });
    }
  });
}

void motion_candidates(const Tensor& features, const Tensor& kp_source, const Tensor& kp_driving,
                       Tensor& y) {
  const std::int64_t D = features.dim(1), H = features.dim(2), width = features.dim(3),
                     c = features.dim(4), N = kp_driving.dim(0), K = kp_driving.dim(1);
  const std::int64_t places = D + H + width, values = (K + 1) * (1 + c);
  WEFT_ASSERT(features.dim(0) == 1 && kp_source.numel() == 3 * K);
  WEFT_ASSERT(y.shape() == Shape({N, D, H, width, values}));
  struct Axes;
  struct Rows;
  static_assert(sizeof(AxisEntry) % sizeof(float) == 0);
  auto* const axes = reinterpret_cast<AxisEntry*>(scratch<Axes>(static_cast<std::size_t>(
      N * (K + 1) * places * static_cast<std::int64_t>(sizeof(AxisEntry) / sizeof(float)))));
  const float *source = kp_source.data<float>(), *driving = kp_driving.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n)
    fill_axes({width, H, D}, K, source, driving + 3 * K * n, axes + n * (K + 1) * places);
  with_type(features.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = features.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < N * D * H; ++row) {
      const std::int64_t n = row / H / D, slice = row / H % D, line = row % H;
      // A blended row of the features, and where bf16 is wanted the result's row in f32.
      float* const blended = scratch<Rows>(static_cast<std::size_t>(width * (c + values)));
      T* const result = to + row * width * values;
      float* made = blended + width * c;
      if constexpr (std::is_same_v<T, float>) made = result;
      for (std::int64_t k = 0; k <= K; ++k) {
        const AxisEntry* const own = axes + (n * (K + 1) + k) * places;
        const AxisEntry &z = own[slice], &r = own[D + line];
        const T* rows[4];
        float factors[4];
        for (int i = 0; i < 4; ++i) {
          rows[i] = from + (z.tap.voxel[i / 2] * H + r.tap.voxel[i % 2]) * width * c;
          factors[i] = z.tap.share[i / 2] * r.tap.share[i % 2];
        }
        blend(rows, factors, width * c, blended);
        (c == 4 ? candidate_row<4> : candidate_row<0>)(blended, c, own + D + H, width,
                                                       z.driving * r.driving, z.source * r.source,
                                                       values, made + k * (1 + c));
      }
      if constexpr (!std::is_same_v<T, float>)
        for_vectors(width * values, [&](std::int64_t i, int lanes) {
          store_n(result + i, load_n(made + i, lanes), lanes);
        });
    }
  });
}

void motion_field(const Tensor& logits, const Tensor& kp_source, const Tensor& kp_driving,
                  float threshold, Tensor& mask, Tensor& deformation) {
  const std::int64_t N = logits.dim(0), D = logits.dim(1), H = logits.dim(2), width = logits.dim(3),
                     count = logits.dim(4), K = count - 1;
  WEFT_ASSERT(count <= most_candidates && kp_source.numel() == 3 * K);
  WEFT_ASSERT(kp_driving.numel() == 3 * K * N && deformation.numel() == N * D * H * width * 3);
  WEFT_ASSERT(!mask.defined() || mask.shape() == logits.shape());
  const float *source = kp_source.data<float>(), *driving = kp_driving.data<float>();
  float* const to = deformation.data<float>();
  const auto run = [&](auto type, auto mask_type) {
    using T = decltype(type);
    using M = decltype(mask_type);
    const T* const from = logits.data<T>();
    M* const masks = mask.defined() ? mask.data<M>() : nullptr;
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < N * D * H; ++row) {
      const std::int64_t n = row / H / D;
      const float y = volume_coordinate(row % H, H), z = volume_coordinate(row / H % D, D);
      // By how much the candidates move, axis by axis; the background by nothing.
      float moves[3][most_candidates];
      for (int axis = 0; axis < 3; ++axis) {
        moves[axis][0] = 0.0f;
        for (std::int64_t k = 0; k < K; ++k)
          moves[axis][1 + k] = source[3 * k + axis] - driving[3 * (K * n + k) + axis];
      }
      for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
        float shares[most_candidates];
        vf most = splat(-std::numeric_limits<float>::infinity());
        for_vectors(count, [&](std::int64_t k, int lanes) {
          const vf v = load_n(from + i * count + k, lanes);
          most = vmax(lanes == W ? v : select_first(v, lanes, -INFINITY), most);
        });
        const float top = hmax(most);
        vf all{};
        for_vectors(count, [&](std::int64_t k, int lanes) {
          const vf e = vexp(load_n(from + i * count + k, lanes) - top);
          store_n(shares + k, e, lanes);
          all += lanes == W ? e : select_first(e, lanes, 0.0f);
        });
        const float scale = 1.0f / hsum(all);
        vf kept{}, moved[3] = {};
        for_vectors(count, [&](std::int64_t k, int lanes) {
          const vf share = load_n(shares + k, lanes) * scale;
          if (masks != nullptr) store_n(masks + i * count + k, share, lanes);
          const vf counts = share < threshold ? vf{} : share;
          kept += counts;
          for (int axis = 0; axis < 3; ++axis)
            moved[axis] += counts * load_n(moves[axis] + k, lanes);
        });
        const float total = hsum(kept);
        to[3 * i] = total * volume_coordinate(i % width, width) + hsum(moved[0]);
        to[3 * i + 1] = total * y + hsum(moved[1]);
        to[3 * i + 2] = total * z + hsum(moved[2]);
      }
    }
  };
  with_type(logits.dtype(), [&](auto type) {
    with_type(mask.defined() ? mask.dtype() : DType::f32,
              [&](auto mask_type) { run(type, mask_type); });
  });
}

// Each slice has its own maximum, sum, and sums of x and y; they are put together in f64, in order.
void volume_expectation(const Tensor& logits, float temperature, Tensor& keypoints) {
  const std::int64_t N = logits.dim(0), D = logits.dim(1), H = logits.dim(2), width = logits.dim(3),
                     K = logits.dim(4);
  if (planning()) return;
  WEFT_ASSERT(keypoints.numel() == N * K * 3);
  struct Slices;
  float* const partial = scratch<Slices>(static_cast<std::size_t>(N * D * 4 * K));
  const float scale = 1.0f / temperature;
  with_type(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* const from = logits.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t slice = 0; slice < N * D; ++slice) {
      const T* const own = from + slice * H * width * K;
      float* const to = partial + slice * 4 * K;
      for_vectors(K, [&](std::int64_t k, int lanes) {
        vf most = splat(-std::numeric_limits<float>::infinity());
        for (std::int64_t i = 0; i < H * width; ++i)
          most = vmax(load_n(own + i * K + k, lanes), most);
        vf all{}, across{}, down{};
        for (std::int64_t y = 0; y < H; ++y) {
          vf row{}, row_across{};
          for (std::int64_t x = 0; x < width; ++x) {
            const vf e = vexp((load_n(own + (y * width + x) * K + k, lanes) - most) * scale);
            row += e;
            row_across += e * volume_coordinate(x, width);
          }
          all += row;
          across += row_across;
          down += row * volume_coordinate(y, H);
        }
        store_n(to + k, most, lanes);
        store_n(to + K + k, all, lanes);
        store_n(to + 2 * K + k, across, lanes);
        store_n(to + 3 * K + k, down, lanes);
      });
    }
  });
  float* const result = keypoints.data<float>();
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t k = 0; k < K; ++k) {
      const float* const own = partial + n * D * 4 * K + k;
      float most = own[0];
      for (std::int64_t z = 1; z < D; ++z) most = std::max(most, own[z * 4 * K]);
      double all = 0, sums[3] = {};
      for (std::int64_t z = 0; z < D; ++z) {
        const float* const s = own + z * 4 * K;
        const double factor = std::exp((double{s[0]} - double{most}) / double{temperature});
        all += factor * s[K];
        sums[0] += factor * s[2 * K];
        sums[1] += factor * s[3 * K];
        sums[2] += factor * s[K] * double{volume_coordinate(z, D)};
      }
      for (int axis = 0; axis < 3; ++axis)
        result[(n * K + k) * 3 + axis] = static_cast<float>(sums[axis] / all);
    }
}

WEFT_CPU_END
