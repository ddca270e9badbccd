// CUDA side of ops/checksum.h. CPU twin: src/ops/cpu/checksum.cpp; cases: src/bench/kernels/optimizer.cpp. Not yet run
// on a GPU.
//
// 4 bytes and some ten integer operations a word: bound by memory, a millisecond for the weights of STDiT3-XL/2. Sums
// modulo 2^64 may be made in any order, so blocks add with one atomic each. Scratch: 8 bytes (Tensor::empty).
#include "ops/checksum.h"

#include <algorithm>

#include "core/error.h"
#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;
constexpr unsigned most_blocks = 1024;

__global__ void __launch_bounds__(threads)
    checksum_kernel(const std::uint32_t* __restrict__ words, std::int64_t count,
                    unsigned long long* __restrict__ total) {
  auto* sums = shared_memory<unsigned long long>();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  unsigned long long sum = 0;
#pragma unroll 4
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count;
       i += stride)
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

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void checksum(const Tensor& x, Tensor& sum) {
  WEFT_ASSERT(x.bytes() % 4 == 0);
  const auto count = static_cast<std::int64_t>(x.bytes() / 4);
  Tensor total = Tensor::empty({1}, DType::i64);
  CUDA_CHECK(cudaMemsetAsync(total.raw(), 0, total.bytes(), cuda_stream(Stream::compute)));
  const unsigned blocks = std::min(most_blocks, std::max(1u, blocks_for(count, threads * 16)));
  launch(checksum_kernel, dim3(blocks), dim3(threads), threads * sizeof(unsigned long long),
         static_cast<const std::uint32_t*>(x.raw()), count,
         static_cast<unsigned long long*>(total.raw()));
  launch(split_kernel, dim3(1), dim3(1), 0, static_cast<const unsigned long long*>(total.raw()),
         data<double>(sum));
}

}  // namespace weft::ops::cuda
