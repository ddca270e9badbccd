// CUDA side of ops/volume.h. CPU twin: src/ops/cpu/volume.cpp; cases: src/bench/kernels/volume.cpp.
//
//   sample       16 bytes of a voxel a thread; the eight neighbours come from the caches
//   candidates   a thread takes one candidate of one voxel: its shares are found once, its c
//                features are vectors. A block's values are neighbours in y: they are put together
//                in shared memory and leave as whole lines. Bound by the writing of y.
//   field        8, 16 or 32 lanes a voxel, each with some of the candidates; sums are warp
//                shuffles
//   expectation  per piece of the voxels the greatest logit and the sums that belong to it; then
//                a warp puts the pieces of a keypoint together. Nothing is added by atomics.
#include "ops/volume.h"

#include "core/error.h"
#include "divide.cuh"
#include "norm/channels.cuh"

namespace weft::kernels {
namespace {

constexpr int most_candidates = 128, expectation_sums = 5;

__device__ __forceinline__ std::int64_t index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
}

// Voxels of a volume; C: channels, in accesses.
struct VolumeGrid {
  int D, H, W;
  std::int64_t C;

  __host__ __device__ std::int64_t voxels() const { return static_cast<std::int64_t>(D) * H * W; }
};

// The eight voxels that a place is between, counted from the volume's first, and their shares.
struct Neighbours {
  std::int64_t voxel[8];
  float share[8];

  __device__ __forceinline__ Neighbours(const VolumeGrid& g, float x, float y, float z) {
    const ops::VolumeTap tx = ops::volume_tap(x, g.W), ty = ops::volume_tap(y, g.H),
                         tz = ops::volume_tap(z, g.D);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      voxel[k] = (static_cast<std::int64_t>(tz.voxel[k / 4]) * g.H + ty.voxel[k / 2 % 2]) * g.W +
                 tx.voxel[k % 2];
      share[k] = tz.share[k / 4] * ty.share[k / 2 % 2] * tx.share[k % 2];
    }
  }
  // to = access c of the channels.
  template <int V, class T>
  __device__ __forceinline__ void sample(const T* volume, const VolumeGrid& g, std::int64_t c,
                                         float (&to)[V]) const {
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float v[V];
      unpack(load_vec<V>(volume, voxel[k] * g.C + c), v);
#pragma unroll
      for (int e = 0; e < V; ++e) to[e] += share[k] * v[e];
    }
  }
};

// x at `places` of `own` a sample; the samples' volumes lie `apart` elements from each other, 0
// where they share one.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    sample_kernel(const T* x, const float* grid, VolumeGrid g, Divisor channels, Divisor own,
                  std::int64_t apart, T* y, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i);
  const unsigned place = channels.split(c);
  const float* const at = grid + 3 * static_cast<std::int64_t>(place);
  const Neighbours around(g, at[0], at[1], at[2]);
  float v[V];
  around.sample<V>(x + own.divide(place) * apart, g, c, v);
  store_vec<V>(y, i, pack<T, V>(v));
}

__device__ __forceinline__ float squared_distance(const float (&g)[3], const float* point) {
  const float x = g[0] - point[0], y = g[1] - point[1], z = g[2] - point[2];
  return x * x + y * y + z * z;
}

// Candidate i % (K + 1) of voxel i / (K + 1), counted through the frames. V: channels an access.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    candidates_kernel(const T* features, const float* source, const float* driving, VolumeGrid g,
                      int K, T* y, std::int64_t count) {
  T* const staged = shared_memory<T>();  // [threads][1 + channels]
  const std::int64_t i = index();
  const int values = 1 + static_cast<int>(g.C) * V;
  if (i < count) {
    const std::int64_t voxel = i / (K + 1), frame = voxel / g.voxels();
    const int k = static_cast<int>(i % (K + 1)), in = static_cast<int>(voxel % g.voxels());
    const float at[3] = {ops::volume_coordinate(in % g.W, g.W),
                         ops::volume_coordinate(in / g.W % g.H, g.H),
                         ops::volume_coordinate(in / g.W / g.H, g.D)};
    float motion[3] = {at[0], at[1], at[2]}, heat = 0.0f;
    if (k > 0) {
      const float *const from = source + 3 * (k - 1), *const to = driving + 3 * (frame * K + k - 1);
      constexpr float scale = -1.0f / (2.0f * ops::heatmap_variance);
      heat = expf(scale * squared_distance(at, to)) - expf(scale * squared_distance(at, from));
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) motion[axis] = at[axis] - to[axis] + from[axis];
    }
    const Neighbours around(g, motion[0], motion[1], motion[2]);
    T* const own = staged + static_cast<int>(threadIdx.x) * values;
    own[0] = from_float<T>(heat);
    for (int c = 0; c < static_cast<int>(g.C); ++c) {
      float v[V];
      around.sample<V>(features, g, c, v);
#pragma unroll
      for (int e = 0; e < V; ++e) own[1 + c * V + e] = from_float<T>(v[e]);
    }
  }
  __syncthreads();
  constexpr int unit = V > 1 ? Pack<T>::size : 1;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads * values,
                     rest = count * values - first;
  const int made = rest < threads * values ? static_cast<int>(rest) : threads * values;
  for (int j = threadIdx.x; j < made / unit; j += threads)
    store_vec<unit>(y + first, j, load_vec<unit>(static_cast<const T*>(staged), j));
  for (int j = made / unit * unit + static_cast<int>(threadIdx.x); j < made; j += threads)
    y[first + j] = staged[j];
}

// f over the `lanes` lanes of a voxel, to each of them.
template <int lanes, class F>
__device__ __forceinline__ float across(float x, F f) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    x = f(x, __shfl_xor_sync(full_mask, x, offset));
  return x;
}

// Each lane has the candidates lane, lane + lanes, ... M is the mask's type.
template <int lanes, int each, class T, class M>
__global__ void __launch_bounds__(threads)
    field_kernel(const T* logits, const float* source, const float* driving, VolumeGrid g, int K,
                 float threshold, M* mask, float* deformation, std::int64_t count) {
  const std::int64_t wanted = index() / lanes;
  const bool real = wanted < count;  // the others keep their warp company
  const std::int64_t voxel = real ? wanted : count - 1, frame = voxel / g.voxels();
  const int lane = static_cast<int>(threadIdx.x) % lanes, in = static_cast<int>(voxel % g.voxels());
  const auto sum = [](float a, float b) { return a + b; };
  float v[each], most = -INFINITY, all = 0.0f;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int k = lane + j * lanes;
    v[j] = k <= K ? to_float(logits[voxel * (K + 1) + k]) : -INFINITY;
    most = fmaxf(most, v[j]);
  }
  most = across<lanes>(most, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int j = 0; j < each; ++j) {
    v[j] = lane + j * lanes <= K ? expf(v[j] - most) : 0.0f;
    all += v[j];
  }
  const float scale = 1.0f / across<lanes>(all, sum);
  float kept = 0.0f, moved[3] = {};
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int k = lane + j * lanes;
    const float share = v[j] * scale;
    if (k > K) continue;
    if (mask != nullptr && real) mask[voxel * (K + 1) + k] = from_float<M>(share);
    if (share < threshold) continue;
    kept += share;
    if (k == 0) continue;
    const float *const from = source + 3 * (k - 1), *const to = driving + 3 * (frame * K + k - 1);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) moved[axis] += share * (from[axis] - to[axis]);
  }
  kept = across<lanes>(kept, sum);
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) moved[axis] = across<lanes>(moved[axis], sum);
  if (!real || lane > 0) return;
  float* const result = deformation + 3 * voxel;
  result[0] = kept * ops::volume_coordinate(in % g.W, g.W) + moved[0];
  result[1] = kept * ops::volume_coordinate(in / g.W % g.H, g.H) + moved[1];
  result[2] = kept * ops::volume_coordinate(in / g.W / g.H, g.D) + moved[2];
}

// partial [N * pieces, 5, K] = of each keypoint in a piece of the voxels: the greatest logit m, and
// the sums of e, x e, y e, z e, with e = exp((logit - m) scale).
template <class T>
__global__ void __launch_bounds__(threads)
    expectation_kernel(const T* logits, Grid g, VolumeGrid volume, float scale, float* partial) {
  const Place p = place(g);
  const T* const own = logits + p.sample * g.P * g.C + p.pack;
  float sums[expectation_sums] = {-INFINITY};
  if (p.active) {
    for (std::int64_t r = p.row; r < p.last; r += p.step)
      sums[0] = fmaxf(sums[0], to_float(own[r * g.C]));
    for (std::int64_t r = p.row; r < p.last; r += p.step) {
      const int in = static_cast<int>(r);
      const float e = expf((to_float(own[r * g.C]) - sums[0]) * scale);
      sums[1] += e;
      sums[2] += e * ops::volume_coordinate(in % volume.W, volume.W);
      sums[3] += e * ops::volume_coordinate(in / volume.W % volume.H, volume.H);
      sums[4] += e * ops::volume_coordinate(in / volume.W / volume.H, volume.D);
    }
  }
  float* const shared = shared_memory<float>();  // [lines][5][width]
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
  const std::int64_t wanted = index() / 32, count = g.N * g.C;
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
  WEFT_ASSERT(x.dim(1) * x.dim(2) * x.dim(3) < std::int64_t{1} << 31);
  return {static_cast<int>(x.dim(1)), static_cast<int>(x.dim(2)), static_cast<int>(x.dim(3)), C};
}

template <class... P, class... A>
void start(void (*kernel)(P...), std::int64_t items, std::size_t shared, A&&... args) {
  launch(kernel, dim3(blocks_for(items, threads)), dim3(threads), shared, std::forward<A>(args)...);
}

template <int lanes, int each, class T, class M>
void start_field(const Tensor& logits, const Tensor& source, const Tensor& driving, float threshold,
                 const Tensor& mask, Tensor& deformation) {
  const std::int64_t voxels = deformation.numel() / 3;
  start(field_kernel<lanes, each, T, M>, voxels * lanes, 0, data<T>(logits), data<float>(source),
        data<float>(driving), grid_of_volume(logits, 0), static_cast<int>(logits.dim(4) - 1),
        threshold, data_or_null<M>(mask), data<float>(deformation), voxels);
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
  by_vectors(
      [&]<class T, int V>() {
        const VolumeGrid g = grid_of_volume(x, C / V);
        WEFT_ASSERT(y.numel() / V < std::int64_t{1} << 31);
        start(sample_kernel<V, T>, y.numel() / V, 0, data<T>(x), data<float>(grid), g, Divisor(g.C),
              Divisor(places / grid.dim(0)), x.dim(0) == 1 ? 0 : g.voxels() * C, data<T>(y),
              y.numel() / V);
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
      start(kernel, items, static_cast<std::size_t>(threads * (1 + c)) * sizeof(T),
            data<T>(features), data<float>(kp_source), data<float>(kp_driving),
            grid_of_volume(features, C), static_cast<int>(K), data<T>(y), items);
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
    by_type(mask.defined() ? mask : deformation, [&]<class M>() {
      const auto start_with = count <= 8    ? start_field<8, 1, T, M>
                              : count <= 16 ? start_field<16, 1, T, M>
                              : count <= 32 ? start_field<32, 1, T, M>
                                            : start_field<32, most_candidates / 32, T, M>;
      start_with(logits, kp_source, kp_driving, threshold, mask, deformation);
    });
  });
}

void volume_expectation(const Tensor& logits, float temperature, Tensor& keypoints) {
  if (logits.numel() == 0) return;
  by_type(logits, [&]<class T>() {
    const Grid g = grid_of<1>(logits, 1);
    WEFT_ASSERT(keypoints.numel() == 3 * g.N * g.C && g.chunks == volume_pieces(g.P).count);
    const Tensor partial = Tensor::empty({g.N * g.chunks, expectation_sums, g.C}, DType::f32);
    launch(expectation_kernel<T>, blocks_of(g), dim3(threads), shared_of<1>(g, expectation_sums),
           data<T>(logits), g, grid_of_volume(logits, 0), 1.0f / temperature, data<float>(partial));
    start(keypoints_kernel, 32 * g.N * g.C, 0, data<float>(partial), g, 1.0f / temperature,
          data<float>(keypoints));
  });
}

}  // namespace weft::ops::cuda
