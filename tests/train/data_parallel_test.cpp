// Learning rates against closed forms, and moving averages of the weights against fp64.
#include "train/data_parallel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

namespace weft {
namespace {

TrainDeck schedule(const std::string& name) {
  TrainDeck d;
  d.steps = 1000;
  d.lr = 3e-4;
  d.warmup_steps = 100;
  d.lr_scheduler = name;
  return d;
}

// The rate of each step over lr, against `after(x)`, x the share of the steps behind the warm-up
// that is done.
template <class F>
void expect_after_warmup(const TrainDeck& d, F after) {
  for (std::int64_t s = 0; s < d.steps; ++s) {
    const double want =
        s < 100 ? (static_cast<double>(s) + 1) / 101 : after((static_cast<double>(s) - 100) / 900);
    ASSERT_NEAR(learning_rate(d, s), 3e-4 * want, 1e-16) << d.lr_scheduler << " step " << s;
  }
}

TEST(BucketSize, GrowsWithTheRanksUnlessTheDeckSetsIt) {
  ParallelDeck deck;
  const std::pair<int, double> expected[] = {{1, 25},    {2, 25},    {8, 25},    {32, 25},
                                             {48, 37.5}, {64, 50},   {128, 100}, {256, 200},
                                             {257, 200}, {4096, 200}};
  for (const auto& [ranks, mib] : expected) {
    EXPECT_EQ(bucket_mib(deck, ranks), mib) << ranks;
    EXPECT_EQ(bucket_elements(deck, ranks), static_cast<std::int64_t>(mib * 262144)) << ranks;
  }
  deck.bucket_mib = 0.5;
  for (const int ranks : {1, 128}) EXPECT_EQ(bucket_elements(deck, ranks), 131072);
}

TEST(LearningRate, LinearCosineAndConstant) {
  expect_after_warmup(schedule("constant"), [](double) { return 1.0; });
  expect_after_warmup(schedule("linear"), [](double x) { return 1 - x; });
  const auto cosine = [](double x) { return std::pow(std::cos(std::numbers::pi * x / 2), 2); };
  expect_after_warmup(schedule("cosine"), cosine);
  TrainDeck floor = schedule("cosine");
  floor.min_lr_factor = 0.1;
  expect_after_warmup(floor, [&](double x) { return 0.1 + 0.9 * cosine(x); });
  floor.steps = 1000;
  EXPECT_NEAR(learning_rate(floor, 5000), 3e-5, 1e-18) << "beyond the end it stays";
}

TEST(LearningRate, WarmupStableDecay) {
  TrainDeck d = schedule("warmup_stable_decay");
  // Of the 900 steps behind the warm-up 700 are stable and 200 fall.
  d.lr_decay_steps = 200;
  const auto falls = [](auto shape) {
    return [shape](double x) { return x <= 7.0 / 9 ? 1.0 : shape((900 * x - 700) / 200); };
  };
  expect_after_warmup(d, falls([](double x) { return 1 - x; }));
  d.lr_decay_type = "sqrt";
  expect_after_warmup(d, falls([](double x) { return 1 - std::sqrt(x); }));
  d.lr_decay_type = "cosine";
  expect_after_warmup(d,
                      falls([](double x) { return 0.5 + 0.5 * std::cos(std::numbers::pi * x); }));
  // 0 is a tenth of the steps, and nothing falls before the warm-up is over.
  d.lr_decay_type = "linear", d.lr_decay_steps = 0;
  EXPECT_EQ(learning_rate(d, 900), 3e-4);
  EXPECT_NEAR(learning_rate(d, 950), 1.5e-4, 1e-18);
  d.warmup_steps = 950;
  EXPECT_NEAR(learning_rate(d, 949), 3e-4 * 950 / 951, 1e-18);
  EXPECT_EQ(learning_rate(d, 950), 3e-4);
  EXPECT_NEAR(learning_rate(d, 975), 1.5e-4, 1e-18);
}

// Today's decks keep their bits: no rounding but these.
TEST(LearningRate, PolynomialToTheBit) {
  TrainDeck d = schedule("polynomial");
  for (const double power : {-1.0, 0.0, 0.9, 2.0}) {
    d.lr_power = power;
    for (std::int64_t s = 0; s < 1100; ++s) {
      const double n = static_cast<double>(s);
      const double want = s < 100      ? 3e-4 * (n + 1) / 101
                          : power <= 0 ? 3e-4
                                       : 3e-4 * std::pow(std::max(0.0, 1 - n / 1000), power);
      ASSERT_EQ(learning_rate(d, s), want) << power << " step " << s;
    }
  }
}

// A table of one parameter with its optimizer's state on one rank, and steps of AdamW or SGD.
struct OneParameter {
  static constexpr std::int64_t n = 1003;
  ParameterTable table;
  Parameter& p;
  std::unique_ptr<OptimizerState> state;
  Tensor squares = Tensor::persistent({1}, DType::f64);

  explicit OneParameter(const std::vector<double>& decays)
      : p(table.add("layer.weight", {n}, {Init::Kind::normal, 1.0f})) {
    table.allocate(1 << 12, false, true);
    table.initialise(3);
    state = std::make_unique<OptimizerState>(table, false, 0, 1, true, decays);
    squares.data<double>()[0] = 4;
  }
  void step(const TrainDeck& d, std::int64_t steps_done) {
    for (std::int64_t i = 0; i < n; ++i)
      p.grad.data<float>()[i] = static_cast<float>((i * 7 + steps_done * 13) % 11 - 5);
    optimizer_step(d, steps_done, squares, *state, 0);
  }
  std::vector<float> weights() const { return copy(p.value); }
  std::vector<float> average(int i) const { return copy(state->ema(0, i).slice(0, n)); }

 private:
  static std::vector<float> copy(const Tensor& t) { return {t.data<float>(), t.data<float>() + n}; }
};

TEST(Averages, OfSeveralDecaysFromTheStartStepOn) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    TrainDeck d;
    d.optimizer = optimizer;
    d.lr = 0.05;
    d.ema_decay = {0.5, 0.9, 0.99};
    d.ema_start = 3;
    OneParameter run(d.ema_decay);
    std::vector<std::vector<double>> want(3);
    for (std::int64_t s = 0; s < 8; ++s) {
      run.step(d, s);
      const std::vector<float> w = run.weights();
      for (int i = 0; i < 3; ++i) {
        std::vector<double>& e = want[static_cast<std::size_t>(i)];
        const double decay = d.ema_decay[static_cast<std::size_t>(i)];
        if (s < 3) e.assign(w.begin(), w.end());
        for (std::size_t k = 0; k < w.size() && s >= 3; ++k)
          e[k] = decay * e[k] + (1 - decay) * static_cast<double>(w[k]);
        const std::vector<float> got = run.average(i);
        for (std::size_t k = 0; k < w.size(); ++k)
          ASSERT_NEAR(got[k], e[k], 2e-6 * (1 + std::abs(e[k])))
              << optimizer << s << " of " << decay;
        if (s < 3) {
          EXPECT_EQ(got, w) << "until averaging begins";
        }
      }
    }
    EXPECT_NE(run.average(0), run.average(1));
  }
}

TEST(Averages, TheFirstHasTheSameBitsWithOthersBesideIt) {
  TrainDeck one, two;
  one.lr = two.lr = 0.05;
  two.ema_decay = {0.99, 0.9};
  OneParameter alone({0.99}), beside(two.ema_decay);
  for (std::int64_t s = 0; s < 4; ++s) {
    alone.step(one, s);
    beside.step(two, s);
  }
  EXPECT_EQ(alone.weights(), beside.weights());
  EXPECT_EQ(alone.average(0), beside.average(0));
}

TEST(Averages, StayWhereTheNormIsNotFinite) {
  TrainDeck d;
  d.ema_decay = {0.5, 0.9};
  OneParameter run(d.ema_decay);
  run.step(d, 0);
  const std::vector<float> w = run.weights(), first = run.average(0), second = run.average(1);
  run.squares.data<double>()[0] = std::numeric_limits<double>::quiet_NaN();
  run.step(d, 1);
  EXPECT_EQ(run.weights(), w);
  EXPECT_EQ(run.average(0), first);
  EXPECT_EQ(run.average(1), second);
}

}  // namespace
}  // namespace weft
