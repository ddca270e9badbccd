// Layers whose norms are folded, against the formulas in f64, and whole networks, against the same
// with their norms.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "models/resnet/resnet.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

class ConvNetTest : public OpTest {
 protected:
  ConvNetTest() : net(table, "net.") {}

  // Values for all parameters, the same for the same name; variances are positive.
  void load(bool bf16_model = false) {
    table.allocate_for_inference(bf16_model);
    std::uint64_t seed = 0;
    for (const auto& p : table.all()) {
      std::vector<float> v;
      for (const double r : random_values(p->shape.numel(), ++seed, 0.5))
        v.push_back(static_cast<float>(p->name.ends_with("running_var") ? 0.3 + r * r : r));
      p->set(0, v);
      values[p->name] = v;
    }
  }
  const std::vector<float>& of(const std::string& name) { return values.at("net." + name); }

  // One pixel [1,1,1,1,C], for kernels of one pixel.
  static Tensor pixel(const std::vector<float>& v) {
    return Tensor::from_host(std::span<const float>(v), {1, 1, 1, 1, std::ssize(v)});
  }
  // W x of a row-major W with as many columns as x has elements.
  static std::vector<double> times(const std::vector<float>& W, const std::vector<float>& v) {
    std::vector<double> y(W.size() / v.size());
    for (std::size_t i = 0; i < W.size(); ++i)
      y[i / v.size()] += static_cast<double>(W[i]) * v[i % v.size()];
    return y;
  }
  void expect_near(const Tensor& got, const std::vector<double>& wanted, double tolerance = 1e-5) {
    ASSERT_EQ(got.numel(), std::ssize(wanted));
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_NEAR(got.span<float>()[i], wanted[i], tolerance) << i;
  }

  ParameterTable table;
  ConvNet net;
  std::map<std::string, std::vector<float>> values;
  const std::vector<float> x = {0.5f, -1.25f, 2.0f, 0.75f};
};

TEST_F(ConvNetTest, BatchNormWithABias) {
  const ConvLayer* conv = net.add("conv", "norm", 4, 3, ops::Conv::same(1), true);
  load();
  net.fold();
  std::vector<double> wanted = times(of("conv.weight"), x), rectified;
  for (std::size_t c = 0; c < 3; ++c) {
    wanted[c] += of("conv.bias")[c] - of("norm.running_mean")[c];
    wanted[c] *= of("norm.weight")[c] / std::sqrt(of("norm.running_var")[c] + 1e-5);
    wanted[c] += of("norm.bias")[c];
    rectified.push_back(wanted[c] < 0 ? 0.1 * wanted[c] : wanted[c]);
  }
  expect_near(convolve(*conv, pixel(x)), wanted);
  expect_near(convolve(*conv, pixel(x), 0.1f), rectified);
  // The residual is added before the leaky ReLU.
  for (std::size_t c = 0; c < 3; ++c) rectified[c] = std::max(0.0, wanted[c] - 0.25);
  expect_near(convolve(*conv, pixel(x), 0, pixel({-0.25f, -0.25f, -0.25f})), rectified);
}

TEST_F(ConvNetTest, SpectralNorm) {
  const ConvLayer* conv = net.add_spectral("conv", 4, 3, ops::Conv::same(1), true);
  load();
  net.fold();
  const std::vector<double> Wv = times(of("conv.weight_orig"), of("conv.weight_v"));
  double sigma = 0;
  for (std::size_t c = 0; c < 3; ++c) sigma += of("conv.weight_u")[c] * Wv[c];
  std::vector<double> wanted = times(of("conv.weight_orig"), x);
  for (std::size_t c = 0; c < 3; ++c) wanted[c] = wanted[c] / sigma + of("conv.bias")[c];
  expect_near(convolve(*conv, pixel(x)), wanted, 1e-5 / std::abs(sigma));
}

TEST_F(ConvNetTest, JoinedConvolutionsShareTheInput) {
  const ConvLayer* both = net.add_joined({"a", "b"}, 4, 16, ops::Conv::same(1), true);
  load();
  net.fold();
  std::vector<double> wanted;
  for (const std::string name : {"a", "b"}) {
    const std::vector<double> y = times(of(name + ".weight"), x);
    for (std::size_t c = 0; c < y.size(); ++c) wanted.push_back(y[c] + of(name + ".bias")[c]);
  }
  expect_near(convolve(*both, pixel(x)), wanted);
}

TEST_F(ConvNetTest, NormInFrontOfAConvolution) {
  const NormLayer* norm = net.add_norm("norm", 4);
  load();
  net.fold();
  std::vector<double> wanted;
  for (std::size_t c = 0; c < 4; ++c)
    wanted.push_back(std::max(0.0, (x[c] - of("norm.running_mean")[c]) * of("norm.weight")[c] /
                                           std::sqrt(of("norm.running_var")[c] + 1e-5) +
                                       of("norm.bias")[c]));
  Tensor y = pixel(x);
  normalise(*norm, y, true, y);
  expect_near(y, wanted);
}

TEST_F(ConvNetTest, NamesShapesAndWork) {
  ops::Conv through = ops::Conv::same(3);
  through.kt = 2;
  net.add("through", "", 4, 3, through);  // slices as channels
  net.axes = 3;
  net.add("volume", "", 4, 3, through);
  net.axes = 0;
  const ConvLayer* linear = net.add("linear", "", 4, 3, ops::Conv::same(1));
  EXPECT_EQ(table.find("net.through.weight")->shape, (Shape{3, 8, 3, 3}));
  EXPECT_EQ(table.find("net.volume.weight")->shape, (Shape{3, 4, 2, 3, 3}));
  EXPECT_EQ(table.find("net.linear.weight")->shape, (Shape{3, 4}));
  load();
  net.fold();
  const OperationCount count;
  convolve(*linear, pixel(x));
  EXPECT_EQ(count.total(), 24);
}

TEST_F(ConvNetTest, BrokenStatistics) {
  net.add("conv", "norm", 4, 3, ops::Conv::same(1));
  load();
  table.find("net.norm.running_var")->set(1, std::vector<float>{-0.5f});
  try {
    net.fold();
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), testing::HasSubstr("net.norm.running_var"));
  }
}

TEST_F(ConvNetTest, Bf16KeepsOneCopy) {
  const ConvLayer* conv = net.add("conv", "norm", 4, 3, ops::Conv::same(1));
  load(true);
  net.fold();
  EXPECT_EQ(conv->weight.dtype(), DType::bf16);
  EXPECT_EQ(conv->weight.raw(), table.find("net.conv.weight")->working.raw());
  EXPECT_FALSE(table.find("net.conv.weight")->value.defined());
  EXPECT_EQ(conv->bias.dtype(), DType::f32);
}

// Maps so large that a layer that is only run goes in bands: as convolution and norm one by one.
TEST_F(ConvNetTest, LargeMapsOnlyRun) {
  const ConvLayer *a = net.add("a", "norm_a", 4, 1024, ops::Conv::same(1)),
                  *b = net.add("b", "norm_b", 3, 1024, ops::Conv::same(1), true);
  load();
  const auto input = [&](std::int64_t channels, std::uint64_t seed) {
    const Shape s{1, 1, 65, 64, channels};
    return make_var(to_tensor(random_values(s.numel(), seed), s, DType::f32), false);
  };
  const Var in_a = input(4, 1), in_b = input(3, 2), residual = input(1024, 3);
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, table};
  nn::BatchNormGroup group;
  group.use_running = true;
  const auto expect_same = [&](const Var& got, const Var& wanted) {
    const auto g = got->value.span<float>(), w = wanted->value.span<float>();
    ASSERT_EQ(g.size(), w.size());
    double most = 0;
    for (std::size_t i = 0; i < g.size(); ++i) most = std::max<double>(most, std::abs(g[i] - w[i]));
    EXPECT_LT(most, 1e-5);
  };
  for (const Var& r : {Var(), residual})
    expect_same(conv_norm(c, in_a, *a, group, nn::Activation::relu, r),
                nn::batch_norm(c, convolve(c, in_a, *a), a->norm, group, nn::Activation::relu, r));
  expect_same(conv_norm_add(c, {in_a, a}, {in_b, b}, group),
              nn::batch_norm_add(c, {convolve(c, in_a, *a), &a->norm},
                                 {convolve(c, in_b, *b), &b->norm}, group, nn::Activation::relu));
}

// One description of a network, with its norms and folded: the same maps.
TEST(ResNetTest, FoldedGivesTheSameMaps) {
  const auto arena = Arena::reserve(std::size_t{64} << 20);
  const ArenaScope scope(*arena);
  ResNetShape bottlenecks, basic, averages;
  bottlenecks.blocks = {2, 1, 1, 1};
  bottlenecks.planes = 4;
  bottlenecks.stem = {8};
  basic = averages = bottlenecks;
  basic.bottleneck = false;
  basic.expansion = 1;
  basic.output_stride = 8;
  averages.clip = true;
  averages.stem = {8, 8};
  for (const ResNetShape& shape : {bottlenecks, basic, averages}) {
    ParameterTable table;
    ConvNet net(table, "");
    const ResNet network(net, shape);
    table.allocate_for_inference(false);
    std::uint64_t seed = 0;
    for (const auto& p : table.all()) {
      std::vector<float> v;
      for (const double r : random_values(p->shape.numel(), ++seed, 0.5))
        v.push_back(static_cast<float>(p->name.ends_with("running_var") ? 0.5 + r * r : r));
      p->set(0, v);
    }
    const Tensor image = to_tensor(random_values(64 * 64 * 3, 7), {1, 1, 64, 64, 3}, DType::f32);
    Tape tape(Tape::Mode::infer);
    nn::BatchNormGroup group;
    group.use_running = true;
    const std::vector<Var> wanted =
        network.forward({tape, table}, make_var(image, false), group, 0);
    net.fold();
    const std::vector<Tensor> got = network.forward(image);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t l = 0; l < got.size(); ++l) {
      const auto a = got[l].span<float>(), b = wanted[l]->value.span<float>();
      ASSERT_EQ(a.size(), b.size());
      float most = 0, difference = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::abs(b[i]));
        difference = std::max(difference, std::abs(a[i] - b[i]));
      }
      EXPECT_GT(most, 0.1f);
      EXPECT_LT(difference, 1e-5f * most);
    }
  }
}

}  // namespace
}  // namespace weft::test
