// What cuDNN refuses. Its convolutions are those of the cases of tests/kernels/conv.cpp and
// volume.cpp.
#include "cudnn.h"

#include "convolution.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

using emulation::ConvGraph;
using emulation::ConvPass;
using emulation::ConvTensor;

// Channels last.
ConvTensor tensor(std::vector<std::int64_t> sizes) {
  ConvTensor t;
  t.alignment = 4;
  t.sizes = sizes;
  t.strides.assign(sizes.size(), 1);
  std::int64_t step = sizes[1];
  for (std::size_t d = sizes.size() - 1; d >= 2; --d) {
    t.strides[d] = step;
    step *= sizes[d];
  }
  t.strides[0] = step;
  return t;
}

// Three dimensions: two zeros before time, rows and columns two apart, zeros behind them alone.
ConvGraph graph(ConvPass pass) {
  ConvGraph g;
  g.pass = pass;
  g.x = tensor({2, 3, 4, 5, 6});
  g.w = tensor({4, 3, 3, 3, 2});
  g.y = tensor({2, 4, 4, 2, 3});
  g.result = g.y;
  g.before = {2, 0, 0};
  g.after = {0, 1, 1};
  g.stride = {1, 2, 2};
  g.dilation = {1, 1, 1};
  return g;
}

TEST(Cudnn, SizesMustAgree) {
  ConvGraph g = graph(ConvPass::forward);
  g.after = {1, 1, 1};
  EXPECT_NE(emulation::fault_of(g), "");
  g = graph(ConvPass::forward);
  g.w = tensor({4, 2, 3, 3, 2});
  EXPECT_NE(emulation::fault_of(g), "");
}

TEST(Cudnn, DescriptorsAreCheckedWhenMadeFinal) {
  cudnnBackendDescriptor_t d = nullptr;
  cudnnBackendCreateDescriptor(CUDNN_BACKEND_TENSOR_DESCRIPTOR, &d);
  EXPECT_NE(cudnnBackendFinalize(d), CUDNN_STATUS_SUCCESS);  // nothing said
  std::int64_t there = 0;
  EXPECT_EQ(
      cudnnBackendGetAttribute(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &there, &there),
      CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  cudnnBackendDescriptor_t node = nullptr;
  cudnnBackendCreateDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, &node);
  EXPECT_EQ(cudnnBackendSetAttribute(node, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                     CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &d),
            CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  cudnnBackendDestroyDescriptor(node);
  cudnnBackendDestroyDescriptor(d);
}

}  // namespace
}  // namespace stand_in_test
