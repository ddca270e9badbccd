// Elementary functions of several kernels, by the GPU's own approximations.
#pragma once

#include "ptx.cuh"

namespace weft::kernels {

constexpr float log2_e = 1.44269504088896341f;

// 1 / (1 + e^-x), approximate.
__device__ __forceinline__ float sigmoid(float x) {
  return rcp_approx(1.0f + exp2_approx(-log2_e * x));
}

}  // namespace weft::kernels
