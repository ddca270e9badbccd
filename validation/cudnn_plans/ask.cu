// What a GPU would run of each convolution, asked of cuDNN without a GPU: dry runs (dry_runs.cpp)
// call kernels/conv/conv.cu here, whose convolutions go to kernels/conv/convolution_cudnn.cu, which
// asks the library behind without_gpu.cpp. A line a convolution on standard output, tabs between:
// what it is, found, the engine's number, how many proposals were looked at, whether the engine
// works on tensor cores, bytes of workspace.
#include <dlfcn.h>

#include <set>

#include "conv/conv.cu"
// convolve() of that file is the library's answer; conv.cu calls the one below.
#define convolve convolve_by_cudnn
#include "conv/convolution_cudnn.cu"
#undef convolve

namespace weft {

cudaStream_t cuda_stream(Stream) { return nullptr; }

namespace kernels {
namespace {

std::int64_t& number(const char* name) {
  static void* const library = dlopen("libcudnn.so.9", RTLD_NOW);
  return *static_cast<std::int64_t*>(dlsym(library, name));
}

}  // namespace

bool convolve(const Convolution& c, const ConvolutionOperands& at) {
  static std::set<std::string> asked;
  number("weft_looked_at") = 0;
  const bool found = convolve_by_cudnn(c, at);
  if (asked.insert(describe(c)).second)
    fmt::print("{}\t{}\t{}\t{}\t{}\t{}\n", describe(c), found, number("weft_engine"),
               number("weft_looked_at"), number("weft_tensor_cores"), number("weft_workspace"));
  // Without an engine conv.cu tries again without bias and residual; there the dry run goes on.
  return found || !c.bias;
}

// What stands around the library computes nothing here.
void weights_to_library(const Tensor&, const WeightShape&, const Tensor&) {}
void weights_from_library(const Tensor&, const WeightShape&, const Tensor&, bool) {}
void phase_weights(const Tensor&, const PhaseWeights&, const Tensor&) {}
void phase_weights_backward(const Tensor&, const PhaseWeights&, const Tensor&, bool) {}
void join_phases(const Tensor&, const PhaseRows&, const Tensor&, const Tensor&, const Tensor&) {}
void split_phases(const Tensor&, const PhaseRows&, const Tensor&) {}
void add_behind(const Tensor&, const Tensor&, const Tensor&, std::int64_t, const Tensor&) {}
bool product_lt(const Product&, const Operands&) { return true; }
void product_plain(const Product&, const Operands&) {}
void column_sums(const Tensor&, std::int64_t, std::int64_t, float*, bool) {}
void round_vector(const float*, bf16*, std::int64_t) {}

}  // namespace kernels

namespace ops {
namespace cuda {

void linear_backward_input(const Tensor&, const Tensor&, Tensor&, bool) {}
void linear_backward_weight(const Tensor&, const Tensor&, Tensor&, Tensor&, bool) {}

}  // namespace cuda

// Dry runs for a GPU take the blocks that conv.cu does: here it takes them itself.
namespace cuda_plan {

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  cuda::conv_forward(x, w, bias, residual, conv, y);
}
void conv_backward_input(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx,
                         bool accumulate) {
  cuda::conv_backward_input(dy, w, conv, dx, accumulate);
}
void conv_backward_weight(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor& dbias,
                          bool accumulate) {
  cuda::conv_backward_weight(x, dy, conv, dw, dbias, accumulate);
}

}  // namespace cuda_plan
}  // namespace ops
}  // namespace weft
