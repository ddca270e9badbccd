// Deformable convolution against torchvision's numbers, and its gradients against differences of
// its own forward. The operations themselves are held to fp64 formulas by tests/ops/cases_test.cpp.
#include "nn/conv.h"

#include "fixture.h"
#include "ops/pointwise.h"
#include "pattern.h"

namespace weft::test {
namespace {

constexpr std::int64_t N = 2, H = 9, W = 8, C = 6, out = 5;

struct Geometry {
  int stride = 1, dilation = 1;
  // y, dx, doffsets and dweight times fixed numbers (validation/test_numbers.py).
  double y = 0, dx = 0, doffsets = 0, dweight = 0;
};

struct Layer {
  ParameterTable table;
  nn::ConvWeights weights;
  ops::Conv conv;
  Tensor x, offsets;

  explicit Layer(const Geometry& g, DType dtype = DType::f32, bool trainable = true)
      : conv(ops::Conv::strided(3, g.stride, g.dilation)) {
    weights.weight = &table.add("conv2.weight", {out, C, 3, 3}, Init{}, trainable);
    table.allocate(1 << 12, dtype == DType::bf16, true);
    const Vec w = rounded(pattern(weights.weight->shape.numel(), 3, 0.3), dtype);
    for (std::size_t i = 0; i < w.size(); ++i)
      weights.weight->value.data<float>()[i] = static_cast<float>(w[i]);
    table.refresh_working();
    const Shape in{N, 1, H, W, C}, to = conv.output(in, 27);
    x = to_tensor(pattern(in.numel(), 1), in, dtype);
    offsets = to_tensor(pattern(to.numel(), 2, 2.5), to, dtype);
  }
  // The same values in f32.
  void widen() {
    x = to_tensor(to_values(x), x.shape());
    offsets = to_tensor(to_values(offsets), offsets.shape());
  }
  Var run(Tape& tape, const Var& at_x, const Var& at_offsets) {
    return nn::deform_conv({tape, table}, at_x, at_offsets, weights, conv);
  }
  Tensor infer() {
    Tape tape(Tape::Mode::infer);
    return run(tape, make_var(x), make_var(offsets))->value;
  }
  // Forward and backward from pattern 4, as often as asked.
  void learn(const Var& at_x, const Var& at_offsets, int times = 1) {
    if (weights.weight->trainable)  // an earlier step's
      std::fill_n(table.grads().data<float>(), table.grads().numel(), 7.0f);
    table.begin_step([](int) {});
    Tape tape;
    std::vector<Var> results;
    for (int i = 0; i < times; ++i) results.push_back(run(tape, at_x, at_offsets));
    for (const Var& y : results)
      y->grad = to_tensor(pattern(y->value.numel(), 4), y->value.shape(), y->value.dtype());
    tape.backward();
    table.finish_step();
  }
};

double product(const Tensor& t, double k) { return dot(to_values(t), pattern(t.numel(), k)); }

class DeformConvTest : public OpTest {
 protected:
  // 7 pixels a band, which ends in the midst of rows, and a frame at a time in the backward.
  DeformConvTest() { nn::deform_scratch = 7 * 9 * 64 * 4; }
  ~DeformConvTest() override { nn::deform_scratch = usual_; }

  const std::int64_t usual_ = nn::deform_scratch;
};

TEST_F(DeformConvTest, NumbersOfTorchvision) {
  for (const Geometry& g :
       {Geometry{1, 1, 7.6084317856, 1.2827045361, -10.9859574110, 2.2165460407},
        {2, 1, 3.6515999956, 3.9834647591, 9.1350893247, -1.8257375330},
        {1, 2, -2.6912802193, -1.3652695951, 3.8549705514, -15.9119811011}}) {
    Layer layer(g);
    const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
    layer.learn(x, offsets);
    EXPECT_NEAR(product(layer.infer(), 4), g.y, 1e-4);
    EXPECT_NEAR(product(x->grad, 5), g.dx, 1e-4);
    EXPECT_NEAR(product(offsets->grad, 6), g.doffsets, 1e-4);
    EXPECT_NEAR(product(layer.weights.weight->grad, 7), g.dweight, 1e-4);
  }
}

// Gradients of everything, twice: the second adds to what is there.
TEST_F(DeformConvTest, BackwardIsItsSlope) {
  Layer layer({2, 1});
  // Places far enough from the pixels' lines, where the slope jumps.
  const Vec steps = pattern(layer.offsets.numel(), 2, 2.0),
            shares = pattern(layer.offsets.numel(), 8, 0.25);
  for (std::size_t i = 0; i < steps.size(); ++i)
    layer.offsets.data<float>()[i] = static_cast<float>(std::round(steps[i]) + 0.5 + shares[i]);
  const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
  layer.learn(x, offsets, 2);
  const auto halved = [](const Tensor& t) {
    Vec v = to_values(t);
    for (double& value : v) value /= 2;
    return v;
  };
  const auto loss = [&] { return product(layer.infer(), 4); };
  Tensor& weight = layer.weights.weight->value;
  expect_slope("weight", weight, halved(layer.weights.weight->grad), loss, 2e-3);
  expect_slope("x", layer.x, halved(x->grad), loss, 2e-3);
  expect_slope("offsets", layer.offsets, halved(offsets->grad), loss, 2e-3);
}

// What is done at a time changes the order of f32 sums of the weight's gradient alone; bf16's
// values are those of f32 at the same inputs, but for rounding.
TEST_F(DeformConvTest, BandsAndTypes) {
  const auto results = [&](Layer&& layer, std::int64_t scratch) {
    nn::deform_scratch = scratch;
    const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
    layer.learn(x, offsets);
    return std::vector<Vec>{to_values(layer.infer()), to_values(x->grad), to_values(offsets->grad),
                            to_values(layer.weights.weight->grad)};
  };
  constexpr std::int64_t five = 5 * 9 * 64 * 4;
  const auto whole = results(Layer({}), usual_), bands = results(Layer({}), five);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(whole[i], bands[i]) << i;
  EXPECT_LT(relative_error(bands[3], whole[3]), 1e-6);
  Layer rounded_inputs({}, DType::bf16);
  rounded_inputs.widen();
  const auto narrow = results(Layer({}, DType::bf16), five),
             wide = results(std::move(rounded_inputs), usual_);
  for (std::size_t i = 0; i < narrow.size(); ++i)
    EXPECT_LT(relative_error(narrow[i], wide[i]), 2 * tolerance(DType::bf16)) << i;
}

// Offsets of 0 and logits of 0: half of the ordinary convolution.
TEST_F(DeformConvTest, WithoutOffsetsIsHalfAConvolution) {
  Layer layer({2, 1});
  std::fill_n(layer.offsets.data<float>(), layer.offsets.numel(), 0.0f);
  Tape tape(Tape::Mode::infer);
  const Var y = nn::conv({tape, layer.table}, make_var(layer.x), layer.weights, layer.conv);
  Vec half = to_values(y->value);
  for (double& v : half) v /= 2;
  EXPECT_LT(relative_error(to_values(layer.infer()), half), 1e-6);
}

TEST_F(DeformConvTest, FrozenParts) {
  Layer fixed({1, 1}, DType::f32, false), layer({1, 1});
  const Var x = make_var(fixed.x), offsets = make_var(fixed.offsets);
  fixed.learn(x, offsets);
  EXPECT_FALSE(fixed.weights.weight->grad.defined());
  for (const bool of_x : {false, true}) {
    const Var own_x = make_var(layer.x, of_x), own_offsets = make_var(layer.offsets, !of_x);
    layer.learn(own_x, own_offsets);
    EXPECT_EQ(own_x->grad.defined(), of_x);
    EXPECT_EQ(own_offsets->grad.defined(), !of_x);
    EXPECT_TRUE(of_x ? same_bits(own_x->grad, x->grad)
                     : same_bits(own_offsets->grad, offsets->grad));
  }
}

// A dry run takes the memory of the run.
TEST_F(DeformConvTest, PlannedPeakIsReal) {
  Layer layer({1, 1});
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    const Var x = make_var(Tensor::empty(layer.x.shape(), DType::f32)),
              offsets = make_var(Tensor::empty(layer.offsets.shape(), DType::f32));
    if (!arena.is_planning()) {
      ops::fill_zero(x->value);
      ops::fill_zero(offsets->value);
    }
    layer.table.begin_step([](int) {});
    Tape tape;
    const Var y = layer.run(tape, x, offsets);
    y->grad = Tensor::empty(y->value.shape(), DType::f32);
    tape.backward();
    layer.table.finish_step();
    return arena.peak();
  };
  const auto planning = Arena::planning();
  const auto real = Arena::reserve(std::size_t{1} << 28);
  EXPECT_EQ(peak(*planning), peak(*real));
}

}  // namespace
}  // namespace weft::test
