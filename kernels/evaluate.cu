// CUDA side of ops/loss.h. CPU twin: src/ops/cpu/evaluate.cpp; cases:
// tests/kernels/evaluate.cpp.
//
// Bound by the exponentials and the reads of logits from the caches: C of the one and 4 C of the
// other a pixel and scale, where the logits as a whole are a few MB and what is written a byte a
// pixel. A warp takes a pixel, its lanes the classes, at most 8 each; a block has 32 pixels beside
// each other, which share most of their logits in L1. Counts are whole numbers: they come out the
// same in any order.
//
// count_above: bound by memory, 16 bytes a thread and round; a block adds one whole number.
#include "ops/loss.h"

#include <algorithm>

#include "core/error.h"
#include "ops/resize.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int pixels = 32;       // of a block
constexpr int most_classes = 8;  // of a lane

struct Scales {
  const void* logits[ops::most_scales];
  int h[ops::most_scales], w[ops::most_scales];
  float down[ops::most_scales], across[ops::most_scales];  // h / H, w / W
  int count;
};

// Shared memory: the block's counts [3,C] and, where `scores` is given, its scores [pixels,C + 1].
template <class T>
__global__ void __launch_bounds__(threads)
    predict_kernel(Scales scales, int H, int W, int C, const std::uint8_t* labels,
                   std::uint8_t* prediction, unsigned long long* counts, float* scores) {
  int* own = shared_memory<int>();
  float* staged = reinterpret_cast<float*>(own + 3 * C);
  for (int i = threadIdx.x; i < 3 * C; i += threads) own[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, blocks = (W + pixels - 1) / pixels;
  const int r = blockIdx.x / blocks, first = blockIdx.x % blocks * pixels;
  const int here = min(pixels, W - first);
  for (int p = threadIdx.x / 32; p < here; p += warps) {
    const int q = first + p;
    float mean[most_classes] = {};
    for (int s = 0; s < scales.count; ++s) {
      const int w = scales.w[s];
      const ops::BilinearTap row = ops::bilinear_tap(r, scales.down[s], scales.h[s]),
                             column = ops::bilinear_tap(q, scales.across[s], w);
      const T* const x = static_cast<const T*>(scales.logits[s]);
      const T *upper = x + static_cast<std::int64_t>(row.first) * w * C,
              *lower = x + static_cast<std::int64_t>(row.second) * w * C;
      const int a = column.first * C, b = column.second * C;
      float v[most_classes], top = -INFINITY;
#pragma unroll
      for (int k = 0; k < most_classes; ++k) {
        const int c = lane + 32 * k;
        v[k] = -INFINITY;
        if (c >= C) continue;
        const float left = to_float(upper[a + c]), right = to_float(upper[b + c]);
        const float left_below = to_float(lower[a + c]), right_below = to_float(lower[b + c]);
        const float from = left + row.share * (left_below - left),
                    to = right + row.share * (right_below - right);
        v[k] = from + column.share * (to - from);
        top = fmaxf(top, v[k]);
      }
      top = warp_max(top);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < most_classes; ++k) {
        v[k] = expf(v[k] - top);
        sum += v[k];
      }
      const float share = 1.0f / static_cast<float>(scales.count) / warp_sum(sum);
#pragma unroll
      for (int k = 0; k < most_classes; ++k) mean[k] += share * v[k];
    }
    float greatest = -1.0f;
    int best = 0;
#pragma unroll
    for (int k = 0; k < most_classes; ++k) {
      const int c = lane + 32 * k;
      if (c >= C) continue;
      if (mean[k] > greatest) greatest = mean[k], best = c;
      if (scores != nullptr) staged[p * (C + 1) + c] = mean[k];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(full_mask, greatest, offset);
      const int its = __shfl_xor_sync(full_mask, best, offset);
      if (other > greatest || (other == greatest && its < best)) greatest = other, best = its;
    }
    if (lane > 0) continue;
    const std::int64_t at = static_cast<std::int64_t>(r) * W + q;
    prediction[at] = static_cast<std::uint8_t>(best);
    const int known = labels == nullptr ? -1 : static_cast<int>(labels[at]) - 1;
    if (known < 0 || known >= C) continue;
    if (known == best) atomicAdd(own + known, 1);
    atomicAdd(own + C + best, 1);
    atomicAdd(own + 2 * C + known, 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * C; i += threads)
    if (own[i] > 0) atomicAdd(counts + i, static_cast<unsigned long long>(own[i]));
  if (scores == nullptr) return;
  for (int i = threadIdx.x; i < C * pixels; i += threads) {
    const int c = i / pixels, p = i % pixels;
    if (p < here)
      scores[(static_cast<std::int64_t>(c) * H + r) * W + first + p] = staged[p * (C + 1) + c];
  }
}

constexpr int rounds = 16;  // of a thread of count_above, before the grid is as large as it gets

// blockIdx.y takes the samples, of `size` accesses each.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    count_above_kernel(const T* x, std::int64_t size, std::int64_t samples, float threshold,
                       int* counts) {
  int* shared = shared_memory<int>();  // [warps]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (std::int64_t n = blockIdx.y; n < samples; n += gridDim.y) {
    int count = 0;
    for (std::int64_t i = thread_index(); i < size;
         i += static_cast<std::int64_t>(gridDim.x) * threads) {
      float v[V];
      unpack(load_vec<V>(x, n * size + i), v);
#pragma unroll
      for (int e = 0; e < V; ++e) count += v[e] > threshold ? 1 : 0;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      count += __shfl_xor_sync(full_mask, count, offset);
    if (lane == 0) shared[warp] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
      int total = 0;
      for (int w = 0; w < warps; ++w) total += shared[w];
      if (total > 0) atomicAdd(counts + n, total);
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void predict_classes(Tensor& prediction, std::span<const Tensor> logits, const Tensor& labels,
                     Tensor& counts, Tensor& scores) {
  const int H = static_cast<int>(prediction.dim(0)), W = static_cast<int>(prediction.dim(1)),
            C = static_cast<int>(counts.dim(1));
  WEFT_ASSERT(!logits.empty() && logits.size() <= most_scales && C <= 255);
  Scales scales{};
  for (const Tensor& x : logits) {
    WEFT_ASSERT(x.shape().rank() == 5 && x.dim(4) == C && x.dtype() == logits[0].dtype());
    const int s = scales.count++;
    scales.logits[s] = x.raw();
    scales.h[s] = static_cast<int>(x.dim(2)), scales.w[s] = static_cast<int>(x.dim(3));
    scales.down[s] = bilinear_ratio(x.dim(2), H), scales.across[s] = bilinear_ratio(x.dim(3), W);
  }
  const int shared = 3 * C + (scores.defined() ? pixels * (C + 1) : 0);
  by_type(logits[0], [&]<class T>() {
    launch(predict_kernel<T>, dim3(static_cast<unsigned>(H * ((W + pixels - 1) / pixels))),
           dim3(threads), static_cast<std::size_t>(shared) * sizeof(float), scales, H, W, C,
           data_or_null<std::uint8_t>(labels), data<std::uint8_t>(prediction),
           reinterpret_cast<unsigned long long*>(data<std::int64_t>(counts)),
           data_or_null<float>(scores));
  });
}

void count_above(const Tensor& x, float threshold, Tensor& counts) {
  const std::int64_t samples = counts.numel(), size = x.numel() / samples;
  WEFT_ASSERT(x.dim(0) == samples && size < std::int64_t{1} << 31);
  CUDA_CHECK(cudaMemsetAsync(counts.raw(), 0, counts.bytes(), cuda_stream(Stream::compute)));
  by_type(x, [&]<class T>() {
    const auto run = [&]<int V>() {
      const std::int64_t accesses = size / V;
      const dim3 grid(std::min(1024u, blocks_for(accesses, threads * rounds)),
                      static_cast<unsigned>(std::min<std::int64_t>(samples, 65535)));
      launch(count_above_kernel<V, T>, grid, dim3(threads), warps * sizeof(int), data<T>(x),
             accesses, samples, threshold, data<std::int32_t>(counts));
    };
    constexpr int V = 16 / sizeof(T);
    size % V == 0 && aligned<V>(x) ? run.template operator()<V>() : run.template operator()<1>();
  });
}

}  // namespace weft::ops::cuda
