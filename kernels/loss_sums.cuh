// Sums of losses in two stages, of an order that the shape alone decides: f32 within a block's
// chunk, f64 over the blocks (loss.cu, loss_lpips.cu).
#pragma once

#include <algorithm>

#include "vector.cuh"

namespace weft::kernels {

constexpr std::int64_t most_blocks = 1024, least_items = 2048;

// partial[block] = the sum of f(i) over the block's chunk of `count` items.
template <class F>
__global__ void __launch_bounds__(threads)
    sum_kernel(F f, std::int64_t count, std::int64_t chunk, float* partial) {
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  float sum = 0.0f;
  for (std::int64_t i = first + threadIdx.x; i < last; i += threads) sum += f(i);
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The same where F::lanes lanes take an item: each returns its share of f(i).
template <class F>
__global__ void __launch_bounds__(threads)
    sum_by_groups_kernel(F f, std::int64_t count, std::int64_t chunk, float* partial) {
  constexpr int of_warp = 32 / F::lanes;
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  float sum = 0.0f;
  // A warp stays together: f shuffles.
  for (std::int64_t base = first + threadIdx.x / 32 * of_warp; base < last;
       base += warps * of_warp) {
    const std::int64_t i = base + threadIdx.x % 32 / F::lanes;
    const float share = f(i < last ? i : last - 1);
    if (i < last) sum += share;
  }
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The sum of n numbers in f64, by one warp, to all lanes.
__device__ __forceinline__ double total_of(const float* partial, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += 32) sum += partial[i];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(full_mask, sum, offset);
  return sum;
}
static __global__ void add_total_kernel(const float* partial, std::int64_t n, double factor,
                                        float* loss) {
  const double sum = total_of(partial, n);
  if (threadIdx.x == 0) loss[0] += static_cast<float>(factor * sum);
}

// The chunks' sums of f over `count` items.
template <bool by_groups, class F>
Tensor partial_sums(const F& f, std::int64_t count, std::int64_t items) {
  const std::int64_t chunk = std::max(items, (count + most_blocks - 1) / most_blocks);
  const std::int64_t blocks = std::max<std::int64_t>(1, (count + chunk - 1) / chunk);
  const Tensor partial = Tensor::empty({blocks}, DType::f32);
  const auto run = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 32 * sizeof(float), f, count,
           chunk, data<float>(partial));
  };
  if constexpr (by_groups)
    run(sum_by_groups_kernel<F>);
  else
    run(sum_kernel<F>);
  return partial;
}
template <bool by_groups, class F>
void add_loss_sum(const F& f, std::int64_t count, std::int64_t items, double factor, Tensor& loss) {
  const Tensor partial = partial_sums<by_groups>(f, count, items);
  launch(add_total_kernel, dim3(1), dim3(32), 0, data<float>(partial), partial.numel(), factor,
         data<float>(loss));
}

}  // namespace weft::kernels
