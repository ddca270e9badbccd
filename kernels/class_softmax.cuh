// Softmax over the classes of a position: a warp takes one, its lanes the classes.
#pragma once

#include "launch.cuh"

namespace weft::kernels {

// The greatest logit of a position, and the sum of exp(logit - greatest), to all lanes.
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
