// CUDA side of ops/optimizer.h. CPU twin: src/ops/cpu/reduce.cpp; cases: tests/kernels/reduce.cpp.
//
// sum_of_squares: 4 bytes and one f64 multiplication and addition an element. A fixed number of
// blocks walks the tensor, each thread its own sums, added in fixed orders: the result depends on
// the length alone. Scratch: 8 KiB (Tensor::empty).
//
// checksum: 4 bytes and some ten integer operations a word: bound by memory, a millisecond for the
// weights of STDiT3-XL/2. Sums modulo 2^64 may be made in any order, so blocks add with one atomic
// each. Scratch: 8 bytes (Tensor::empty).
//
// sum_parts, convert_on_stream: bound by memory, beside whatever the compute stream does. Least
// bytes an element: sum_parts 2 R + 4 for R ranks in bf16, convert_on_stream 6. A thread holds 16
// bytes of each of four rows at a time; the order of the sum is that of the rows.
#include "ops/optimizer.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int sum_blocks = 1024;  // fixed: the order of the sum may not depend on the GPU

// The block's sum, in thread 0; `shared` holds a double a thread.
__device__ __forceinline__ double sum_of_block(double x, double* shared) {
  shared[threadIdx.x] = x;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  return shared[0];
}

template <int V>
__global__ void __launch_bounds__(threads)
    squares_kernel(const float* __restrict__ x, std::int64_t count, double* __restrict__ partial) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  const std::int64_t first = thread_index();
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = first; i < count / V; i += stride) {
    const Vec<float, V> v = load_vec<V>(x, i);
#pragma unroll
    for (int e = 0; e < V; ++e) sum += static_cast<double>(v.v[e]) * static_cast<double>(v.v[e]);
  }
  if (first < count % V) {
    const double last = static_cast<double>(x[count - 1 - first]);
    sum += last * last;
  }
  sum = sum_of_block(sum, shared_memory<double>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(threads)
    add_squares_kernel(const double* __restrict__ partial, int count, bool accumulate,
                       double* __restrict__ total) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += threads) sum += partial[i];
  sum = sum_of_block(sum, shared_memory<double>());
  if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}

__device__ __forceinline__ bool is_finite(double x) {
  return fabs(x) <= std::numeric_limits<double>::max();  // false for NaN
}

// A few thousand values at most: one block, microseconds.
__global__ void __launch_bounds__(threads)
    carry_kernel(const double* __restrict__ values, std::int64_t count,
                 double* __restrict__ total) {
  double odd = threadIdx.x == 0 && !is_finite(*total) ? 1 : 0;
  for (std::int64_t i = threadIdx.x; i < count; i += threads) odd += is_finite(values[i]) ? 0 : 1;
  odd = sum_of_block(odd, shared_memory<double>());
  if (threadIdx.x == 0) *total = odd == 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
}

// One block: all threads load in parallel, one adds in order, as on the CPU.
__global__ void add_sum_kernel(const float* x, std::int64_t count, double* total) {
  float* values = shared_memory<float>();
  double sum = threadIdx.x == 0 ? *total : 0.0;
  for (std::int64_t first = 0; first < count; first += threads) {
    if (first + threadIdx.x < count) values[threadIdx.x] = x[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < min(count - first, std::int64_t{threads}); ++i)
        sum += static_cast<double>(values[i]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = sum;
}

constexpr unsigned checksum_blocks = 1024;

__global__ void __launch_bounds__(threads)
    checksum_kernel(const std::uint32_t* __restrict__ words, std::int64_t count,
                    unsigned long long* __restrict__ total) {
  auto* sums = shared_memory<unsigned long long>();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  unsigned long long sum = 0;
#pragma unroll 4
  for (std::int64_t i = thread_index(); i < count; i += stride)
    sum += ops::checksum_mix(static_cast<std::uint64_t>(i), words[i]);
  sums[threadIdx.x] = sum;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(half)) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) atomicAdd(total, sums[0]);
}

__global__ void split_kernel(const unsigned long long* __restrict__ total,
                             double* __restrict__ halves) {
  halves[0] = static_cast<double>(*total & 0xffffffffull);
  halves[1] = static_cast<double>(*total >> 32);
}

constexpr int rows_at_once = 4;

template <int V, class T>
__global__ void __launch_bounds__(threads)
    sum_parts_kernel(const T* parts, float* sum, int ranks, std::int64_t count) {
  const std::int64_t at = thread_index();
  if (at * V >= count) return;
  float s[V] = {};
  for (int first = 0; first < ranks; first += rows_at_once) {
    Vec<T, V> x[rows_at_once];
#pragma unroll
    for (int k = 0; k < rows_at_once; ++k)
      if (first + k < ranks) x[k] = load_vec<V>(parts + (first + k) * count, at);
#pragma unroll
    for (int k = 0; k < rows_at_once; ++k) {
      if (first + k >= ranks) continue;
      float term[V];
      unpack(x[k], term);
      // Not 0 + x for the first: that would turn -0 into 0.
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] = first + k == 0 ? term[e] : s[e] + term[e];
    }
  }
  store_vec<V>(sum, at, pack<float, V>(s));
}

template <int V, class From, class To>
__global__ void __launch_bounds__(threads)
    convert_on_stream_kernel(const From* x, To* y, std::int64_t count) {
  const std::int64_t at = thread_index();
  if (at * V >= count) return;
  float f[V];
  unpack(load_vec<V>(x, at), f);
  store_vec<V>(y, at, pack<To, V>(f));
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void sum_of_squares(const Tensor& x, Tensor& sum, bool accumulate) {
  // As many blocks as there is work for, so that short tensors are not all start-up.
  const unsigned blocks =
      std::min<unsigned>(sum_blocks, std::max(1u, blocks_for(x.numel(), threads * 16)));
  const Tensor partial = Tensor::empty({blocks}, DType::f64);
  const std::size_t shared = threads * sizeof(double);
  const auto run = [&]<int V>() {
    launch(squares_kernel<V>, dim3(blocks), dim3(threads), shared, data<float>(x), x.numel(),
           data<double>(partial));
  };
  if (aligned<4>(x))
    run.operator()<4>();
  else
    run.operator()<1>();
  launch(add_squares_kernel, dim3(1), dim3(threads), shared, data<double>(partial),
         static_cast<int>(blocks), accumulate, data<double>(sum));
}

void carry_non_finite(const Tensor& values, Tensor& sum) {
  launch(carry_kernel, dim3(1), dim3(threads), threads * sizeof(double), data<double>(values),
         values.numel(), data<double>(sum));
}

void add_sum(const Tensor& x, Tensor& total) {
  launch(add_sum_kernel, dim3(1), dim3(threads), threads * sizeof(float), data<float>(x), x.numel(),
         data<double>(total));
}

void checksum(const Tensor& x, Tensor& sum) {
  WEFT_ASSERT(x.bytes() % 4 == 0);
  const auto count = static_cast<std::int64_t>(x.bytes() / 4);
  Tensor total = Tensor::empty({1}, DType::i64);
  CUDA_CHECK(cudaMemsetAsync(total.raw(), 0, total.bytes(), cuda_stream(Stream::compute)));
  const unsigned blocks = std::min(checksum_blocks, std::max(1u, blocks_for(count, threads * 16)));
  launch(checksum_kernel, dim3(blocks), dim3(threads), threads * sizeof(unsigned long long),
         static_cast<const std::uint32_t*>(x.raw()), count,
         static_cast<unsigned long long*>(total.raw()));
  launch(split_kernel, dim3(1), dim3(1), 0, static_cast<const unsigned long long*>(total.raw()),
         data<double>(sum));
}

void sum_parts(const Tensor& parts, Tensor& sum, Stream stream) {
  const int ranks = static_cast<int>(parts.dim(0));
  const std::int64_t count = sum.numel();
  WEFT_ASSERT(parts.numel() == ranks * count && sum.dtype() == DType::f32);
  by_type(parts, [&]<class T>() {
    by_width<Pack<T>::size>(
        count,
        [&]<int V>() {
          launch_on(stream, sum_parts_kernel<V, T>, dim3(blocks_for(count, threads * V)),
                    dim3(threads), 0, data<T>(parts), data<float>(sum), ranks, count);
        },
        parts, sum);
  });
}

void convert_on_stream(const Tensor& x, Tensor& y, Stream stream) {
  const std::int64_t count = x.numel();
  WEFT_ASSERT(y.numel() == count);
  by_types(x, y, [&]<class From, class To>() {
    by_width<8>(
        count,
        [&]<int V>() {
          launch_on(stream, convert_on_stream_kernel<V, From, To>,
                    dim3(blocks_for(count, threads * V)), dim3(threads), 0, data<From>(x),
                    data<To>(y), count);
        },
        x, y);
  });
}

}  // namespace weft::ops::cuda
