// CUDA side of ops/resize.h. CPU twin: src/ops/cpu/volume.cpp; cases: tests/kernels/volume.cpp.
//
//   sample       twice 16 bytes of a voxel a thread; the eight neighbours come from the caches
//   candidates   a thread takes one candidate of one voxel: its shares are found once, its c
//                features are vectors. A block's values are neighbours in y: they are put together
//                in shared memory and leave as whole lines.
//   field        a lane has eight candidates of a voxel; sums over up to 16 lanes are warp shuffles
//   expectation  per piece of the voxels the greatest logit and the sums that belong to it; then
//                a warp puts the pieces of a keypoint together. Nothing is added by atomics.
#include "ops/resize.h"

#include <algorithm>
#include <type_traits>

#include "core/error.h"
#include "divide.cuh"
#include "math.cuh"
#include "norm/channels.cuh"
#include "ptx.cuh"

namespace weft::kernels {
namespace {

constexpr int most_candidates = 128, expectation_sums = 5;

// Voxels of a volume; C: channels, in accesses. There are less than 2^31 accesses.
struct VolumeGrid {
  int D, H, W;
  std::int64_t C;
  Divisor width, height;

  __host__ __device__ std::int64_t voxels() const { return static_cast<std::int64_t>(D) * H * W; }
  // Coordinates of all places along the axes: a division each, so that a block finds them once.
  __host__ __device__ int places() const { return W + H + D; }
};

// Where the voxels of a volume are, from such a table in shared memory.
struct Coordinates {
  const float *x, *y, *z;
  // The whole block comes; __syncthreads() follows.
  __device__ __forceinline__ Coordinates(const VolumeGrid& g, float* table)
      : x(table), y(table + g.W), z(table + g.W + g.H) {
#pragma unroll 1
    for (int k = threadIdx.x; k < g.places(); k += threads) {
      const int axis = k < g.W ? 0 : k < g.W + g.H ? 1 : 2;
      table[k] = ops::volume_coordinate(k - (axis > 0 ? g.W : 0) - (axis > 1 ? g.H : 0),
                                        axis == 0   ? g.W
                                        : axis == 1 ? g.H
                                                    : g.D);
    }
  }
  struct Place {
    float x, y, z;
  };
  __device__ __forceinline__ Place of(const VolumeGrid& g, unsigned voxel) const {
    const unsigned row = g.width.split(voxel), slice = g.height.divide(row);
    return {x[voxel], y[row - slice * static_cast<unsigned>(g.H)], z[slice]};
  }
};

// The eight voxels that a place is between, counted from the volume's first, and their shares.
struct Neighbours {
  unsigned voxel[8];
  float share[8];

  __device__ __forceinline__ Neighbours(const VolumeGrid& g, float x, float y, float z) {
    const ops::VolumeTap tx = ops::volume_tap(x, g.W), ty = ops::volume_tap(y, g.H),
                         tz = ops::volume_tap(z, g.D);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      voxel[k] = static_cast<unsigned>((tz.voxel[k / 4] * g.H + ty.voxel[k / 2 % 2]) * g.W +
                                       tx.voxel[k % 2]);
      share[k] = tz.share[k / 4] * ty.share[k / 2 % 2] * tx.share[k % 2];
    }
  }
  // to = access c of the channels.
  template <int V, class T>
  __device__ __forceinline__ void sample(const T* volume, const VolumeGrid& g, unsigned c,
                                         float (&to)[V]) const {
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float v[V];
      unpack(load_vec<V>(volume, voxel[k] * static_cast<unsigned>(g.C) + c), v);
#pragma unroll
      for (int e = 0; e < V; ++e) to[e] += share[k] * v[e];
    }
  }
};

// x at `places` of `own` a sample; the samples' volumes lie `apart` elements from each other, 0
// where they share one. A thread has `share` of a place's accesses, `lanes` threads all of them.
template <int V, int share, class T>
__global__ void __launch_bounds__(threads)
    sample_kernel(const T* x, const float* grid, VolumeGrid g, Divisor lanes, Divisor own,
                  std::int64_t apart, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i);
  const unsigned place = lanes.split(c), step = static_cast<unsigned>(g.C) / share;
  const float* const at = grid + 3 * static_cast<std::int64_t>(place);
  const Neighbours around(g, at[0], at[1], at[2]);
  const T* const volume = x + own.divide(place) * apart;
#pragma unroll
  for (int a = 0; a < share; ++a) {
    float v[V];
    around.sample<V>(volume, g, c + a * step, v);
    store_vec<V>(y, static_cast<std::int64_t>(place) * g.C + c + a * step, pack<T, V>(v));
  }
}

// What a candidate says of a place: where the features there come from, and its heat.
struct Candidate {
  float x, y, z, heat;
};
__device__ __forceinline__ float squared_distance(const Coordinates::Place& p, const float* point) {
  const float x = p.x - point[0], y = p.y - point[1], z = p.z - point[2];
  return x * x + y * y + z * z;
}
// The candidate of a keypoint that moves from `source` to `driving`: the place moves back with it,
// and the heat is the bump around `driving` less that around `source`.
__device__ __forceinline__ Candidate moved(const Coordinates::Place& p, const float* source,
                                           const float* driving) {
  constexpr float scale = -1.0f / (2.0f * ops::heatmap_variance);
  return {p.x - driving[0] + source[0], p.y - driving[1] + source[1], p.z - driving[2] + source[2],
          expf(scale * squared_distance(p, driving)) - expf(scale * squared_distance(p, source))};
}

// The block's part of y, `values` a thread, put together in `staged`, leaves in whole accesses of
// `unit` elements but for its end. `count`: elements of y. The whole block comes, after a
// __syncthreads().
template <int unit, class T>
__device__ __forceinline__ void store_staged(const T* staged, int values, T* y,
                                             std::int64_t count) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads * values,
                     rest = count - first;
  const int made = rest < threads * values ? static_cast<int>(rest) : threads * values,
            whole = made / unit;
  for (int j = threadIdx.x; j < whole; j += threads)
    store_vec<unit>(y + first, j, load_vec<unit>(staged, j));
  for (int j = whole * unit + static_cast<int>(threadIdx.x); j < made; j += threads)
    y[first + j] = staged[j];
}

// Candidate i % (K + 1) of voxel i / (K + 1), counted through the frames; candidate 0 does not
// move. source [K,3], driving [frames,K,3]. V: channels an access.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    candidates_kernel(const T* features, const float* source, const float* driving, VolumeGrid g,
                      Divisor candidates, Divisor voxels, int K, T* y, std::int64_t count) {
  const int values = 1 + static_cast<int>(g.C) * V;  // of a candidate
  T* const staged = shared_memory<T>();              // [threads][values]
  const Coordinates coordinates(g, reinterpret_cast<float*>(staged + threads * values));
  __syncthreads();
  const std::int64_t i = thread_index();
  if (i < count) {
    unsigned k = static_cast<unsigned>(i), voxel = candidates.split(k);
    const unsigned frame = voxels.split(voxel);
    const Coordinates::Place place = coordinates.of(g, voxel);
    Candidate from{place.x, place.y, place.z, 0.0f};
    if (k > 0) {
      const std::int64_t keypoint = k - 1;
      from = moved(place, source + 3 * keypoint,
                   driving + 3 * (static_cast<std::int64_t>(frame) * K + keypoint));
    }
    const Neighbours around(g, from.x, from.y, from.z);
    T* const own = staged + static_cast<int>(threadIdx.x) * values;
    own[0] = from_float<T>(from.heat);
    for (int c = 0; c < static_cast<int>(g.C); ++c) {
      float v[V];
      around.sample<V>(features, g, c, v);
#pragma unroll
      for (int e = 0; e < V; ++e) own[1 + c * V + e] = from_float<T>(v[e]);
    }
  }
  __syncthreads();
  store_staged<(V > 1 ? Pack<T>::size : 1)>(static_cast<const T*>(staged), values, y,
                                            count * values);
}

// f over the `lanes` lanes of a voxel, to each of them.
template <int lanes, class F>
__device__ __forceinline__ float across(float x, F f) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    x = f(x, __shfl_xor_sync(full_mask, x, offset));
  return x;
}

// The field of one frame: each lane has the candidates from lane * each on. M is the mask's type,
// void where none is wanted. whole: the lanes' candidates are all there, and one access.
constexpr int each = 8, turns = 4, moves_apart = 4 * each + 4;
template <int lanes, bool whole, class T, class M>
__global__ void __launch_bounds__(threads)
    field_kernel(const T* logits, const float* source, const float* driving, VolumeGrid g, int K,
                 float threshold, M* mask, float* deformation) {
  constexpr bool with_mask = !std::is_void_v<M>;
  const std::int64_t frame = blockIdx.y;
  const int voxels = static_cast<int>(g.voxels());
  // What each candidate moves by, [lanes][each][4]; lanes are 16 bytes more apart, in other banks.
  float* const moves = shared_memory<float>();
#pragma unroll
  for (int i = 0; i < (4 * each * lanes + threads - 1) / threads; ++i) {
    const int k = i * threads + static_cast<int>(threadIdx.x);
    if (4 * each * lanes % threads != 0 && k >= 4 * each * lanes) break;
    const int candidate = k / 4, axis = k % 4, from = 3 * (candidate - 1) + axis;
    moves[candidate / each * moves_apart + k % (4 * each)] =
        candidate > 0 && candidate <= K && axis < 3 ? source[from] - driving[3 * frame * K + from]
                                                    : 0.0f;
  }
  const Coordinates coordinates(g, moves + lanes * moves_apart);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % lanes, first = lane * each;
  const auto sum = [](float a, float b) { return a + b; };
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int wanted = (static_cast<int>(blockIdx.x) * turns + turn) * (threads / lanes) +
                       static_cast<int>(threadIdx.x) / lanes;
    const bool real = wanted < voxels;  // the others keep their warp company
    const int in = real ? wanted : voxels - 1;
    const std::int64_t voxel = frame * voxels + in;
    float v[each], most = -INFINITY, all = 0.0f;
    if constexpr (whole) {
      unpack(load_vec<each>(logits, voxel * lanes + lane), v);
    } else {
#pragma unroll
      for (int j = 0; j < each; ++j)
        v[j] = first + j <= K ? to_float(logits[voxel * (K + 1) + first + j]) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < each; ++j) most = fmaxf(most, v[j]);
    most = across<lanes>(most, [](float a, float b) { return fmaxf(a, b); });
    // The error is a few units in the last place of the greatest share.
    const float top = most * log2_e;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      v[j] = exp2_approx(v[j] * log2_e - top);
      all += v[j];
    }
    const float scale = rcp_approx(across<lanes>(all, sum));
#pragma unroll
    for (int j = 0; j < each; ++j) v[j] *= scale;
    if constexpr (with_mask) {
      if constexpr (whole) {
        if (real) store_vec<each>(mask, voxel * lanes + lane, pack<M, each>(v));
      } else {
#pragma unroll
        for (int j = 0; j < each; ++j)
          if (real && first + j <= K) mask[voxel * (K + 1) + first + j] = from_float<M>(v[j]);
      }
    }
    float kept = 0.0f, moved[3] = {};
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const float share = v[j] < threshold ? 0.0f : v[j];
      const Vec<float, 4> by =
          load_vec<4>(static_cast<const float*>(moves), lane * (moves_apart / 4) + j);
      kept += share;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) moved[axis] += share * by.v[axis];
    }
    kept = across<lanes>(kept, sum);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) moved[axis] = across<lanes>(moved[axis], sum);
    if (!real || lane > 0) continue;
    const Coordinates::Place at = coordinates.of(g, static_cast<unsigned>(in));
    float* const result = deformation + 3 * voxel;
    result[0] = kept * at.x + moved[0];
    result[1] = kept * at.y + moved[1];
    result[2] = kept * at.z + moved[2];
  }
}

// partial [N * pieces, 5, K] = of each keypoint in a piece of the voxels: the greatest logit m, and
// the sums of e, x e, y e, z e, with e = exp((logit - m) scale).
template <class T>
__global__ void __launch_bounds__(threads)
    expectation_kernel(const T* logits, Grid g, VolumeGrid volume, float scale, float* partial) {
  const Place p = place(g);
  const T* const own = logits + p.sample * g.P * g.C + p.pack;
  float* const shared = shared_memory<float>();  // [lines][5][width]
  const Coordinates coordinates(volume, shared + threads * expectation_sums);
  __syncthreads();
  float sums[expectation_sums] = {-INFINITY};
  if (p.active) {
    const int last = static_cast<int>(p.last), step = static_cast<int>(p.step);
#pragma unroll 4
    for (int r = static_cast<int>(p.row); r < last; r += step)
      sums[0] = fmaxf(sums[0], to_float(own[r * g.C]));
#pragma unroll 2
    for (int r = static_cast<int>(p.row); r < last; r += step) {
      const float e = expf((to_float(own[r * g.C]) - sums[0]) * scale);
      const Coordinates::Place at = coordinates.of(volume, static_cast<unsigned>(r));
      sums[1] += e;
      sums[2] += e * at.x;
      sums[3] += e * at.y;
      sums[4] += e * at.z;
    }
  }
  const int column = static_cast<int>(threadIdx.x) % g.width;
  if (p.line < p.step)
#pragma unroll
    for (int j = 0; j < expectation_sums; ++j)
      shared[(p.line * expectation_sums + j) * g.width + column] = sums[j];
  __syncthreads();
  if (p.line > 0 || !p.active) return;
  const auto value = [&](std::int64_t line, int j) {
    return shared[(line * expectation_sums + j) * g.width + column];
  };
  // A line without voxels has -inf and zeros.
  const std::int64_t lines = p.last - p.row < p.step ? p.last - p.row : p.step;
  for (std::int64_t line = 1; line < lines; ++line) sums[0] = fmaxf(sums[0], value(line, 0));
#pragma unroll
  for (int j = 1; j < expectation_sums; ++j) sums[j] = 0.0f;
  for (std::int64_t line = 0; line < lines; ++line) {
    const float factor = expf((value(line, 0) - sums[0]) * scale);
#pragma unroll
    for (int j = 1; j < expectation_sums; ++j) sums[j] += factor * value(line, j);
  }
#pragma unroll
  for (int j = 0; j < expectation_sums; ++j)
    partial[(static_cast<std::int64_t>(blockIdx.x) * expectation_sums + j) * g.C + p.pack] =
        sums[j];
}

// A warp a keypoint of a sample.
__global__ void __launch_bounds__(threads)
    keypoints_kernel(const float* partial, Grid g, float scale, float* keypoints) {
  const std::int64_t wanted = thread_index() / 32, count = g.N * g.C;
  const bool real = wanted < count;
  const std::int64_t own = real ? wanted : count - 1, n = own / g.C, k = own % g.C;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto value = [&](std::int64_t piece, int j) {
    return partial[((n * g.chunks + piece) * expectation_sums + j) * g.C + k];
  };
  float most = -INFINITY, sums[expectation_sums] = {};
  for (std::int64_t piece = lane; piece < g.chunks; piece += 32)
    most = fmaxf(most, value(piece, 0));
  most = warp_max(most);
  for (std::int64_t piece = lane; piece < g.chunks; piece += 32) {
    const float factor = expf((value(piece, 0) - most) * scale);
#pragma unroll
    for (int j = 1; j < expectation_sums; ++j) sums[j] += factor * value(piece, j);
  }
#pragma unroll
  for (int j = 1; j < expectation_sums; ++j) sums[j] = warp_sum(sums[j]);
  const float sum = lane == 0 ? sums[2] : lane == 1 ? sums[3] : sums[4];
  if (real && lane < 3) keypoints[3 * own + lane] = sum / sums[1];
}

VolumeGrid grid_of_volume(const Tensor& x, std::int64_t C) {
  WEFT_ASSERT(x.dim(1) * x.dim(2) * x.dim(3) * std::max<std::int64_t>(C, 1) < std::int64_t{1}
                                                                                  << 31);
  return {static_cast<int>(x.dim(1)), static_cast<int>(x.dim(2)), static_cast<int>(x.dim(3)), C,
          Divisor(x.dim(3)),          Divisor(x.dim(2))};
}

template <int lanes, class T, class M>
void start_field(const Tensor& logits, const Tensor& source, const Tensor& driving, float threshold,
                 M* mask, const Tensor& masks, Tensor& deformation) {
  const VolumeGrid g = grid_of_volume(logits, 0);
  const bool whole =
      logits.dim(4) == lanes * each && aligned<each>(logits) && (!mask || aligned<each>(masks));
  launch(
      whole ? field_kernel<lanes, true, T, M> : field_kernel<lanes, false, T, M>,
      dim3(blocks_for(g.voxels() * lanes, turns * threads), static_cast<unsigned>(logits.dim(0))),
      dim3(threads), sizeof(float) * static_cast<std::size_t>(lanes * moves_apart + g.places()),
      data<T>(logits), data<float>(source), data<float>(driving), g,
      static_cast<int>(logits.dim(4) - 1), threshold, mask, data<float>(deformation));
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void volume_sample(const Tensor& x, const Tensor& grid, Tensor& y) {
  const std::int64_t places = grid.numel() / 3, C = x.dim(4);
  WEFT_ASSERT(x.dim(0) == 1 || x.dim(0) == grid.dim(0));
  WEFT_ASSERT(y.numel() == places * C && (y.numel() == 0 || x.numel() > 0));
  if (y.numel() == 0) return;
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const VolumeGrid g = grid_of_volume(x, C / V);
        WEFT_ASSERT(y.numel() / V < std::int64_t{1} << 31);
        const std::int64_t share = g.C % 2 == 0 ? 2 : 1, count = y.numel() / V / share;
        launch_threads(share > 1 ? sample_kernel<V, 2, T> : sample_kernel<V, 1, T>, count,
                       data<T>(x), data<float>(grid), g, Divisor(g.C / share),
                       Divisor(places / grid.dim(0)), x.dim(0) == 1 ? 0 : g.voxels() * C,
                       data<T>(y), count);
      },
      x, y);
}

void motion_candidates(const Tensor& features, const Tensor& kp_source, const Tensor& kp_driving,
                       Tensor& y) {
  const std::int64_t N = kp_driving.dim(0), K = kp_driving.dim(1), c = features.dim(4);
  const std::int64_t D = features.dim(1), H = features.dim(2), W = features.dim(3);
  WEFT_ASSERT(features.dim(0) == 1 && kp_source.numel() == 3 * K);
  WEFT_ASSERT(y.shape() == Shape({N, D, H, W, (K + 1) * (1 + c)}));
  if (y.numel() == 0) return;
  by_type(features, [&]<class T>() {
    const auto run = [&](auto kernel, std::int64_t C) {
      const std::int64_t items = N * D * H * W * (K + 1);
      WEFT_ASSERT(items < std::int64_t{1} << 31);
      const VolumeGrid g = grid_of_volume(features, C);
      launch(kernel, dim3(blocks_for(items, threads)), dim3(threads),
             static_cast<std::size_t>(threads * (1 + c)) * sizeof(T) + sizeof(float) * g.places(),
             data<T>(features), data<float>(kp_source), data<float>(kp_driving), g, Divisor(K + 1),
             Divisor(g.voxels()), static_cast<int>(K), data<T>(y), items);
    };
    if (c % 4 == 0 && aligned<4>(features) && aligned<Pack<T>::size>(y))
      run(candidates_kernel<4, T>, c / 4);
    else
      run(candidates_kernel<1, T>, c);
  });
}

void motion_field(const Tensor& logits, const Tensor& kp_source, const Tensor& kp_driving,
                  float threshold, Tensor& mask, Tensor& deformation) {
  const std::int64_t count = logits.dim(4), K = count - 1, N = logits.dim(0);
  WEFT_ASSERT(count <= most_candidates && kp_source.numel() == 3 * K);
  WEFT_ASSERT(kp_driving.numel() == 3 * K * N && deformation.numel() * count == 3 * logits.numel());
  WEFT_ASSERT(!mask.defined() || mask.shape() == logits.shape());
  if (logits.numel() == 0) return;
  by_type(logits, [&]<class T>() {
    const auto run = [&](auto* masks) {
      using M = std::remove_pointer_t<decltype(masks)>;
      const auto start_with = count <= each       ? start_field<1, T, M>
                              : count <= 2 * each ? start_field<2, T, M>
                                                  : start_field<most_candidates / each, T, M>;
      start_with(logits, kp_source, kp_driving, threshold, masks, mask, deformation);
    };
    if (mask.defined())
      by_type(mask, [&]<class M>() { run(data<M>(mask)); });
    else
      run(static_cast<void*>(nullptr));
  });
}

void volume_expectation(const Tensor& logits, float temperature, Tensor& keypoints) {
  if (logits.numel() == 0) return;
  by_type(logits, [&]<class T>() {
    const Grid g = grid_of<1>(logits, 1);
    WEFT_ASSERT(keypoints.numel() == 3 * g.N * g.C && g.chunks == volume_pieces(g.P).count);
    const Tensor partial = Tensor::empty({g.N * g.chunks, expectation_sums, g.C}, DType::f32);
    const VolumeGrid volume = grid_of_volume(logits, 0);
    launch(expectation_kernel<T>, blocks_of(g), dim3(threads),
           sizeof(float) * static_cast<std::size_t>(threads * expectation_sums + volume.places()),
           data<T>(logits), g, volume, 1.0f / temperature, data<float>(partial));
    launch_threads(keypoints_kernel, 32 * g.N * g.C, data<float>(partial), g, 1.0f / temperature,
                   data<float>(keypoints));
  });
}

}  // namespace weft::ops::cuda
