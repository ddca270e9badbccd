// CUDA side of ops/loss.h. CPU twin: src/ops/cpu/text_loss.cpp; cases:
// tests/kernels/text_loss.cpp.
//
// Bound by memory and by starts: a batch of 16 pictures of 640x640 is 6.5 million pixels of 6 to 10
// bytes, read once for the sums, five times in part to choose pixels (radix selection, 8 bits a
// pass, then the equal ones), once backward; 16 bytes of logits an access. Sums are f32 within a
// thread and f64 over the blocks' chunks, in an order that the shape alone decides.
#include "ops/loss.h"

#include <algorithm>

#include "core/error.h"
#include "ptx.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

using ops::TextLoss, ops::TextPixel;

constexpr int bins = 256;
static_assert(bins == threads);

// Pixels are taken in groups of 16 bytes of logits, in the same order whether or not each group is
// one access (`whole`).
template <class T, bool whole>
struct Batch {
  static constexpr int V = 16 / sizeof(T);
  struct Bytes {
    std::uint32_t words[V / 4];
    __device__ __forceinline__ unsigned operator[](int e) const {
      return words[e / 4] >> (e % 4 * 8) & 0xffu;
    }
  };
  const T *probability, *threshold;
  const std::uint8_t *flags, *thresholds;
  std::int64_t count, chunk;  // pixels in all and of a block

  // Group j. Behind the last pixel there are zeros, which are flags that ask for nothing.
  __device__ __forceinline__ void load(const T* from, std::int64_t j, float (&to)[V]) const {
    if constexpr (whole) {
      unpack(load_vec<V>(from, j), to);
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) to[e] = j * V + e < count ? to_float(from[j * V + e]) : 0.0f;
    }
  }
  __device__ __forceinline__ Bytes load(const std::uint8_t* from, std::int64_t j) const {
    Bytes to{};
    if constexpr (whole) {
      const auto v = load_vec<V / 4>(reinterpret_cast<const std::uint32_t*>(from), j);
#pragma unroll
      for (int k = 0; k < V / 4; ++k) to.words[k] = v.v[k];
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e)
        if (j * V + e < count)
          to.words[e / 4] |= static_cast<std::uint32_t>(from[j * V + e]) << (e % 4 * 8);
    }
    return to;
  }
  __device__ __forceinline__ void store(T* to, std::int64_t j, const float (&v)[V]) const {
    if constexpr (whole) {
      store_vec<V>(to, j, pack<T, V>(v));
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e)
        if (j * V + e < count) to[j * V + e] = from_float<T>(v[e]);
    }
  }
  __device__ __forceinline__ float logit(std::int64_t i) const { return to_float(probability[i]); }
  // The block's groups.
  __device__ __forceinline__ std::int64_t first() const { return blockIdx.x * (chunk / V); }
  __device__ __forceinline__ std::int64_t last() const {
    return min(first() + chunk / V, (count + V - 1) / V);
  }
};

// A pixel that counts, with text and without.
constexpr unsigned both = TextPixel::text | TextPixel::counts;
__device__ __forceinline__ bool has_text(unsigned flags) { return (flags & both) == both; }
__device__ __forceinline__ bool negative(unsigned flags) {
  return (flags & both) == TextPixel::counts;
}
__device__ __forceinline__ float wanted(unsigned threshold) {
  return TextPixel::least_threshold +
         TextPixel::threshold_span / 255.0f * static_cast<float>(threshold);
}
// An exact division would be half of the work; this one is right but for the last bit.
__device__ __forceinline__ float accurate_sigmoid(float x) { return rcp_approx(1.0f + expf(-x)); }
// log(1 + e^x).
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// The sums of a block or of all: losses of text's pixels, |T - threshold|, B where there is text,
// B; then how many pixels have text, have none, count for the threshold.
enum Sum { sum_text, sum_threshold, sum_overlap, sum_binary, of_text, of_others, of_border, sums };

// What is chosen so far: the known upper bits of the edge's order, and of the pixels that agree
// with them how many are wanted, those of the greatest logits.
enum Choice { choice_order, choice_wanted, choices };

// partial [blocks,sums].
template <class T, bool whole>
__global__ void __launch_bounds__(threads) sums_kernel(Batch<T, whole> in, double* partial) {
  constexpr int V = Batch<T, whole>::V;
  constexpr std::uint32_t each = 0x01010101u;
  static_assert(TextPixel::text == 1 && TextPixel::counts == 2 && TextPixel::threshold == 4);
  float s[sums] = {};
  int with_text = 0, without = 0, bordering = 0;
  for (std::int64_t j = in.first() + threadIdx.x; j < in.last(); j += threads) {
    const auto flags = in.load(in.flags, j), thresholds = in.load(in.thresholds, j);
    float p[V], t[V];
    in.load(in.probability, j, p);
    in.load(in.threshold, j, t);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float shrunk = accurate_sigmoid(t[e]), d = fabsf(shrunk - wanted(thresholds[e]));
      const float distance =
          d < TextLoss::smooth ? 0.5f / TextLoss::smooth * d * d : d - 0.5f * TextLoss::smooth;
      const float binary =
          accurate_sigmoid(TextLoss::steepness * (accurate_sigmoid(p[e]) - shrunk));
      s[sum_threshold] += flags[e] & TextPixel::threshold ? distance : 0.0f;
      s[sum_binary] += flags[e] & TextPixel::counts ? binary : 0.0f;
      s[sum_overlap] += has_text(flags[e]) ? binary : 0.0f;
    }
    int here = 0;  // of text
#pragma unroll
    for (const std::uint32_t four : flags.words) {
      here += __popc(four & four >> 1 & each);
      without += __popc(~four & four >> 1 & each);
      bordering += __popc(four >> 2 & each);
    }
    with_text += here;
    if (here == 0) continue;
      // Few pixels have text, and those are neighbours.
#pragma unroll 1
    for (std::int64_t i = j * V; i < min((j + 1) * V, in.count); ++i)
      if (has_text(in.flags[i])) s[sum_text] += softplus(-in.logit(i));
  }
  s[of_text] = static_cast<float>(with_text);
  s[of_others] = static_cast<float>(without);
  s[of_border] = static_cast<float>(bordering);
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
  stats[ops::text_thresholds] = s[of_border];
  stats[ops::text_overlap] = s[sum_overlap], stats[ops::text_area] = s[sum_binary] + s[of_text];
  stats[ops::text_probability] = s[sum_text];  // so far
  stats[ops::text_threshold] = s[sum_threshold] / (s[of_border] + TextLoss::least);
  stats[ops::text_binary] = 1 - 2 * s[sum_overlap] / (stats[ops::text_area] + TextLoss::least);
}

// counts [bins] += the pixels without text that agree with the choice above `shift + 8`, by their
// 8 bits there.
template <class T, bool whole>
__global__ void __launch_bounds__(threads)
    bins_kernel(Batch<T, whole> in, const std::int64_t* choice, int shift, std::int32_t* counts) {
  constexpr int V = Batch<T, whole>::V;
  std::int32_t* own = shared_memory<std::int32_t>();
  own[threadIdx.x] = 0;
  __syncthreads();
  const auto known = static_cast<std::uint32_t>(choice[choice_order]);
  const std::uint32_t mask = shift == 24 ? 0u : ~0u << (shift + 8);
  for (std::int64_t j = in.first() + threadIdx.x; j < in.last(); j += threads) {
    const auto flags = in.load(in.flags, j);
    float p[V];
    in.load(in.probability, j, p);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const std::uint32_t order = ops::text_order(p[e]);
      if (negative(flags[e]) && (order & mask) == known)
        atomicAdd(own + (order >> shift & (bins - 1)), 1);
    }
  }
  __syncthreads();
  if (own[threadIdx.x] > 0) atomicAdd(counts + threadIdx.x, own[threadIdx.x]);
}

// The one of the items [0, n), in order, at which the sum of count(i) reaches `wanted`, and the sum
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
template <class T, bool whole>
__global__ void __launch_bounds__(threads)
    chosen_kernel(Batch<T, whole> in, const std::int64_t* choice, double* partial,
                  std::int32_t* equal) {
  constexpr int V = Batch<T, whole>::V;
  const auto edge = static_cast<std::uint32_t>(choice[choice_order]);
  float sum = 0.0f, ties = 0.0f;
  if (choice[choice_wanted] > 0)  // else nothing is chosen
    for (std::int64_t j = in.first() + threadIdx.x; j < in.last(); j += threads) {
      const auto flags = in.load(in.flags, j);
      float p[V];
      in.load(in.probability, j, p);
      bool any = false;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const std::uint32_t order = ops::text_order(p[e]);
        const bool candidate = negative(flags[e]);
        any |= candidate && order > edge;
        ties += candidate && order == edge ? 1.0f : 0.0f;
      }
      if (!any) continue;
        // Three for each pixel of text at most.
#pragma unroll 1
      for (std::int64_t i = j * V; i < min((j + 1) * V, in.count); ++i) {
        const float logit = in.logit(i);
        if (negative(in.flags[i]) && ops::text_order(logit) > edge) sum += softplus(logit);
      }
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
template <class T, bool whole>
__global__ void __launch_bounds__(threads)
    text_loss_finish_kernel(Batch<T, whole> in, const std::int64_t* choice, const double* partial,
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
      return negative(in.flags[first + i]) && ops::text_order(in.logit(first + i)) == edge ? 1 : 0;
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

// What the gradients of all pixels have in common: of the threshold's distance; of B where there is
// text and where there is none; of the entropy; the choice's edge.
struct Common {
  float distance, with_text, without, entropy;
  std::uint32_t edge;
  std::int64_t edge_pixel;
  __device__ __forceinline__ Common(const double* stats, double weight) {
    const double area = stats[ops::text_area] + TextLoss::least;
    const auto elsewhere = static_cast<float>(weight * TextLoss::binary * 2 *
                                              stats[ops::text_overlap] / (area * area)),
               more = static_cast<float>(weight * TextLoss::binary * 2 / area);
    distance = static_cast<float>(weight * TextLoss::threshold /
                                  (stats[ops::text_thresholds] + TextLoss::least));
    with_text = TextLoss::steepness * (elsewhere - more);
    without = TextLoss::steepness * elsewhere;
    entropy = static_cast<float>(
        weight * TextLoss::probability /
        (stats[ops::text_positives] + stats[ops::text_negatives] + TextLoss::least));
    // Nothing is beyond the greatest order.
    const bool any = stats[ops::text_negatives] > 0;
    edge = any ? ops::text_order(static_cast<float>(stats[ops::text_edge])) : ~0u;
    edge_pixel = any ? static_cast<std::int64_t>(stats[ops::text_edge_pixel]) : -1;
  }
};

template <class T, bool whole>
__global__ void __launch_bounds__(threads)
    text_loss_backward_kernel(Batch<T, whole> in, const double* stats, double weight,
                              T* dprobability, T* dthreshold) {
  constexpr int V = Batch<T, whole>::V;
  Common* const shared = shared_memory<Common>();
  if (threadIdx.x == 0) *shared = Common(stats, weight);
  __syncthreads();
  const Common common = *shared;
  for (std::int64_t j = in.first() + threadIdx.x; j < in.last(); j += threads) {
    const auto flags = in.load(in.flags, j), thresholds = in.load(in.thresholds, j);
    float x[V], t[V];
    in.load(in.probability, j, x);
    in.load(in.threshold, j, t);
    // Pixels of the group up to the edge's.
    const std::int64_t ahead = common.edge_pixel - j * V;
    const int until = ahead < -1 ? -1 : ahead < V ? static_cast<int>(ahead) : V;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const unsigned own = flags[e];
      const bool text = own & TextPixel::text, counts = own & TextPixel::counts;
      const float p = accurate_sigmoid(x[e]);
      t[e] = accurate_sigmoid(t[e]);
      float d = (t[e] - wanted(thresholds[e])) * (1.0f / TextLoss::smooth);
      d = d < -1.0f ? -1.0f : d > 1.0f ? 1.0f : d;
      const float by_threshold = own & TextPixel::threshold ? common.distance * d : 0.0f;
      const float binary = accurate_sigmoid(TextLoss::steepness * (p - t[e]));
      const float slope =
          counts ? (text ? common.with_text : common.without) * binary * (1.0f - binary) : 0.0f;
      const std::uint32_t order = ops::text_order(x[e]);
      const bool hard = order > common.edge || (order == common.edge && e <= until);
      const float miss = text   ? p - 1.0f
                         : hard ? p
                                : 0.0f,
                  by_logit = counts ? common.entropy * miss : 0.0f;
      x[e] = by_logit + slope * p * (1.0f - p);
      t[e] = (by_threshold - slope) * t[e] * (1.0f - t[e]);
    }
    in.store(dprobability, j, x);
    in.store(dthreshold, j, t);
  }
}

__global__ void summary_kernel(const double* stats, int n, float* losses, float* terms) {
  for (int i = 0; i < n; ++i) losses[i] = static_cast<float>(stats[ops::text_total]);
  for (int k = 0; k < 3; ++k) terms[k] = static_cast<float>(n * stats[ops::text_probability + k]);
}

template <class T, bool whole>
Batch<T, whole> batch(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                      const Tensor& thresholds) {
  constexpr std::int64_t most_blocks = 1024, least_pixels = 2048;
  const std::int64_t count = probability.numel();
  WEFT_ASSERT(threshold.numel() == count && flags.numel() == count && thresholds.numel() == count);
  WEFT_ASSERT(count < std::int64_t{1} << 31);  // bins are 32 bits
  return {data<T>(probability),
          data<T>(threshold),
          data<std::uint8_t>(flags),
          data<std::uint8_t>(thresholds),
          count,
          blocks_for(std::max(least_pixels, (count + most_blocks - 1) / most_blocks), 16) * 16};
}

// Calls f.operator()<T, whole>().
template <class F, class... Tensors>
void by_whole_accesses(F&& f, const Tensor& probability, const Tensor& threshold,
                       const Tensor& flags, const Tensor& thresholds, const Tensors&... others) {
  by_type(probability, [&]<class T>() {
    constexpr int V = 16 / sizeof(T);
    if (probability.numel() % V == 0 &&
        aligned<V>(probability, threshold, flags, thresholds, others...))
      f.template operator()<T, true>();
    else
      f.template operator()<T, false>();
  });
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void text_loss_forward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                       const Tensor& thresholds, Tensor& stats) {
  by_whole_accesses(
      [&]<class T, bool whole>() {
        const auto in = batch<T, whole>(probability, threshold, flags, thresholds);
        const std::int64_t blocks = std::max(1u, blocks_for(in.count, static_cast<int>(in.chunk)));
        const Tensor partials = Tensor::empty({blocks, sums}, DType::f64),
                     chosen = Tensor::empty({blocks}, DType::f64),
                     equals = Tensor::empty({blocks}, DType::i32),
                     choices_made = Tensor::empty({choices}, DType::i64),
                     bin_counts = Tensor::empty({bins}, DType::i32);
        auto* choice = data<std::int64_t>(choices_made);
        auto* counts = data<std::int32_t>(bin_counts);
        const dim3 grid(static_cast<unsigned>(blocks)), block(threads);
        constexpr std::size_t search = (threads + 2) * sizeof(std::int64_t);
        launch(sums_kernel<T, whole>, grid, block, warps * sums * sizeof(double), in,
               data<double>(partials));
        launch(sums_to_stats_kernel, dim3(1), dim3(32), 0, data<double>(partials), blocks,
               data<double>(stats), choice);
        device_runtime().zero(counts, bin_counts.bytes(), Stream::compute);
        for (const int shift : {24, 16, 8, 0}) {
          launch(bins_kernel<T, whole>, grid, block, bins * sizeof(std::int32_t), in, choice, shift,
                 counts);
          launch(choose_kernel, dim3(1), block, search, counts, shift, choice);
        }
        launch(chosen_kernel<T, whole>, grid, block, 2 * warps * sizeof(double), in, choice,
               data<double>(chosen), data<std::int32_t>(equals));
        launch(text_loss_finish_kernel<T, whole>, dim3(1), block, search, in, choice,
               data<double>(chosen), data<std::int32_t>(equals), blocks, data<double>(stats));
      },
      probability, threshold, flags, thresholds);
}

void text_loss_backward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                        const Tensor& thresholds, const Tensor& stats, float weight,
                        Tensor& dprobability, Tensor& dthreshold) {
  if (probability.numel() == 0) return;
  by_whole_accesses(
      [&]<class T, bool whole>() {
        const auto in = batch<T, whole>(probability, threshold, flags, thresholds);
        launch(text_loss_backward_kernel<T, whole>,
               dim3(blocks_for(in.count, static_cast<int>(in.chunk))), dim3(threads),
               sizeof(Common), in, data<double>(stats), weight, data<T>(dprobability),
               data<T>(dthreshold));
      },
      probability, threshold, flags, thresholds, dprobability, dthreshold);
}

void text_summary(const Tensor& stats, Tensor& losses, Tensor& terms) {
  launch(summary_kernel, dim3(1), dim3(1), 0, data<double>(stats), static_cast<int>(losses.numel()),
         data<float>(losses), data<float>(terms));
}

}  // namespace weft::ops::cuda
