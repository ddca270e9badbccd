// CUDA side of class_loss_* of ops/loss.h. CPU twin: src/ops/cpu/class_loss.cpp; cases:
// tests/kernels/class_loss.cpp.
//
// Bound by memory: the logits are read once forward, and read and written once backward. A warp
// takes a position, its lanes the classes. OHEM's edge is found by one block, by radix selection (8
// bits a pass) over the positions' losses, of which there are 1 / C as many as logits. Sums are
// made in an order that the shape alone decides; counts are whole numbers.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "math.cuh"
#include "ops/loss.h"

namespace weft::kernels {
namespace {

constexpr int class_bins = 256;
static_assert(class_bins == threads);

// Greater for greater losses; a NaN is the hardest.
__device__ __forceinline__ std::uint32_t hardness(float nll) {
  return nll != nll ? ~0u : ops::text_order(nll);
}

// nll [count]: of each labelled position, 0 elsewhere. partial [blocks,columns]: right, labelled,
// and with Dice areas, labels and overlaps of the C classes.
template <class T>
__global__ void __launch_bounds__(threads)
    class_losses_kernel(const T* logits, const std::uint8_t* labels, int C, int columns,
                        std::int64_t count, std::int64_t chunk, float* nll, double* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  double* shared = shared_memory<double>();  // [warps,columns]
  double* own_sums = shared + warp * columns;
  for (int i = lane; i < columns; i += 32) own_sums[i] = 0;
  __syncwarp();
  for (std::int64_t p = first + warp; p < last; p += warps) {
    const int k = static_cast<int>(labels[p]) - 1;
    if (k < 0) {
      if (lane == 0) nll[p] = 0.0f;
      continue;
    }
    const T* x = logits + p * C;
    const Softmax s(x, C);
    const float own = k < C ? to_float(x[k]) : NAN;
    float before = 0.0f;  // greatest logits in front of the label's
    for (int c = lane; c < k && c < C; c += 32) before += to_float(x[c]) == s.top ? 1.0f : 0.0f;
    before = warp_sum(before);
    if (lane == 0) {
      nll[p] =
          static_cast<float>(log(static_cast<double>(s.sum)) + (static_cast<double>(s.top) - own));
      own_sums[0] += own == s.top && before == 0.0f ? 1 : 0;
      own_sums[1] += 1;
    }
    if (columns == 2) continue;
    for (int c = lane; c < C; c += 32) {
      const float share = expf(to_float(x[c]) - s.top) / s.sum;
      own_sums[2 + c] += share;
      if (c != k) continue;
      own_sums[2 + C + c] += 1;
      own_sums[2 + 2 * C + c] += share;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += threads) {
    double sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared[w * columns + i];
    partial[blockIdx.x * columns + i] = sum;
  }
}

// What stats hold of all labelled positions. One block.
__global__ void __launch_bounds__(threads)
    class_sums_kernel(const double* partial, int blocks, int C, int columns, double* stats) {
  for (int i = threadIdx.x; i < 2 + 3 * C; i += threads) {
    double sum = 0;
    for (int b = 0; i < columns && b < blocks; ++b) sum += partial[b * columns + i];
    stats[i == 0 ? ops::class_right : i == 1 ? ops::class_labelled : ops::class_sums + i - 2] = sum;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  const double *area = stats + ops::class_sums, *labels = area + C, *overlap = labels + C;
  double sum = 0, classes = 0;
  for (int c = 0; c < C; ++c) {
    if (labels[c] == 0) continue;
    sum += 2 * overlap[c] / (area[c] + labels[c]);
    classes += 1;
  }
  stats[ops::class_count] = classes;
  stats[ops::class_dice] = classes > 0 ? 1 - sum / classes : 0;
}

// edge [1]: the hardness from which on positions are among the `wanted` hardest; 0 where no more
// than these are labelled. One block.
__global__ void __launch_bounds__(threads)
    class_edge_kernel(const float* nll, const std::uint8_t* labels, std::int64_t count,
                      std::int64_t wanted, const double* stats, std::uint32_t* edge) {
  std::int32_t* bin_counts = shared_memory<std::int32_t>();                   // [class_bins]
  auto* found = reinterpret_cast<std::uint32_t*>(bin_counts + class_bins);    // the edge so far
  auto* left = reinterpret_cast<std::int64_t*>(bin_counts + class_bins + 2);  // wanted of it
  if (threadIdx.x == 0) *found = 0, *left = wanted;
  // Alike in all threads.
  const bool choose = wanted > 0 && stats[ops::class_labelled] > static_cast<double>(wanted);
  for (int shift = 24; shift >= 0; shift -= 8) {
    bin_counts[threadIdx.x] = 0;
    __syncthreads();
    const std::uint32_t known = *found, mask = shift == 24 ? 0u : ~0u << (shift + 8);
    for (std::int64_t p = threadIdx.x; choose && p < count; p += threads) {
      const std::uint32_t order = hardness(nll[p]);
      if (labels[p] > 0 && (order & mask) == known)
        atomicAdd(bin_counts + (order >> shift & (class_bins - 1)), 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = class_bins - 1;
      for (; bin > 0 && bin_counts[bin] < *left; --bin) *left -= bin_counts[bin];
      *found = known | static_cast<std::uint32_t>(bin) << shift;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) edge[0] = choose ? *found : wanted > 0 ? 0u : ~0u;
}

// weights [count], which hold the losses; partial [blocks,2]: sums of weight * loss and of weights.
__global__ void __launch_bounds__(threads)
    class_weights_kernel(const std::uint8_t* labels, const float* class_weights, int C,
                         const std::uint32_t* edge, float least, std::int64_t count,
                         std::int64_t chunk, float* weights, double* partial) {
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  double sum = 0, total = 0;
  for (std::int64_t p = first + threadIdx.x; p < last; p += threads) {
    const float nll = weights[p];
    const int k = static_cast<int>(labels[p]) - 1;
    const bool counts = k >= 0 && (edge == nullptr || nll > least || hardness(nll) >= edge[0]);
    const float weight = !counts ? 0.0f : k < C ? class_weights[k] : 1.0f;
    weights[p] = weight;
    if (!counts) continue;
    sum += static_cast<double>(weight) * nll;
    total += weight;
  }
  double* shared = shared_memory<double>();  // [threads,2]
  shared[2 * threadIdx.x] = sum, shared[2 * threadIdx.x + 1] = total;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double all = 0;
  for (int t = 0; t < threads; ++t) all += shared[2 * t + threadIdx.x];
  partial[2 * blockIdx.x + threadIdx.x] = all;
}

__global__ void class_weight_sums_kernel(const double* partial, int blocks, double* stats) {
  if (threadIdx.x >= 2) return;
  double sum = 0;
  for (int b = 0; b < blocks; ++b) sum += partial[2 * b + threadIdx.x];
  stats[threadIdx.x == 0 ? ops::class_nll : ops::class_weight] = sum;
}

template <class T>
__global__ void __launch_bounds__(threads)
    class_backward_kernel(const T* logits, const std::uint8_t* labels, int C, std::int64_t count,
                          std::int64_t chunk, const float* weights, const double* stats, float dice,
                          float weight, T* dlogits) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  // The slopes of Dice by a class's probability: at every position, and at those of the class.
  float *everywhere = shared_memory<float>(), *own = everywhere + C;
  const double *area = stats + ops::class_sums, *of_class = area + C, *overlap = of_class + C;
  for (int c = threadIdx.x; c < C; c += threads) {
    const bool occurs = dice != 0.0f && of_class[c] > 0;
    const double both = area[c] + of_class[c],
                 f = occurs ? 2.0 * weight * dice / stats[ops::class_count] : 0.0;
    everywhere[c] = occurs ? static_cast<float>(f * overlap[c] / (both * both)) : 0.0f;
    own[c] = occurs ? static_cast<float>(-f / both) : 0.0f;
  }
  __syncthreads();
  const double entropy = stats[ops::class_weight] > 0 ? weight / stats[ops::class_weight] : 0.0;
  for (std::int64_t p = first + warp; p < last; p += warps) {
    const int k = static_cast<int>(labels[p]) - 1;
    const T* x = logits + p * C;
    T* d = dlogits + p * C;
    if (k < 0) {
      for (int c = lane; c < C; c += 32) d[c] = from_float<T>(0.0f);
      continue;
    }
    const Softmax s(x, C);
    const auto g = static_cast<float>(entropy * weights[p]);
    const float at_label = k < C ? expf(to_float(x[k]) - s.top) / s.sum * own[k] : 0.0f;
    float mean = 0.0f;  // of the slopes, by probability
    for (int c = lane; c < C; c += 32) mean += expf(to_float(x[c]) - s.top) / s.sum * everywhere[c];
    mean = warp_sum(mean) + at_label;
    for (int c = lane; c < C; c += 32) {
      const float share = expf(to_float(x[c]) - s.top) / s.sum;
      d[c] = from_float<T>(share * (everywhere[c] + (g - mean)) + (c == k ? at_label - g : 0.0f));
    }
  }
}

__device__ __forceinline__ double class_loss_of(const double* s, float dice) {
  return (s[ops::class_weight] > 0 ? s[ops::class_nll] / s[ops::class_weight] : 0.0) +
         dice * s[ops::class_dice];
}

__global__ void class_summary_kernel(const double* main, const double* aux, float dice, float scale,
                                     int n, float* losses, float* terms) {
  const double of_main = class_loss_of(main, dice),
               of_aux = aux != nullptr ? class_loss_of(aux, dice) : 0;
  for (int i = 0; i < n; ++i) losses[i] = static_cast<float>(of_main + scale * of_aux);
  const double right =
      main[ops::class_labelled] > 0 ? main[ops::class_right] / main[ops::class_labelled] : 0.0;
  *terms++ = static_cast<float>(n * right);
  *terms++ = static_cast<float>(n * of_main);
  if (aux != nullptr) *terms++ = static_cast<float>(n * of_aux);
  if (dice != 0.0f) *terms = static_cast<float>(n * main[ops::class_dice]);
}

// Positions of a block.
std::int64_t class_chunk(std::int64_t count, std::int64_t least) {
  constexpr std::int64_t most_blocks = 512;
  return std::max(least, (count + most_blocks - 1) / most_blocks);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void class_loss_forward(const Tensor& logits, const Tensor& labels, const Tensor& class_weights,
                        const ClassLoss& loss, Tensor& weights, Tensor& stats) {
  const std::int64_t count = labels.numel();
  const int C = static_cast<int>(logits.dim(-1)), columns = 2 + (loss.dice != 0 ? 3 * C : 0);
  WEFT_ASSERT(count > 0 && count < std::int64_t{1} << 31);  // class_bins are 32 bits
  const std::int64_t chunk = class_chunk(count, 4 * warps), blocks = (count + chunk - 1) / chunk;
  const Tensor partial = Tensor::empty({blocks, columns}, DType::f64);
  by_type(logits, [&]<class T>() {
    launch(class_losses_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(threads),
           static_cast<std::size_t>(warps * columns) * sizeof(double), data<T>(logits),
           data<std::uint8_t>(labels), C, columns, count, chunk, data<float>(weights),
           data<double>(partial));
  });
  launch(class_sums_kernel, dim3(1), dim3(threads), 0, data<double>(partial),
         static_cast<int>(blocks), C, columns, data<double>(stats));
  const bool hard = loss.ohem_thresh > 0;
  const Tensor edge = Tensor::empty({1}, DType::i32);
  auto* const edge_bits = reinterpret_cast<std::uint32_t*>(data<std::int32_t>(edge));
  if (hard)
    launch(class_edge_kernel, dim3(1), dim3(threads),
           (class_bins + 2) * sizeof(std::int32_t) + sizeof(std::int64_t), data<float>(weights),
           data<std::uint8_t>(labels), count, loss.ohem_min_kept, data<double>(stats), edge_bits);
  const std::int64_t share = class_chunk(count, threads), parts = (count + share - 1) / share;
  const Tensor sums = Tensor::empty({parts, 2}, DType::f64);
  launch(class_weights_kernel, dim3(static_cast<unsigned>(parts)), dim3(threads),
         2 * threads * sizeof(double), data<std::uint8_t>(labels), data<float>(class_weights), C,
         hard ? edge_bits : nullptr, hard ? -std::log(loss.ohem_thresh) : 0.0f, count, share,
         data<float>(weights), data<double>(sums));
  launch(class_weight_sums_kernel, dim3(1), dim3(32), 0, data<double>(sums),
         static_cast<int>(parts), data<double>(stats));
}

void class_loss_backward(const Tensor& logits, const Tensor& labels, const ClassLoss& loss,
                         const Tensor& weights, const Tensor& stats, float weight,
                         Tensor& dlogits) {
  const std::int64_t count = labels.numel(), chunk = class_chunk(count, 4 * warps);
  const int C = static_cast<int>(logits.dim(-1));
  by_type(logits, [&]<class T>() {
    launch(class_backward_kernel<T>, dim3(static_cast<unsigned>((count + chunk - 1) / chunk)),
           dim3(threads), static_cast<std::size_t>(2 * C) * sizeof(float), data<T>(logits),
           data<std::uint8_t>(labels), C, count, chunk, data<float>(weights), data<double>(stats),
           loss.dice, weight, data<T>(dlogits));
  });
}

void class_loss_summary(const Tensor& main, const Tensor& aux, float dice, float scale,
                        Tensor& losses, Tensor& terms) {
  launch(class_summary_kernel, dim3(1), dim3(1), 0, data<double>(main),
         aux.defined() ? data<double>(aux) : nullptr, dice, scale, static_cast<int>(losses.numel()),
         data<float>(losses), data<float>(terms));
}

}  // namespace weft::ops::cuda
