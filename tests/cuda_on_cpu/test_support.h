// What the tests of the stand-in share: a stream, device arrays, launches.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cuda_runtime.h"
#include "emulation.h"

namespace stand_in_test {

#define EXPECT_CUDA(call) \
  EXPECT_EQ((call), cudaSuccess) << cudaGetErrorString(cudaPeekAtLastError())

template <class T>
class Array {
 public:
  explicit Array(std::size_t n) : n_(n) { EXPECT_CUDA(cudaMalloc(&p_, n * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    EXPECT_CUDA(cudaMemcpy(p_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { EXPECT_CUDA(cudaFree(p_)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* get() const { return p_; }
  // Waits for everything first.
  std::vector<T> read() const {
    EXPECT_CUDA(cudaDeviceSynchronize());
    std::vector<T> values(n_);
    EXPECT_CUDA(cudaMemcpy(values.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t n_;
  T* p_ = nullptr;
};

class Stream {
 public:
  Stream() { EXPECT_CUDA(cudaStreamCreateWithFlags(&s_, cudaStreamNonBlocking)); }
  ~Stream() { EXPECT_CUDA(cudaStreamDestroy(s_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return s_; }

 private:
  cudaStream_t s_ = nullptr;
};

template <class... P, class... A>
cudaError_t start(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                  std::size_t shared, A&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

}  // namespace stand_in_test
