// CUDA side of ops/conv.h. CPU twin: src/ops/cpu/conv/modulated.cpp; cases:
// tests/kernels/modulated.cpp.
//
// Bound by memory: each activation is read and written once, 16 bytes of a pixel a thread; styles,
// factors and noise come from the caches. To colours: eight threads share a pixel, the products of
// style and weights stand in shared memory.
#include "divide.cuh"
#include "ops/conv.h"
#include "ops/resize.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

template <class T>
__global__ void __launch_bounds__(threads)
    energy_kernel(const T* w, std::int64_t taps, float* energy, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float sum = 0.0f;
  for (std::int64_t k = 0; k < taps; ++k) {
    const float v = to_float(w[i * taps + k]);
    sum += v * v;
  }
  energy[i] = sum;
}

// A warp an element of d.
__global__ void __launch_bounds__(threads)
    demodulation_kernel(const float* energy, const float* style, Divisor outs, int ins, float gain,
                        float eps, float* d, std::int64_t count) {
  const std::int64_t i = thread_index() / 32;
  const int lane = threadIdx.x % 32;
  unsigned out = static_cast<unsigned>(i);
  const float* const factors = style + static_cast<std::int64_t>(outs.split(out)) * ins;
  const float* const own = energy + static_cast<std::int64_t>(out) * ins;
  float sum = 0.0f;
  if (i < count)
#pragma unroll 4
    for (int c = lane; c < ins; c += 32) sum += own[c] * factors[c] * factors[c];
  sum = warp_sum(sum);
  if (i < count && lane == 0) d[i] = gain / sqrtf(sum + eps);
}

// The four pixels of a frame of `width` that make one of twice the size, and their shares.
struct Square {
  std::int64_t at[4];
  float share[4];
  __device__ __forceinline__ Square(int row, int column, int height, int width) {
    const ops::BilinearTap r = ops::bilinear_tap(row, 0.5f, height),
                           c = ops::bilinear_tap(column, 0.5f, width);
    const std::int64_t upper = static_cast<std::int64_t>(r.first) * width,
                       lower = static_cast<std::int64_t>(r.second) * width;
    at[0] = upper + c.first, at[1] = upper + c.second;
    at[2] = lower + c.first, at[3] = lower + c.second;
    share[0] = (1.0f - r.share) * (1.0f - c.share), share[1] = (1.0f - r.share) * c.share;
    share[2] = r.share * (1.0f - c.share), share[3] = r.share * c.share;
  }
};

// The pixels of [samples,..,C], C in accesses.
struct Pixels {
  std::int64_t C;
  Divisor channels, size;  // C and the accesses of a sample

  // Access i of a value a channel and sample, where i counts the accesses of pixels.
  __device__ __forceinline__ std::int64_t of_sample(std::int64_t i) const {
    unsigned c = static_cast<unsigned>(i);
    channels.split(c);
    return size.divide(static_cast<unsigned>(i)) * C + c;
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    modulate_kernel(const T* x, const float* style, Pixels at, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float v[V];
  unpack(load_vec<V>(x, i), v);
  const float* factor = style + at.of_sample(i) * V;
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] *= factor[e];
  store_vec<V>(y, i, pack<T, V>(v));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    modulate_up_kernel(const T* x, const float* style, Pixels at, int h, int w, Divisor rows,
                       Divisor columns, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i), column = at.channels.split(c), row = columns.split(column);
  const std::int64_t frame = static_cast<std::int64_t>(rows.split(row)) * h * w;
  const Square s(static_cast<int>(row), static_cast<int>(column), h, w);
  const std::int64_t C = at.C;
  const float* factor = style + at.of_sample(i) * V;
  float sum[V] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v[V];
    unpack(load_vec<V>(x, (frame + s.at[k]) * C + c), v);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += s.share[k] * v[e];
  }
#pragma unroll
  for (int e = 0; e < V; ++e) sum[e] *= factor[e];
  store_vec<V>(y, i, pack<T, V>(sum));
}

struct Finish {
  const float *d, *noise, *strength, *bias;
  float slope;
  Pixels at;
  std::int64_t plain;  // accesses of a pixel's channels without scale
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    finish_kernel(const T* x, Finish f, const T* scale, const T* shift, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i);
  const std::int64_t pixel = f.at.channels.split(c);
  const float add = f.noise ? *f.strength * f.noise[pixel] : 0.0f;
  const float *factor = f.d + f.at.of_sample(i) * V, *bias = f.bias + c * V;
  float v[V];
  unpack(load_vec<V>(x, i), v);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    v[e] = v[e] * factor[e] + add + bias[e];
    v[e] = v[e] > 0.0f ? v[e] : f.slope * v[e];
  }
  if (c >= f.plain) {
    const std::int64_t at = pixel * (f.at.C - f.plain) + c - f.plain;
    float times[V], plus[V];
    unpack(load_vec<V>(scale, at), times);
    unpack(load_vec<V>(shift, at), plus);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = v[e] * times[e] + plus[e];
  }
  store_vec<V>(y, i, pack<T, V>(v));
}

constexpr int sharing = 8, pixels_of_turn = threads / sharing;

// Blocks: (pixels of a sample, samples). x in accesses of V, C in elements.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    rgb_kernel(const T* x, const float* style, const float* w, const float* bias, const float* skip,
               int turns, int pixels, int height, int width, Divisor columns, int C, float* rgb) {
  float* const weights = shared_memory<float>();  // [3,C]
  float* const sums = weights + 3 * C;            // [pixels of the block,3]
  const std::int64_t sample = blockIdx.y;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < C; c += threads) {
    const float factor = style[sample * C + c];
#pragma unroll
    for (int o = 0; o < 3; ++o) weights[o * C + c] = w[o * C + c] * factor;
  }
  __syncthreads();
  const int lane = threadIdx.x % sharing, accesses = C / V,
            first = static_cast<int>(blockIdx.x) * turns * pixels_of_turn;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int own = turn * pixels_of_turn + static_cast<int>(threadIdx.x) / sharing;
    float sum[3] = {};
    if (first + own < pixels) {
      const T* const from = x + (sample * pixels + first + own) * C;
#pragma unroll 2
      for (int c = lane; c < accesses; c += sharing) {
        float v[V];
        unpack(load_vec<V>(from, c), v);
#pragma unroll
        for (int o = 0; o < 3; ++o)
#pragma unroll
          for (int e = 0; e < V; ++e) sum[o] += v[e] * weights[o * C + c * V + e];
      }
    }
#pragma unroll
    for (int o = 0; o < 3; ++o)
#pragma unroll
      for (int offset = sharing / 2; offset > 0; offset /= 2)
        sum[o] += __shfl_xor_sync(full_mask, sum[o], offset);
    if (lane < 3) sums[3 * own + lane] = lane == 0 ? sum[0] : lane == 1 ? sum[1] : sum[2];
  }
  __syncthreads();
  const int made = 3 * min(turns * pixels_of_turn, pixels - first);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < made; i += threads) {
    const int own = i / 3, colour = i - 3 * own;
    float value = sums[i] + bias[colour];
    if (skip != nullptr) {
      unsigned column = static_cast<unsigned>(first + own);
      const int row = static_cast<int>(columns.split(column));
      const Square s(row, static_cast<int>(column), height / 2, width / 2);
      const std::int64_t frame = sample * (height / 2) * (width / 2);
#pragma unroll
      for (int k = 0; k < 4; ++k) value += s.share[k] * skip[(frame + s.at[k]) * 3 + colour];
    }
    rgb[(sample * pixels + first) * 3 + i] = value;
  }
}

// `count` accesses of x, C of them a pixel.
Pixels pixels_of(std::int64_t C, std::int64_t count, std::int64_t samples) {
  WEFT_ASSERT(count < std::int64_t{1} << 31);
  return {C, Divisor(C), Divisor(count / samples)};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void weight_energy(const Tensor& w, Tensor& energy) {
  const std::int64_t count = energy.numel();
  by_type(w, [&]<class T>() {
    launch_items(energy_kernel<T>, count, data<T>(w), w.numel() / count, data<float>(energy));
  });
}

void demodulation(const Tensor& energy, const Tensor& style, float gain, float eps, Tensor& d) {
  launch_threads(demodulation_kernel, 32 * d.numel(), data<float>(energy), data<float>(style),
                 Divisor(energy.dim(0)), static_cast<int>(energy.dim(1)), gain, eps, data<float>(d),
                 d.numel());
}

void modulate(const Tensor& x, const Tensor& style, Tensor& y) {
  const bool up = y.dim(2) != x.dim(2) || y.dim(3) != x.dim(3);
  WEFT_ASSERT(y.numel() == x.numel() * (up ? 4 : 1) && style.numel() == x.dim(0) * x.dim(4));
  by_access(
      x.dim(4),
      [&]<class T, int V>() {
        const std::int64_t count = y.numel() / V;
        const Pixels at = pixels_of(x.dim(4) / V, count, x.dim(0));
        if (up)
          launch_items(modulate_up_kernel<V, T>, count, data<T>(x), data<float>(style), at,
                       x.dim(2), x.dim(3), Divisor(y.dim(2)), Divisor(y.dim(3)), data<T>(y));
        else
          launch_items(modulate_kernel<V, T>, count, data<T>(x), data<float>(style), at,
                       data<T>(y));
      },
      x, y);
}

void modulated_finish(const Tensor& x, const Tensor& d, const Tensor& noise, const Tensor& strength,
                      const Tensor& bias, float slope, const Tensor& scale, const Tensor& shift,
                      Tensor& y) {
  const std::int64_t C = x.dim(-1), plain = scale.defined() ? C / 2 : C;
  WEFT_ASSERT(d.numel() == x.dim(0) * C && bias.numel() == C && y.numel() == x.numel());
  WEFT_ASSERT(!noise.defined() || noise.numel() == x.numel() / C);
  by_access(
      plain,
      [&]<class T, int V>() {
        const std::int64_t count = x.numel() / V;
        const Finish f{data<float>(d),
                       data_or_null<float>(noise),
                       data_or_null<float>(strength),
                       data<float>(bias),
                       slope,
                       pixels_of(C / V, count, x.dim(0)),
                       plain / V};
        launch_items(finish_kernel<V, T>, count, data<T>(x), f, data_or_null<T>(scale),
                     data_or_null<T>(shift), data<T>(y));
      },
      x, scale, shift, y);
}

void modulated_rgb(const Tensor& x, const Tensor& style, const Tensor& w, const Tensor& bias,
                   const Tensor& skip, Tensor& rgb) {
  const std::int64_t C = x.dim(4), samples = x.dim(0), pixels = x.numel() / C / samples;
  WEFT_ASSERT(pixels < std::int64_t{1} << 31);
  WEFT_ASSERT(C <= 4096 && w.numel() == 3 * C && rgb.numel() == samples * pixels * 3);
  by_access(
      C,
      [&]<class T, int V>() {
        // What a block finds first is worth it for many pixels; a few are for many blocks.
        const int turns = pixels < 1 << 16 ? 1 : 8, block = turns * pixels_of_turn;
        launch(rgb_kernel<V, T>, dim3(blocks_for(pixels, block), static_cast<unsigned>(samples)),
               dim3(threads), static_cast<std::size_t>(3 * (C + block)) * sizeof(float), data<T>(x),
               data<float>(style), data<float>(w), data<float>(bias), data_or_null<float>(skip),
               turns, static_cast<int>(pixels), static_cast<int>(x.dim(2)),
               static_cast<int>(x.dim(3)), Divisor(x.dim(3)), static_cast<int>(C),
               data<float>(rgb));
      },
      x);
}

}  // namespace weft::ops::cuda
