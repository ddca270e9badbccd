// The text detector's loss on the tape: against PyTorch's numbers, and against differences of its
// own forward. tests/ops/cases_test.cpp holds the operations to fp64 formulas.
#include "nn/image_ops.h"
#include "ops/loss.h"

#include "fixture.h"
#include "pattern.h"

namespace weft::test {
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
