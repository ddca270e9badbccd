// Elementary functions of several kernels, by the GPU's own approximations; the softmax of classes.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"

namespace weft::kernels {

constexpr float log2_e = 1.44269504088896341f;

// 1 / (1 + e^-x), approximate.
__device__ __forceinline__ float sigmoid(float x) {
  return rcp_approx(1.0f + exp2_approx(-log2_e * x));
}

// The greatest logit of a position's classes and the sum of exp(logit - greatest), made by a warp,
// to all lanes.
struct Softmax {
  float top, sum;
  template <class T>
  __device__ __forceinline__ Softmax(const T* x, int C) {
    const int lane = threadIdx.x % 32;
    top = -INFINITY;
    for (int c = lane; c < C; c += 32) top = fmaxf(top, to_float(x[c]));
    top = warp_max(top);
    sum = 0.0f;
    for (int c = lane; c < C; c += 32) sum += expf(to_float(x[c]) - top);
    sum = warp_sum(sum);
  }
};

}  // namespace weft::kernels
