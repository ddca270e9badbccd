// cuDNN's convolutions from the inside: what a graph's descriptors say (cudnn_calls.cpp) and what
// it computes (convolution.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cudnn.h"

namespace emulation {

// A tensor as the library counts: samples, channels, then the dimensions of space; any strides.
struct ConvTensor {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::int64_t id = 0, alignment = 0;
  bool is_virtual = false;
  std::vector<std::int64_t> sizes, strides;

  std::int64_t numel() const;
  std::int64_t extent() const;  // bytes from the first element to behind the last
};

enum class ConvPass { forward, backward_data, backward_filter };

struct ConvGraph {
  ConvPass pass = ConvPass::forward;
  ConvTensor x, w, y;  // y: what the convolution gives, virtual where something is added
  std::vector<std::int64_t> before, after, stride, dilation;
  double alpha = 1, beta = 0;
  std::int64_t groups() const { return x.sizes[1] / w.sizes[1]; }
  std::vector<ConvTensor> added;  // residual, bias
  ConvTensor result;              // what is stored in the end
  bool rounds_inputs = false;     // f32 to TF32
  float noise = 0;                // relative, of an engine that does not repeat its bits
};

// Empty, or what is wrong with the sizes.
std::string fault_of(const ConvGraph& g);

// `added` in the graph's order.
void convolve(const ConvGraph& g, void* x, void* w, void* y, const std::vector<void*>& added);

}  // namespace emulation
