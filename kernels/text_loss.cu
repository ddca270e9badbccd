// CUDA side of ops/text_loss.h. CPU twin: src/ops/cpu/text_loss.cpp; cases:
// src/bench/kernels/text_loss.cpp.
//
// Bound by memory and by starts: a batch of 16 pictures of 640x640 is 6.5 million pixels of 6 to 10
// bytes, read once for the sums, five times in part to choose pixels (radix selection, 8 bits a
// pass, then the equal ones), once backward. Sums are f32 within a thread and f64 over the blocks'
// chunks, in an order that the shape alone decides; counts are whole numbers.
#include "ops/text_loss.h"

#include <algorithm>

#include "core/error.h"
#include "launch.cuh"

namespace weft::kernels {
namespace {

using ops::TextLoss, ops::TextPixel;

constexpr int threads = 256, warps = threads / 32, bins = 256;
constexpr std::int64_t most_blocks = 1024, least_pixels = 2048;
static_assert(bins == threads);

template <class T>
struct Batch {
  const T *probability, *threshold;
  const std::uint8_t *flags, *thresholds;
  std::int64_t count, chunk;  // pixels in all and of a block

  __device__ __forceinline__ float logit(std::int64_t i) const { return to_float(probability[i]); }
  // A pixel without text that counts.
  __device__ __forceinline__ bool negative(std::int64_t i) const {
    return (flags[i] & (TextPixel::text | TextPixel::counts)) == TextPixel::counts;
  }
  __device__ __forceinline__ float wanted(std::int64_t i) const {
    return TextPixel::least_threshold +
           TextPixel::threshold_span / 255.0f * static_cast<float>(thresholds[i]);
  }
  __device__ __forceinline__ std::int64_t first() const { return blockIdx.x * chunk; }
  __device__ __forceinline__ std::int64_t last() const { return min(first() + chunk, count); }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// log(1 + e^x).
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// Of a block or of all: losses of text's pixels, |T - threshold|, B where there is text, B; then
// how many pixels have text, have none, count for the threshold.
enum Sum {
  sum_text,
  sum_threshold,
  sum_overlap,
  sum_binary,
  of_text,
  of_others,
  of_threshold,
  sums
};

// What is chosen so far: the known upper bits of the edge's order, and of the pixels that agree
// with them how many are wanted, those of the greatest logits.
enum Choice { choice_order, choice_wanted, choices };

// partial [blocks,sums].
template <class T>
__global__ void __launch_bounds__(threads) sums_kernel(Batch<T> in, double* partial) {
  float s[sums] = {};
  for (std::int64_t i = in.first() + threadIdx.x; i < in.last(); i += threads) {
    const float t = sigmoid(to_float(in.threshold[i]));
    if (in.flags[i] & TextPixel::threshold) {
      const float d = fabsf(t - in.wanted(i));
      s[sum_threshold] +=
          d < TextLoss::smooth ? 0.5f * d * d / TextLoss::smooth : d - 0.5f * TextLoss::smooth;
      s[of_threshold] += 1.0f;
    }
    if (!(in.flags[i] & TextPixel::counts)) continue;
    const float binary = sigmoid(TextLoss::steepness * (sigmoid(in.logit(i)) - t));
    s[sum_binary] += binary;
    if (in.flags[i] & TextPixel::text) {
      s[sum_text] += softplus(-in.logit(i));
      s[sum_overlap] += binary;
      s[of_text] += 1.0f;
    } else {
      s[of_others] += 1.0f;
    }
  }
  double* shared = shared_memory<double>();  // [warps,sums]
#pragma unroll
  for (int k = 0; k < sums; ++k) {
    const float sum = warp_sum(s[k]);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32 * sums + k] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= sums) return;
  double sum = 0;
  for (int w = 0; w < warps; ++w) sum += shared[w * sums + threadIdx.x];
  partial[blockIdx.x * sums + threadIdx.x] = sum;
}

// The sum of column `k` of partial [rows,columns], by one warp, to all lanes.
__device__ __forceinline__ double column_sum(const double* partial, int rows, int columns, int k) {
  double sum = 0;
  for (int i = threadIdx.x % 32; i < rows; i += 32) sum += partial[i * columns + k];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(full_mask, sum, offset);
  return sum;
}

// Everything that needs no choice, and what is to be chosen. One warp.
__global__ void sums_to_stats_kernel(const double* partial, int blocks, double* stats,
                                     std::int64_t* choice) {
  double s[sums];
#pragma unroll
  for (int k = 0; k < sums; ++k) s[k] = column_sum(partial, blocks, sums, k);
  if (threadIdx.x > 0) return;
  const double most = TextLoss::negatives * s[of_text];
  const double chosen = s[of_others] < most ? s[of_others] : most;
  choice[choice_order] = 0;
  choice[choice_wanted] = static_cast<std::int64_t>(chosen);
  stats[ops::text_positives] = s[of_text], stats[ops::text_negatives] = chosen;
  stats[ops::text_thresholds] = s[of_threshold];
  stats[ops::text_overlap] = s[sum_overlap], stats[ops::text_area] = s[sum_binary] + s[of_text];
  stats[ops::text_probability] = s[sum_text];  // so far
  stats[ops::text_threshold] = s[sum_threshold] / (s[of_threshold] + TextLoss::least);
  stats[ops::text_binary] = 1 - 2 * s[sum_overlap] / (stats[ops::text_area] + TextLoss::least);
}

// counts [bins] += the pixels without text that agree with the choice above `shift + 8`, by their
// 8 bits there.
template <class T>
__global__ void __launch_bounds__(threads)
    bins_kernel(Batch<T> in, const std::int64_t* choice, int shift, std::int32_t* counts) {
  std::int32_t* own = shared_memory<std::int32_t>();
  own[threadIdx.x] = 0;
  __syncthreads();
  const auto known = static_cast<std::uint32_t>(choice[choice_order]);
  const std::uint32_t mask = shift == 24 ? 0u : ~0u << (shift + 8);
  for (std::int64_t i = in.first() + threadIdx.x; i < in.last(); i += threads) {
    if (!in.negative(i)) continue;
    const std::uint32_t order = ops::text_order(in.logit(i));
    if ((order & mask) == known) atomicAdd(own + (order >> shift & (bins - 1)), 1);
  }
  __syncthreads();
  if (own[threadIdx.x] > 0) atomicAdd(counts + threadIdx.x, own[threadIdx.x]);
}

// Of items [0, n) in order, the one at which the sum of count(i) reaches `wanted`, and the sum
// before it, to all threads. shared [threads + 2].
struct Found {
  std::int64_t item, before;
};
template <class Count>
__device__ Found find(Count count, std::int64_t n, std::int64_t wanted, std::int64_t* shared) {
  const std::int64_t share = (n + threads - 1) / threads;
  const std::int64_t first = min(threadIdx.x * share, n), last = min(first + share, n);
  std::int64_t own = 0, before = 0;
  for (std::int64_t i = first; i < last; ++i) own += count(i);
  shared[threadIdx.x] = own;
  if (threadIdx.x == 0) shared[threads] = n - 1, shared[threads + 1] = 0;
  __syncthreads();
  for (int t = 0; t < static_cast<int>(threadIdx.x); ++t) before += shared[t];
  if (before < wanted && wanted <= before + own)
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t here = count(i);
      if (before + here >= wanted) {
        shared[threads] = i, shared[threads + 1] = before;
        break;
      }
      before += here;
    }
  __syncthreads();
  const Found found{shared[threads], shared[threads + 1]};
  __syncthreads();
  return found;
}

// The next 8 bits of the choice; counts [bins] are cleared for the next pass. One block.
__global__ void __launch_bounds__(threads)
    choose_kernel(std::int32_t* counts, int shift, std::int64_t* choice) {
  const std::int64_t wanted = choice[choice_wanted];
  const Found found = find([&](std::int64_t i) { return counts[bins - 1 - i]; }, bins, wanted,
                           shared_memory<std::int64_t>());
  counts[threadIdx.x] = 0;
  if (threadIdx.x > 0) return;
  choice[choice_order] |= (bins - 1 - found.item) << shift;
  choice[choice_wanted] = wanted - found.before;
}

// partial [blocks]: losses of the pixels without text above the edge; equal [blocks]: how many are
// at the edge.
template <class T>
__global__ void __launch_bounds__(threads)
    chosen_kernel(Batch<T> in, const std::int64_t* choice, double* partial, std::int32_t* equal) {
  const auto edge = static_cast<std::uint32_t>(choice[choice_order]);
  float sum = 0.0f, ties = 0.0f;
  if (choice[choice_wanted] > 0)  // else nothing is chosen
    for (std::int64_t i = in.first() + threadIdx.x; i < in.last(); i += threads) {
      if (!in.negative(i)) continue;
      const float logit = in.logit(i);
      const std::uint32_t order = ops::text_order(logit);
      if (order > edge) sum += softplus(logit);
      if (order == edge) ties += 1.0f;
    }
  double* shared = shared_memory<double>();  // [warps,2]
  sum = warp_sum(sum), ties = warp_sum(ties);
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32 * 2] = sum;
    shared[threadIdx.x / 32 * 2 + 1] = ties;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double total = 0, all = 0;
  for (int w = 0; w < warps; ++w) total += shared[2 * w], all += shared[2 * w + 1];
  partial[blockIdx.x] = total;
  equal[blockIdx.x] = static_cast<std::int32_t>(all);
}

// The rest of the stats. One block.
template <class T>
__global__ void __launch_bounds__(threads)
    finish_kernel(Batch<T> in, const std::int64_t* choice, const double* partial,
                  const std::int32_t* equal, int blocks, double* stats) {
  std::int64_t* shared = shared_memory<std::int64_t>();
  const auto edge = static_cast<std::uint32_t>(choice[choice_order]);
  const std::int64_t ties = choice[choice_wanted];
  // Alike in all threads.
  const bool any = ties > 0;
  std::int64_t pixel = -1;
  if (any) {
    const Found chunk = find([&](std::int64_t i) { return equal[i]; }, blocks, ties, shared);
    const std::int64_t first = chunk.item * in.chunk;
    const auto at_edge = [&](std::int64_t i) {
      return in.negative(first + i) && ops::text_order(in.logit(first + i)) == edge ? 1 : 0;
    };
    pixel =
        first + find(at_edge, min(in.chunk, in.count - first), ties - chunk.before, shared).item;
  }
  if (threadIdx.x >= 32) return;
  const double above = column_sum(partial, blocks, 1, 0);
  if (threadIdx.x > 0) return;
  const float logit =
      any ? std::bit_cast<float>(edge & 0x80000000u ? edge & 0x7fffffffu : ~edge) : 0.0f;
  const double chosen = any ? above + static_cast<double>(ties) * softplus(logit) : 0.0;
  const double pixels = stats[ops::text_positives] + stats[ops::text_negatives] + TextLoss::least;
  stats[ops::text_probability] = (stats[ops::text_probability] + chosen) / pixels;
  stats[ops::text_edge] = logit;
  stats[ops::text_edge_pixel] = static_cast<double>(pixel);
  stats[ops::text_total] = TextLoss::probability * stats[ops::text_probability] +
                           TextLoss::threshold * stats[ops::text_threshold] +
                           TextLoss::binary * stats[ops::text_binary];
}

template <class T>
__global__ void __launch_bounds__(threads)
    backward_kernel(Batch<T> in, const double* stats, double weight, T* dprobability,
                    T* dthreshold) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= in.count) return;
  const std::uint8_t flags = in.flags[i];
  const float p = sigmoid(in.logit(i)), t = sigmoid(to_float(in.threshold[i]));
  float by_logit = 0.0f, by_threshold = 0.0f, slope = 0.0f;
  if (flags & TextPixel::threshold) {
    const auto distance = static_cast<float>(weight * TextLoss::threshold /
                                             (stats[ops::text_thresholds] + TextLoss::least));
    const float d = (t - in.wanted(i)) / TextLoss::smooth;
    by_threshold = distance * (d < -1.0f ? -1.0f : d > 1.0f ? 1.0f : d);
  }
  if (flags & TextPixel::counts) {
    const bool text = flags & TextPixel::text;
    const double area = stats[ops::text_area] + TextLoss::least;
    const auto elsewhere = static_cast<float>(weight * TextLoss::binary * 2 *
                                              stats[ops::text_overlap] / (area * area)),
               more = static_cast<float>(weight * TextLoss::binary * 2 / area);
    const float binary = sigmoid(TextLoss::steepness * (p - t));
    slope = TextLoss::steepness * (text ? elsewhere - more : elsewhere) * binary * (1.0f - binary);
    const auto entropy = static_cast<float>(
        weight * TextLoss::probability /
        (stats[ops::text_positives] + stats[ops::text_negatives] + TextLoss::least));
    const std::uint32_t order = ops::text_order(in.logit(i)),
                        edge = ops::text_order(static_cast<float>(stats[ops::text_edge]));
    if (text)
      by_logit = entropy * (p - 1.0f);
    else if (stats[ops::text_negatives] > 0 &&
             (order > edge ||
              (order == edge && static_cast<double>(i) <= stats[ops::text_edge_pixel])))
      by_logit = entropy * p;
  }
  dprobability[i] = from_float<T>(by_logit + slope * p * (1.0f - p));
  dthreshold[i] = from_float<T>((by_threshold - slope) * t * (1.0f - t));
}

__global__ void summary_kernel(const double* stats, int n, float* losses, float* terms) {
  for (int i = 0; i < n; ++i) losses[i] = static_cast<float>(stats[ops::text_total]);
  for (int k = 0; k < 3; ++k) terms[k] = static_cast<float>(n * stats[ops::text_probability + k]);
}

template <class T>
Batch<T> batch(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
               const Tensor& thresholds) {
  const std::int64_t count = probability.numel();
  WEFT_ASSERT(threshold.numel() == count && flags.numel() == count && thresholds.numel() == count);
  WEFT_ASSERT(count < std::int64_t{1} << 31);  // bins are 32 bits
  return {data<T>(probability),
          data<T>(threshold),
          data<std::uint8_t>(flags),
          data<std::uint8_t>(thresholds),
          count,
          std::max(least_pixels, (count + most_blocks - 1) / most_blocks)};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void text_loss_forward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                       const Tensor& thresholds, Tensor& stats) {
  by_type(probability, [&]<class T>() {
    const auto in = batch<T>(probability, threshold, flags, thresholds);
    const std::int64_t blocks = std::max<std::int64_t>(1, (in.count + in.chunk - 1) / in.chunk);
    const Tensor partials = Tensor::empty({blocks, sums}, DType::f64),
                 chosen = Tensor::empty({blocks}, DType::f64),
                 equals = Tensor::empty({blocks}, DType::i32),
                 choices_made = Tensor::empty({choices}, DType::i64),
                 bin_counts = Tensor::empty({bins}, DType::i32);
    auto* choice = data<std::int64_t>(choices_made);
    auto* counts = data<std::int32_t>(bin_counts);
    const dim3 grid(static_cast<unsigned>(blocks)), block(threads);
    constexpr std::size_t search = (threads + 2) * sizeof(std::int64_t);
    launch(sums_kernel<T>, grid, block, warps * sums * sizeof(double), in, data<double>(partials));
    launch(sums_to_stats_kernel, dim3(1), dim3(32), 0, data<double>(partials), blocks,
           data<double>(stats), choice);
    device_runtime().zero(counts, bin_counts.bytes(), Stream::compute);
    for (const int shift : {24, 16, 8, 0}) {
      launch(bins_kernel<T>, grid, block, bins * sizeof(std::int32_t), in, choice, shift, counts);
      launch(choose_kernel, dim3(1), block, search, counts, shift, choice);
    }
    launch(chosen_kernel<T>, grid, block, 2 * warps * sizeof(double), in, choice,
           data<double>(chosen), data<std::int32_t>(equals));
    launch(finish_kernel<T>, dim3(1), block, search, in, choice, data<double>(chosen),
           data<std::int32_t>(equals), blocks, data<double>(stats));
  });
}

void text_loss_backward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                        const Tensor& thresholds, const Tensor& stats, float weight,
                        Tensor& dprobability, Tensor& dthreshold) {
  by_type(probability, [&]<class T>() {
    launch(backward_kernel<T>, dim3(blocks_for(probability.numel(), threads)), dim3(threads), 0,
           batch<T>(probability, threshold, flags, thresholds), data<double>(stats), weight,
           data<T>(dprobability), data<T>(dthreshold));
  });
}

void text_summary(const Tensor& stats, Tensor& losses, Tensor& terms) {
  launch(summary_kernel, dim3(1), dim3(1), 0, data<double>(stats), static_cast<int>(losses.numel()),
         data<float>(losses), data<float>(terms));
}

}  // namespace weft::ops::cuda
