// One convolution of cuDNN's, channels-last, with whatever the library fuses to it
// (convolution_cudnn.cu). conv.cu makes the operations of ops/conv.h of these.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>

#include "tensor/dtype.h"

namespace weft::kernels {

enum class Pass { forward, backward_input, backward_weight };

// x [N,(T,)H,W,Cin], w [Cout,(kt,)kh,kw,Cin/groups], y [N,(To,)Ho,Wo,Cout], all of one type, in
// memory in this order. Zeros before and after a dimension may differ in number. Accumulates in
// f32; f32 operands are rounded to TF32 where tensor/device.h allows that, else not at all.
struct Convolution {
  Pass pass = Pass::forward;
  DType type = DType::f32;
  int spatial = 2;  // dimensions: (T,)H,W
  std::int64_t samples = 0, in_channels = 0, out_channels = 0;
  std::array<std::int64_t, 3> in{}, kernel{}, out{}, before{}, after{}, stride{},
      dilation{1, 1, 1};  // the last are W's
  std::int64_t groups = 1;
  bool bias = false;        // forward: + bias [Cout] of `type`
  bool residual = false;    // and + residual of y's shape, which must not be y; only with a bias
  bool accumulate = false;  // backward_input: added to what is there
  auto operator<=>(const Convolution&) const = default;
};

// "forward bf16 x [4,64,64,128] w [128,3,3,128] stride [1,1] pad [1,1]-[1,1] bias": for messages.
std::string describe(const Convolution& c);

// Device addresses; x, w or y is written, by the pass.
struct ConvolutionOperands {
  const void *x, *w, *y;
  const void *bias = nullptr, *residual = nullptr;
};

// False where the library has no deterministic engine for it within the limit of its workspace;
// then nothing has happened. Throws Exit::usage where there is no cuDNN.
bool convolve(const Convolution& c, const ConvolutionOperands& at);

}  // namespace weft::kernels
