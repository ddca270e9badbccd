// Tangents against differences of the values, and the gradients of both against differences of
// both.
#include "nn/conv.h"

#include "fixture.h"

namespace weft::test {
namespace {

class DualTest : public OpTest {
 protected:
  DualTest() {
    const auto add = [&](const std::string& name, const Shape& shape) {
      return &table_.add(name, shape, Init{});
    };
    // Without a bias, which a norm would take out again.
    first_ = {add("first.weight", {6, 3, 4, 4}), nullptr};
    norm_ = {add("norm.weight", {6}), add("norm.bias", {6})};
    last_ = {add("last.weight", {2, 6, 3, 3}), add("last.bias", {2})};
    table_.allocate(1 << 16, false, true);
    randomise(table_, 3);
  }

  // Smooth: differences mean nothing across a kink.
  nn::Dual layers(Tape& tape, const Tensor& x, const Tensor& along) {
    const nn::Context c{tape, table_};
    ops::Conv half = ops::Conv::same(4);
    half.stride = 2;
    half.top = half.left = half.bottom = half.right = 1;
    in_ = {make_var(x), make_var(along)};
    const nn::Dual h = nn::batch_norm(c, nn::conv(c, in_, first_, half), norm_, 1e-5f);
    return nn::conv(c, h, last_, ops::Conv::same(3));
  }

  const Shape shape_{1, 2, 8, 6, 3};
  Tensor x_ = to_tensor(random_values(shape_.numel(), 1), shape_);
  Tensor along_ = to_tensor(random_values(shape_.numel(), 2), shape_);
  ParameterTable table_;
  nn::ConvWeights first_, last_;
  nn::NormWeights norm_;
  nn::Dual in_;
};

TEST_F(DualTest, TangentIsTheSlope) {
  Tape tape(Tape::Mode::infer);
  const nn::Dual y = layers(tape, x_, along_);
  const Vec g = random_values(y.value->value.numel(), 5), x = to_values(x_), v = to_values(along_);
  const double measured = slope([&](double step) {
    Vec moved = x;
    for (std::size_t i = 0; i < x.size(); ++i) moved[i] += step * v[i];
    return against(layers(tape, to_tensor(moved, shape_), along_).value->value, g);
  });
  EXPECT_NEAR(against(y.tangent->value, g) / measured, 1, 1e-3);
}

TEST_F(DualTest, GradientsOfValuesAndTangents) {
  table_.begin_step([](int) {});
  Tape tape;
  const nn::Dual y = layers(tape, x_, along_), in = in_;
  const Shape out = y.value->value.shape();
  const Vec g = random_values(out.numel(), 5, 0.3), gt = random_values(out.numel(), 6);
  y.value->grad = to_tensor(g, out);
  y.tangent->grad = to_tensor(gt, out);
  tape.backward();
  table_.finish_step();
  const auto loss = [&] {
    Tape again(Tape::Mode::infer);
    const nn::Dual z = layers(again, x_, along_);
    return against(z.value->value, g) + against(z.tangent->value, gt);
  };
  expect_parameter_slopes(table_, loss, 2e-3);
  expect_slope("x", x_, to_values(in.value->grad), loss, 2e-3);
  expect_slope("along", along_, to_values(in.tangent->grad), loss, 2e-3);
}

TEST_F(DualTest, TangentsPassWhereValuesDo) {
  const Vec x{-2, -1, 1, 2}, v{1, 2, 3, 4};
  Tape tape;
  const nn::Dual in{make_var(to_tensor(x, {4})), make_var(to_tensor(v, {4}))};
  const nn::Dual y = nn::leaky_relu({tape, table_}, in, 0.5f);
  EXPECT_EQ(to_values(y.value->value), (Vec{-1, -0.5, 1, 2}));
  EXPECT_EQ(to_values(y.tangent->value), (Vec{0.5, 1, 3, 4}));
  y.value->grad = to_tensor({1, 1, 1, 1}, {4});
  y.tangent->grad = to_tensor({4, 4, 4, 4}, {4});
  tape.backward();
  EXPECT_EQ(to_values(in.value->grad), (Vec{0.5, 0.5, 1, 1}));
  EXPECT_EQ(to_values(in.tangent->grad), (Vec{2, 2, 4, 4}));
}

}  // namespace
}  // namespace weft::test
