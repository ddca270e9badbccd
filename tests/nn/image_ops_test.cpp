// Gradients of the operations of image networks on the tape against differences of the same
// forward.

#include "nn/image_ops.h"
#include "fixture.h"
#include "ops/loss.h"

namespace weft::test {
namespace {

class ImageOpsTest : public OpTest {
 protected:
  using Function = std::function<Var(nn::Context, const std::vector<Var>&)>;
  // One forward and backward of `f` at values of the shapes; then each input is held to its slope,
  // and so are the parameters that `table_` may have.
  void check(const Function& f, const std::vector<Shape>& shapes, double scale = 1.0) {
    table_.allocate(1 << 16, false, true);
    randomise(table_, 3);
    if (table_.grads().defined())  // an earlier step's
      std::fill_n(table_.grads().data<float>(), table_.grads().numel(), 7.0f);
    table_.begin_step([](int) {});
    std::vector<Tensor> at;
    for (const Shape& s : shapes)
      at.push_back(to_tensor(random_values(s.numel(), 10 + at.size(), scale), s));
    const auto inputs = [&] {
      std::vector<Var> vars;
      // Copies: some operations overwrite their operand.
      for (const Tensor& t : at) vars.push_back(make_var(to_tensor(to_values(t), t.shape())));
      return vars;
    };
    Tape tape;
    const std::vector<Var> in = inputs();
    const Var out = f({tape, table_}, in);
    const Vec g = random_values(out->value.numel(), 77);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    table_.finish_step();
    const auto loss = [&] {
      Tape again(Tape::Mode::infer);
      return against(f({again, table_}, inputs())->value, g);
    };
    expect_parameter_slopes(table_, loss, 2e-3);
    for (std::size_t i = 0; i < at.size(); ++i) {
      ASSERT_TRUE(in[i]->grad.defined()) << i;
      ASSERT_EQ(in[i]->grad.shape(), shapes[i]);
      expect_slope("input " + std::to_string(i), at[i], to_values(in[i]->grad), loss, 2e-3);
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

// Weights of classes and Dice; and hard positions alone, whose number stays while the logits move.
// The node starts the backward itself.
TEST_F(ImageOpsTest, ClassLoss) {
  const Shape s{1, 1, 3, 4, 5};
  Vec classes;
  for (int i = 0; i < 12; ++i) classes.push_back(i % 6);  // 0: ignored
  const Tensor labels = to_tensor(classes, {1, 1, 3, 4}, DType::u8),
               weights = to_tensor({0.5, 2, 0, 1, 3}, {5});
  const float weight = 0.4f;
  for (const bool hard : {false, true}) {
    Vec values = random_values(s.numel(), 1);
    // Every other labelled position is easy by far.
    for (std::size_t i = 0; hard && i < 12; i += 2)
      if (classes[i] > 0) values[5 * i + static_cast<std::size_t>(classes[i]) - 1] += 9;
    const Tensor x = to_tensor(values, s);
    const ops::ClassLoss loss{0.7f, hard ? 0.95f : 0.0f, 0};
    Tape tape;
    const Var in = make_var(x);
    const Tensor stats = nn::class_loss({tape, table_}, in, labels, weights, loss, weight);
    EXPECT_EQ(stats.data<double>()[ops::class_labelled], 10);
    // Positions 1, 7; 2, 8; 3, 9; 4, 10; 5, 11 are of the five classes.
    EXPECT_EQ(stats.data<double>()[ops::class_weight], hard ? 2 * 0.5 + 0 + 2 * 3 : 2 * 6.5);
    nn::class_loss({tape, table_}, in, labels, weights, loss, 1 - weight);  // another use of them
    tape.backward();
    expect_slope(
        hard ? "hard" : "all", x, to_values(in->grad),
        [&] {
          Tape again(Tape::Mode::infer);
          const Tensor t =
              nn::class_loss({again, table_}, make_var(x), labels, weights, loss, weight);
          const double* v = t.data<double>();
          return v[ops::class_nll] / v[ops::class_weight] + 0.7 * v[ops::class_dice];
        },
        2e-3);
  }
}

TEST_F(ImageOpsTest, ClassLossWithoutALabelIsZero) {
  const Tensor labels = to_tensor(Vec(4, 0), {1, 1, 2, 2}, DType::u8);
  Tape tape;
  const Var in = make_var(to_tensor(random_values(12, 1), {1, 1, 2, 2, 3}));
  const Tensor stats =
      nn::class_loss({tape, table_}, in, labels, to_tensor({1, 1, 1}, {3}), {1, 0.7f, 10}, 1.0f);
  tape.backward();
  EXPECT_EQ(stats.data<double>()[ops::class_nll], 0);
  EXPECT_EQ(stats.data<double>()[ops::class_dice], 0);
  EXPECT_EQ(to_values(in->grad), Vec(12, 0.0));
}

// Top-down through a pyramid, then all its levels beside each other: the middle one is used twice.
TEST_F(ImageOpsTest, UpsampledPyramid) {
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var middle = nn::add_upsampled(c, in[1], in[2]);
        const Var top = nn::add_upsampled(c, in[0], middle);
        EXPECT_EQ(middle->value.raw(), in[1]->value.raw());
        const Var all = nn::join_upsampled(c, {top, middle, in[2], in[3]});
        EXPECT_EQ(all->value.shape(), (Shape{2, 1, 8, 12, 11}));
        // Pixel (5, 7) of the large side is (2, 3) and (1, 1) of the smaller ones.
        const Vec y = to_values(all->value), m = to_values(middle->value);
        for (int k = 0; k < 3; ++k) EXPECT_EQ(y[(5 * 12 + 7) * 11 + 3 + k], m[(2 * 6 + 3) * 3 + k]);
        return all;
      },
      {{2, 1, 8, 12, 3}, {2, 1, 4, 6, 3}, {2, 1, 2, 3, 3}, {2, 1, 1, 1, 2}});
}

TEST_F(ImageOpsTest, AveragePool) {
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var y = nn::average_pool_2x2(c, in[0]);
        EXPECT_EQ(y->value.shape(), (Shape{2, 1, 2, 3, 5}));
        const Vec x = to_values(in[0]->value);
        EXPECT_NEAR(to_values(y->value)[5], (x[10] + x[15] + x[40] + x[45]) / 4, 1e-6);
        // A second use of x.
        return nn::sum_terms(c, {y, nn::average_pool_2x2(c, in[0])});
      },
      {{2, 1, 4, 6, 5}});
}

// x is [2,1,2,3,4] -> [2,1,4,6,3] -> [2,1,8,12,1]: the head of DBNet, by the definition
// out[2h+i,2w+j] = bias + sum over c of x[h,w,c] weight[c,o,i,j].
TEST_F(ImageOpsTest, TransposedConvolution) {
  const auto weights = [&](const char* name, std::int64_t in, std::int64_t out, bool bias) {
    nn::ConvWeights w;
    w.weight = &table_.add(std::string(name) + ".weight", {in, out, 2, 2}, Init{});
    if (bias) w.bias = &table_.add(std::string(name) + ".bias", {out}, Init{});
    return w;
  };
  const nn::ConvWeights first = weights("first", 4, 3, true),
                        second = weights("second", 3, 1, true),
                        plain = weights("plain", 4, 3, false);
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var y = nn::conv_transpose_2x2(c, in[0], first);
        EXPECT_EQ(y->value.shape(), (Shape{2, 1, 4, 6, 3}));
        const Vec x = to_values(in[0]->value), w = to_values(first.weight->value),
                  b = to_values(first.bias->value);
        Vec wanted = to_values(y->value);
        for (int i = 0; i < 2 * 4 * 6 * 3; ++i) {
          const int o = i % 3, column = i / 3 % 6, row = i / 18 % 4, n = i / 72;
          wanted[i] = b[o];
          for (int k = 0; k < 4; ++k)
            wanted[i] += x[((n * 2 + row / 2) * 3 + column / 2) * 4 + k] *
                         w[((k * 3 + o) * 2 + row % 2) * 2 + column % 2];
        }
        EXPECT_LT(relative_error(to_values(y->value), wanted), 1e-6);
        const Var sum = nn::sum_terms(c, {y, nn::conv_transpose_2x2(c, in[0], plain)});
        return nn::conv_transpose_2x2(c, sum, second);
      },
      {{2, 1, 2, 3, 4}});
}

// The fusion of DBNet++ with its convolutions left out: each operation as it is used there.
TEST_F(ImageOpsTest, AdaptiveScaleFusion) {
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var a = in[1];
        const Var g = nn::sigmoid(c, nn::adaptive_average_pool(c, a, 1));
        const Var t = nn::add_outer(c, a, g, nullptr);
        const Var u = nn::add_outer(c, t, nullptr, nn::sigmoid(c, nn::channel_mean(c, t)));
        EXPECT_EQ(u->value.raw(), a->value.raw());
        const Var both = nn::add_outer(c, u, g, nn::channel_mean(c, in[0]));
        return nn::scale_groups(c, in[0], nn::sigmoid(c, both));
      },
      {{2, 1, 3, 4, 8}, {2, 1, 3, 4, 2}});
}

TEST_F(ImageOpsTest, FusionInPlace) {
  const Shape s{1, 1, 2, 3, 4}, groups{1, 1, 2, 3, 2};
  const Vec v = random_values(24, 1), w = random_values(12, 2);
  Tensor values[2];
  for (const auto mode : {Tape::Mode::infer, Tape::Mode::discard}) {
    Tape tape(mode);
    const Var x = make_var(to_tensor(v, s)), a = make_var(to_tensor(w, groups));
    const Var y = nn::scale_groups({tape, table_}, x, a);
    const bool infers = mode == Tape::Mode::infer;
    EXPECT_EQ(y->value.raw() == x->value.raw(), infers);  // what is recomputed needs x again
    if (!infers) {
      EXPECT_EQ(to_values(x->value), rounded(v, DType::f32));
    }
    values[infers] = y->value;
  }
  EXPECT_TRUE(same_bits(values[0], values[1]));
}

// Gradients in bf16: the sums by channel are made in f32.
TEST_F(ImageOpsTest, AddOuterInBf16) {
  const Shape s{2, 1, 3, 4, 5};
  Tape tape;
  const nn::Context c{tape, table_};
  const auto var = [](const Shape& shape, std::uint64_t stream) {
    return make_var(to_tensor(random_values(shape.numel(), stream), shape, DType::bf16));
  };
  const Var x = var(s, 1), channel = var({2, 1, 1, 1, 5}, 2), pixel = var({2, 1, 3, 4, 1}, 3);
  const Var y = nn::add_outer(c, x, channel, pixel);
  const Vec d = rounded(random_values(s.numel(), 4), DType::bf16);
  y->grad = to_tensor(d, s, DType::bf16);
  tape.backward();
  Vec by_channel(10), by_pixel(24);
  for (int i = 0; i < 120; ++i) by_channel[i / 60 * 5 + i % 5] += d[i], by_pixel[i / 5] += d[i];
  EXPECT_EQ(to_values(x->grad), d);
  EXPECT_EQ(channel->grad.shape(), channel->value.shape());
  EXPECT_LT(relative_error(to_values(channel->grad), by_channel), tolerance(DType::bf16));
  EXPECT_LT(relative_error(to_values(pixel->grad), by_pixel), tolerance(DType::bf16));
}

// Operands without a gradient get none, and what needs none records nothing.
TEST_F(ImageOpsTest, FrozenOperands) {
  Tape tape;
  const nn::Context c{tape, table_};
  const Shape s{1, 1, 2, 2, 2}, half{1, 1, 1, 1, 2};
  const auto var = [](const Shape& shape, bool learns) {
    return make_var(to_tensor(random_values(shape.numel(), 1), shape), learns);
  };
  EXPECT_FALSE(nn::add_upsampled(c, var(s, false), var(half, false))->needs_grad);
  EXPECT_FALSE(nn::join_upsampled(c, {var(s, false), var(half, false)})->needs_grad);
  EXPECT_FALSE(nn::scale_groups(c, var(s, false), var(s, false))->needs_grad);
  for (const bool first : {true, false}) {
    const Var a = var(s, first), b = var(half, !first), x = var(s, first), f = var(s, !first);
    const Var sum = nn::add_upsampled(c, a, b), scaled = nn::scale_groups(c, x, f);
    const Var channel = var(half, !first), all = nn::add_outer(c, sum, channel, nullptr);
    const Var y = nn::sum_terms(c, {all, scaled});
    y->grad = to_tensor(random_values(8, 3), s);
    tape.backward();
    for (const Var& v : {a, b, x, f, channel}) EXPECT_EQ(v->grad.defined(), v->needs_grad);
  }
}

}  // namespace

// The text detector's loss on the tape: against PyTorch's numbers, and against differences of its
// own forward. tests/ops/cases_test.cpp holds the operations to fp64 formulas.
namespace {

constexpr std::int64_t N = 2, H = 40, W = 30, count = N * H * W;
const Shape maps{N, 1, H, W, 1}, pixels{N, H, W};

class TextLossTest : public OpTest {
 protected:
  // As validation/test_numbers.py makes them.
  TextLossTest() {
    const Vec text = pattern(count, 3), counts = pattern(count, 4), near = pattern(count, 5),
              wanted = pattern(count, 6);
    for (std::int64_t i = 0; i < count; ++i) {
      flags_.data<std::uint8_t>()[i] =
          static_cast<std::uint8_t>((text[i] > 0.97 ? ops::TextPixel::text : 0) |
                                    (counts[i] > -0.9 ? ops::TextPixel::counts : 0) |
                                    (near[i] > 0.6 ? ops::TextPixel::threshold : 0));
      thresholds_.data<std::uint8_t>()[i] =
          static_cast<std::uint8_t>(std::floor(127.5 + 127 * wanted[i]));
    }
  }
  Tensor run(Tape& tape, const Var& probability, const Var& threshold, float weight) {
    return nn::text_loss({tape, table_}, probability, threshold, flags_, thresholds_, weight);
  }

  ParameterTable table_;
  Tensor probability_ = to_tensor(pattern(count, 1, 2.0), maps),
         threshold_ = to_tensor(pattern(count, 2, 1.5), maps);
  Tensor flags_ = Tensor::empty(pixels, DType::u8), thresholds_ = Tensor::empty(pixels, DType::u8);
};

TEST_F(TextLossTest, NumbersOfPyTorch) {
  Tape tape;
  const Var p = make_var(probability_), t = make_var(threshold_);
  const double* stats = run(tape, p, t, 0.7f).data<double>();
  EXPECT_NEAR(stats[ops::text_total], 11.841829433729, 1e-5);
  EXPECT_NEAR(stats[ops::text_probability], 1.745995393135, 1e-6);
  EXPECT_NEAR(stats[ops::text_threshold], 0.219278667009, 1e-7);
  EXPECT_NEAR(stats[ops::text_binary], 0.919065797965, 1e-6);
  tape.backward();
  const Vec dp = to_values(p->grad), dt = to_values(t->grad), other = pattern(count, 7);
  EXPECT_NEAR(std::sqrt(dot(dp, dp)), 0.113348746628, 1e-7);
  EXPECT_NEAR(dot(dp, other), -0.358851280492, 1e-6);
  EXPECT_NEAR(std::sqrt(dot(dt, dt)), 0.054910505604, 1e-7);
  EXPECT_NEAR(dot(dt, other), -0.078732881894, 1e-6);
}

// The node starts the backward itself; two of them add up.
TEST_F(TextLossTest, BackwardIsItsSlope) {
  // Far from the thresholds, where the slope of |T - threshold| jumps.
  for (std::int64_t i = 0; i < count; ++i)
    thresholds_.data<std::uint8_t>()[i] = threshold_.data<float>()[i] > 0 ? 0 : 255;
  // And with a gap between the chosen pixels and the others, which would change places.
  Tape before(Tape::Mode::infer);
  const auto edge = static_cast<float>(
      run(before, make_var(probability_), make_var(threshold_), 1).data<double>()[ops::text_edge]);
  for (float& logit : probability_.span<float>()) logit += logit >= edge ? 0.5f : 0.0f;
  Tape tape;
  const Var p = make_var(probability_), t = make_var(threshold_);
  run(tape, p, t, 0.6f);
  run(tape, p, t, 0.4f);
  tape.backward();
  const auto loss = [&] {
    Tape again(Tape::Mode::infer);
    return run(again, make_var(probability_), make_var(threshold_), 1.0f)
        .data<double>()[ops::text_total];
  };
  expect_slope("probability", probability_, to_values(p->grad), loss, 2e-3);
  expect_slope("threshold", threshold_, to_values(t->grad), loss, 2e-3);
}

// Without text nothing is learned but thresholds where they count.
TEST_F(TextLossTest, NoText) {
  for (std::uint8_t& f : flags_.span<std::uint8_t>()) f = ops::TextPixel::counts;
  Tape tape;
  const Var p = make_var(probability_), t = make_var(threshold_);
  const double* stats = run(tape, p, t, 1.0f).data<double>();
  EXPECT_EQ(stats[ops::text_probability], 0);
  EXPECT_EQ(stats[ops::text_threshold], 0);
  EXPECT_EQ(stats[ops::text_binary], 1);
  EXPECT_EQ(stats[ops::text_edge_pixel], -1);
  tape.backward();
  EXPECT_EQ(to_values(p->grad), Vec(count, 0.0));
  EXPECT_EQ(to_values(t->grad), Vec(count, 0.0));
}

// A logit that is not a number shows in the loss, and so does an infinite one.
TEST_F(TextLossTest, NonFiniteShows) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const Tensor logits = to_tensor(to_values(probability_), maps);
    std::int64_t i = 0;
    while (flags_.data<std::uint8_t>()[i] != ops::TextPixel::counts) ++i;
    logits.data<float>()[i] = bad;
    Tape tape(Tape::Mode::infer);
    const Tensor stats = run(tape, make_var(logits), make_var(threshold_), 1.0f);
    EXPECT_FALSE(std::isfinite(stats.data<double>()[ops::text_total])) << bad;
  }
}

TEST_F(TextLossTest, Frozen) {
  Tape tape;
  const Var p = make_var(probability_, false), t = make_var(threshold_);
  run(tape, p, t, 1.0f);
  tape.backward();
  EXPECT_FALSE(p->grad.defined());
  EXPECT_TRUE(t->grad.defined());
}

}  // namespace
}  // namespace weft::test
