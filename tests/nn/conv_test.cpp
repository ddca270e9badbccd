// Gradients of the convolutional operations on the tape against differences of the same forward.
#include "nn/conv.h"

#include "fixture.h"

namespace weft::test {
namespace {

using ops::Conv;

class NnConvTest : public OpTest {
 protected:
  nn::ConvWeights add_conv(const std::string& name, const Shape& shape, bool bias = true) {
    nn::ConvWeights w;
    w.weight = &table_.add(name + ".weight", shape, Init{});
    if (bias) w.bias = &table_.add(name + ".bias", {shape[0]}, Init{});
    return w;
  }
  nn::NormWeights add_norm(const std::string& name, std::int64_t channels) {
    return {&table_.add(name + ".norm.weight", {channels}, Init{}),
            &table_.add(name + ".norm.bias", {channels}, Init{})};
  }

  using Function = std::function<Var(nn::Context, const Var&)>;
  // One forward and backward of `f` at `x`; then every parameter and x are held to their slopes.
  void check(const Function& f, const Tensor& x) {
    table_.allocate(1 << 16, false, true);
    randomise(table_, 3);
    std::fill_n(table_.grads().data<float>(), table_.grads().numel(), 7.0f);  // an earlier step's
    table_.begin_step([](int) {});
    Tape tape;
    const Var in = make_var(x);
    const Var out = f({tape, table_}, in);
    const Vec g = random_values(out->value.numel(), 77);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    table_.finish_step();
    const auto loss = [&] {
      Tape again(Tape::Mode::infer);
      return against(f({again, table_}, make_var(x))->value, g);
    };
    expect_parameter_slopes(table_, loss, 2e-3);
    ASSERT_EQ(in->grad.shape(), x.shape());
    expect_slope("x", x, to_values(in->grad), loss, 2e-3);
  }

  ParameterTable table_;
};

// A residual block with a shortcut, down and up again; x is used twice, and the residual is a value
// used elsewhere.
TEST_F(NnConvTest, ResidualBlockDownAndUp) {
  const nn::ConvWeights first = add_conv("first", {8, 4, 3, 3}),
                        second = add_conv("second", {8, 8, 3, 3}),
                        shortcut = add_conv("shortcut", {8, 4, 1, 1}),
                        down = add_conv("down", {8, 8, 3, 3}), up = add_conv("up", {8, 8, 3, 3});
  const nn::NormWeights norm1 = add_norm("1", 4), norm2 = add_norm("2", 8);
  check(
      [&](nn::Context c, const Var& x) {
        const Var h =
            nn::conv(c, nn::group_norm(c, x, norm1, 2, 1e-6f, true), first, Conv::same(3));
        const Var y = nn::conv(c, nn::group_norm(c, h, norm2, 4, 1e-6f, true), second,
                               Conv::same(3), nn::conv(c, x, shortcut, Conv::same(1)));
        return nn::conv(c, nn::conv(c, y, down, Conv::down()), up, Conv::up(), y);
      },
      to_tensor(random_values(2 * 4 * 6 * 4, 1), {2, 1, 4, 6, 4}));
}

TEST_F(NnConvTest, CausalWithDepthToTime) {
  const nn::ConvWeights half = add_conv("half", {6, 4, 3, 3, 3}),
                        grow = add_conv("grow", {8, 6, 3, 3, 3}, false);
  check(
      [&](nn::Context c, const Var& x) {
        const Var h = nn::conv(c, nn::channels_last(c, x), half, Conv::causal(3, 2));
        return nn::channels_first(c, nn::depth_to_time(c, nn::conv(c, h, grow, Conv::causal(3))));
      },
      to_tensor(random_values(4 * 4 * 3 * 5, 1), {1, 4, 4, 3, 5}));
}

TEST_F(NnConvTest, WideAttention) {
  const nn::ConvWeights qkv = add_conv("qkv", {24, 8, 1, 1});
  check(
      [&](nn::Context c, const Var& x) {
        return nn::wide_attention(c,
                                  nn::view(c, nn::conv(c, x, qkv, Conv::same(1)), {2, 12, 3, 8}));
      },
      to_tensor(random_values(2 * 12 * 8, 1), {2, 1, 3, 4, 8}));
}

// The backward meets the weight without its bias first.
TEST_F(NnConvTest, WeightUsedAlsoWithoutItsBias) {
  const nn::ConvWeights both = add_conv("both", {4, 4, 3, 3}), alone{both.weight, nullptr};
  check(
      [&](nn::Context c, const Var& x) {
        return nn::conv(c, nn::conv(c, x, both, Conv::same(3)), alone, Conv::same(3));
      },
      to_tensor(random_values(2 * 4 * 5 * 4, 1), {2, 1, 4, 5, 4}));
}

// Weights that do not learn get no gradient; the input's still comes through.
TEST_F(NnConvTest, FrozenWeights) {
  nn::ConvWeights w;
  w.weight = &table_.add("w.weight", {6, 4, 3, 3}, Init{}, false);
  w.bias = &table_.add("w.bias", {6}, Init{}, false);
  const nn::NormWeights norm{&table_.add("norm.weight", {6}, Init{}, false),
                             &table_.add("norm.bias", {6}, Init{}, false)};
  check(
      [&](nn::Context c, const Var& x) {
        return nn::group_norm(c, nn::conv(c, x, w, Conv::same(3)), norm, 3, 1e-6f, true);
      },
      to_tensor(random_values(2 * 4 * 5 * 4, 1), {2, 1, 4, 5, 4}));
  EXPECT_FALSE(w.weight->grad.defined());
}

}  // namespace
}  // namespace weft::test
