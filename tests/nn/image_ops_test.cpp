// Gradients of the operations of image networks on the tape against differences of the same
// forward.
#include "nn/image_ops.h"

#include "fixture.h"

namespace weft::test {
namespace {

class ImageOpsTest : public OpTest {
 protected:
  using Function = std::function<Var(nn::Context, const std::vector<Var>&)>;
  // One forward and backward of `f` at values of the shapes; then each input is held to its slope.
  void check(const Function& f, const std::vector<Shape>& shapes, double scale = 1.0) {
    table_.allocate(1 << 16, false, true);
    std::vector<Tensor> at;
    for (const Shape& s : shapes)
      at.push_back(to_tensor(random_values(s.numel(), 10 + at.size(), scale), s));
    const auto inputs = [&] {
      std::vector<Var> vars;
      for (const Tensor& t : at) vars.push_back(make_var(t));
      return vars;
    };
    Tape tape;
    const std::vector<Var> in = inputs();
    const Var out = f({tape, table_}, in);
    const Vec g = random_values(out->value.numel(), 77);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    for (std::size_t i = 0; i < at.size(); ++i) {
      ASSERT_TRUE(in[i]->grad.defined()) << i;
      ASSERT_EQ(in[i]->grad.shape(), shapes[i]);
      expect_slope(
          "input " + std::to_string(i), at[i], to_values(in[i]->grad),
          [&] {
            Tape again(Tape::Mode::infer);
            return against(f({again, table_}, inputs())->value, g);
          },
          2e-3);
    }
  }

  ParameterTable table_;
};

// x is used three times: the gradients of its uses add up.
TEST_F(ImageOpsTest, PyramidWithDropout) {
  const Tensor keep = to_tensor(Vec{0, 1.25, 1.25, 0, 1.25, 0.5}, {2, 3});
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        std::vector<Var> pieces{in[0]};
        for (const int size : {1, 3})
          pieces.push_back(nn::resize_bilinear(c, nn::adaptive_average_pool(c, in[0], size), 5, 6));
        EXPECT_EQ(nn::resize_bilinear(c, in[0], 5, 6), in[0]);
        EXPECT_EQ(nn::scale_channels(c, in[0], Tensor()), in[0]);
        pieces.push_back(nn::scale_channels(c, in[0], keep));
        const Var all = nn::join_channels(c, pieces);
        EXPECT_EQ(all->value.shape(), (Shape{2, 1, 5, 6, 12}));
        return all;
      },
      {{2, 1, 5, 6, 3}});
}

// Values far apart, so that the steps of the differences change no maximum.
TEST_F(ImageOpsTest, MaxPool) {
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var y = nn::max_pool_3x3(c, in[0]);
        EXPECT_EQ(y->value.shape(), (Shape{2, 1, 4, 3, 4}));
        return y;
      },
      {{2, 1, 7, 6, 4}}, 100.0);
}

// A fusion: terms of the first's size, one of them twice, a smaller and a larger one.
TEST_F(ImageOpsTest, SumsOfSizes) {
  const std::vector<Shape> shapes{
      {1, 1, 6, 4, 3}, {1, 1, 3, 2, 3}, {1, 1, 6, 4, 3}, {1, 1, 8, 8, 3}};
  for (const bool relu : {false, true})
    check(
        [&](nn::Context c, const std::vector<Var>& in) {
          const std::vector<Var> terms{in[0], in[1], in[2], in[0], in[3]};
          return relu ? nn::sum_relu(c, terms) : nn::sum_terms(c, terms);
        },
        shapes, relu ? 100.0 : 1.0);
}

TEST_F(ImageOpsTest, Frozen) {
  Tape tape;
  const nn::Context c{tape, table_};
  const Shape s{1, 1, 2, 2, 2};
  const Var frozen = make_var(to_tensor(random_values(8, 1), s), false);
  EXPECT_FALSE(nn::max_pool_3x3(c, frozen)->needs_grad);
  EXPECT_FALSE(nn::sum_relu(c, {frozen, frozen})->needs_grad);
  const Var x = make_var(to_tensor(random_values(8, 2), s));
  const Var y = nn::sum_relu(c, {x, nn::resize_bilinear(c, frozen, 2, 2)});
  const Var z = nn::join_channels(c, {frozen, y});
  z->grad = to_tensor(random_values(16, 3), z->value.shape());
  tape.backward();
  EXPECT_TRUE(x->grad.defined());
  EXPECT_FALSE(frozen->grad.defined());
}

// The node starts the backward itself, beside another use of the logits.
TEST_F(ImageOpsTest, NegativeLogLikelihood) {
  const Shape s{1, 1, 3, 4, 5};
  const Tensor x = to_tensor(random_values(s.numel(), 1), s);
  Vec classes;
  for (int i = 0; i < 12; ++i) classes.push_back(i % 6);  // 0: ignored
  const Tensor labels = to_tensor(classes, {1, 1, 3, 4}, DType::u8);
  const float weight = 0.4f;
  Tape tape;
  const Var in = make_var(x);
  const Tensor stats = nn::nll({tape, table_}, in, labels, weight);
  EXPECT_EQ(stats.data<double>()[1], 10);
  EXPECT_GE(stats.data<double>()[2], 0);
  nn::nll({tape, table_}, in, labels, 0.6f);
  tape.backward();
  expect_slope(
      "logits", x, to_values(in->grad),
      [&] {
        Tape again(Tape::Mode::infer);
        const Tensor t = nn::nll({again, table_}, make_var(x), labels, weight);
        return t.data<double>()[0] / t.data<double>()[1];
      },
      2e-3);
}

TEST_F(ImageOpsTest, NoLabelNoGradient) {
  const Tensor x = to_tensor(random_values(12, 1), {1, 1, 2, 2, 3});
  const Tensor labels = to_tensor(Vec(4, 0), {1, 1, 2, 2}, DType::u8);
  Tape tape;
  const Var in = make_var(x);
  const Tensor stats = nn::nll({tape, table_}, in, labels, 1.0f);
  tape.backward();
  EXPECT_EQ(stats.data<double>()[0], 0);
  EXPECT_EQ(stats.data<double>()[1], 0);
  EXPECT_EQ(to_values(in->grad), Vec(12, 0.0));
}

}  // namespace
}  // namespace weft::test
