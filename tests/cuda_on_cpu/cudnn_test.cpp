// cuDNN's convolutions on the stand-in: against plain loops in double, backward as the adjoint of
// forward, and what the library refuses.
#include "cudnn.h"

#include "convolution.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

using emulation::ConvGraph;
using emulation::ConvPass;
using emulation::ConvTensor;

// Small multiples of 1/8: sums of their products are exact.
float value(std::int64_t i) { return static_cast<float>(i * 29 % 31 - 15) / 8.0f; }
std::vector<float> values(std::int64_t count, std::int64_t first) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < count; ++i) v.push_back(value(i + first));
  return v;
}

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

double forward_at(const ConvGraph& g, const std::vector<float>& x, const std::vector<float>& w,
                  std::int64_t n, std::int64_t o, std::int64_t t, std::int64_t r, std::int64_t c) {
  double sum = 0;
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t kt = 0; kt < 3; ++kt)
      for (std::int64_t kr = 0; kr < 3; ++kr)
        for (std::int64_t kc = 0; kc < 2; ++kc) {
          const std::int64_t xt = t + kt - 2, xr = 2 * r + kr, xc = 2 * c + kc;
          if (xt < 0 || xr >= 5 || xc >= 6) continue;
          sum += static_cast<double>(
                     x[static_cast<std::size_t>((((n * 4 + xt) * 5 + xr) * 6 + xc) * 3 + i)]) *
                 w[static_cast<std::size_t>((((o * 3 + kt) * 3 + kr) * 2 + kc) * 3 + i)];
        }
  return sum;
}

double inner(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

TEST(Cudnn, ForwardAgainstLoops) {
  const ConvGraph g = graph(ConvPass::forward);
  ASSERT_EQ(emulation::fault_of(g), "");
  std::vector<float> x = values(g.x.numel(), 0), w = values(g.w.numel(), 500),
                     y(static_cast<std::size_t>(g.y.numel()));
  emulation::convolve(g, x.data(), w.data(), y.data(), {});
  std::size_t at = 0;
  for (std::int64_t n = 0; n < 2; ++n)
    for (std::int64_t t = 0; t < 4; ++t)
      for (std::int64_t r = 0; r < 2; ++r)
        for (std::int64_t c = 0; c < 3; ++c)
          for (std::int64_t o = 0; o < 4; ++o)
            EXPECT_EQ(y[at++], static_cast<float>(forward_at(g, x, w, n, o, t, r, c)));
}

TEST(Cudnn, BackwardIsTheAdjoint) {
  std::vector<float> x = values(2 * 3 * 4 * 5 * 6, 0), w = values(4 * 3 * 3 * 3 * 2, 500),
                     dy = values(2 * 4 * 4 * 2 * 3, 900), y(dy.size()), dx(x.size()), dw(w.size());
  emulation::convolve(graph(ConvPass::forward), x.data(), w.data(), y.data(), {});
  emulation::convolve(graph(ConvPass::backward_data), dx.data(), w.data(), dy.data(), {});
  emulation::convolve(graph(ConvPass::backward_filter), x.data(), dw.data(), dy.data(), {});
  EXPECT_DOUBLE_EQ(inner(dx, x), inner(dy, y));
  EXPECT_DOUBLE_EQ(inner(dw, w), inner(dy, y));
}

// Two groups of two channels, of one output channel each; a kernel of one row and two columns, two
// apart.
TEST(Cudnn, GroupsAndDilation) {
  ConvGraph g;
  g.x = tensor({1, 4, 1, 5});
  g.w = tensor({2, 2, 1, 2});
  g.y = g.result = tensor({1, 2, 1, 3});
  g.before = g.after = {0, 0};
  g.stride = {1, 1};
  g.dilation = {1, 2};
  ASSERT_EQ(emulation::fault_of(g), "");
  std::vector<float> x = values(20, 0), w = values(8, 500), y(6), dy = values(6, 900), dx(20),
                     dw(8);
  emulation::convolve(g, x.data(), w.data(), y.data(), {});
  for (std::size_t p = 0; p < 3; ++p)
    for (std::size_t o = 0; o < 2; ++o) {
      double sum = 0;
      for (std::size_t k = 0; k < 2; ++k)
        for (std::size_t i = 0; i < 2; ++i)
          sum += static_cast<double>(x[(p + 2 * k) * 4 + 2 * o + i]) * w[(o * 2 + k) * 2 + i];
      EXPECT_EQ(y[p * 2 + o], static_cast<float>(sum));
    }
  g.pass = ConvPass::backward_data;
  emulation::convolve(g, dx.data(), w.data(), dy.data(), {});
  g.pass = ConvPass::backward_filter;
  emulation::convolve(g, x.data(), dw.data(), dy.data(), {});
  EXPECT_DOUBLE_EQ(inner(dx, x), inner(dy, y));
  EXPECT_DOUBLE_EQ(inner(dw, w), inner(dy, y));
}

TEST(Cudnn, AddsAndAccumulates) {
  ConvGraph g = graph(ConvPass::forward);
  std::vector<float> x = values(g.x.numel(), 0), w = values(g.w.numel(), 500),
                     plain(static_cast<std::size_t>(g.y.numel())), y = plain,
                     residual = values(g.y.numel(), 700), bias = values(4, 800);
  emulation::convolve(g, x.data(), w.data(), plain.data(), {});
  g.added = {g.y, tensor({1, 4, 1, 1, 1})};
  emulation::convolve(g, x.data(), w.data(), y.data(), {residual.data(), bias.data()});
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], plain[i] + residual[i] + bias[i % 4]);
  ConvGraph back = graph(ConvPass::backward_data);
  std::vector<float> once(x.size()), twice = values(g.x.numel(), 100);
  const std::vector<float> before = twice;
  emulation::convolve(back, once.data(), w.data(), residual.data(), {});
  back.beta = 1;
  emulation::convolve(back, twice.data(), w.data(), residual.data(), {});
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], before[i] + once[i]);
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
