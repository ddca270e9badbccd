// The tape: accumulation, recompute, and what returns to the arena.
#include "nn/nn.h"

#include "fixture.h"

namespace weft::test {
namespace {

// A chain of residual blocks x + mlp(LN(x)) that share one modulation, like a transformer's.
class TapeTest : public OpTest {
 protected:
  static constexpr std::int64_t C = 32, tokens = 64, layers = 6;

  void SetUp() override {
    for (std::int64_t i = 0; i < layers; ++i) {
      const std::string name = std::to_string(i);
      const auto linear = [&](const std::string& part, std::int64_t out, std::int64_t in) {
        nn::Linear l;
        l.weight = &table_.add(name + part + ".weight", {out, in}, Init{});
        l.bias = &table_.add(name + part + ".bias", {out}, Init{});
        return l;
      };
      fc1_.push_back(linear(".fc1", 4 * C, C));
      fc2_.push_back(linear(".fc2", C, 4 * C));
    }
    shared_ = &table_.add("table", {3, C}, Init{});
    table_.allocate(1 << 16, false, true);
    randomise(table_, 5);
  }

  Var forward(Tape& tape, const Tensor& in, std::int64_t recomputed, std::int64_t depth = layers) {
    Var x = make_var(in);
    const Var t = make_var(to_tensor(random_values(3 * C, 9), {1, 3 * C}));
    const Var m = nn::modulation({tape, table_}, *shared_, t);
    const Tensor rows = to_tensor({0}, {1}, DType::i32);
    for (std::int64_t i = 0; i < depth; ++i) {
      const auto block = [this, x, m, rows, i](Tape& part) {
        const nn::Context c{part, table_};
        const Var u = nn::layer_norm_modulate(c, x, m, rows, 0, 1);
        const auto k = static_cast<std::size_t>(i);
        return nn::gate_residual(c, x, nn::mlp(c, u, fc1_[k], fc2_[k]), m, rows, 2, Tensor());
      };
      x = i < recomputed ? recompute(tape, block) : block(tape);
    }
    return x;
  }

  struct Run {
    Vec out, grads;
    std::size_t peak;
  };
  Run step(std::int64_t recomputed) {
    const std::size_t before = arena_->used();
    Run r;
    {
      table_.begin_step([](int) {});
      const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
      Tape tape;
      arena_->reset_peak();
      const Var y = forward(tape, in, recomputed);
      r.out = to_values(y->value);
      y->grad = to_tensor(random_values(tokens * C, 2), {1, 1, tokens, C});
      tape.backward();
      r.peak = arena_->peak();
      table_.finish_step();
      r.grads = to_values(table_.grads());
    }
    EXPECT_EQ(arena_->used(), before) << "activations or gradients stayed behind";
    return r;
  }

  ParameterTable table_;
  std::vector<nn::Linear> fc1_, fc2_;
  Parameter* shared_ = nullptr;
};

TEST_F(TapeTest, RecomputeRepeatsTheBitsInLessMemory) {
  const Run plain = step(0), half = step(layers / 2), all = step(layers);
  EXPECT_GT(dot(plain.grads, plain.grads), 0);
  EXPECT_EQ(plain.out, half.out);
  EXPECT_EQ(plain.out, all.out);
  EXPECT_EQ(plain.grads, half.grads);
  EXPECT_EQ(plain.grads, all.grads);
  EXPECT_LT(half.peak, plain.peak);
  EXPECT_LT(all.peak, half.peak);
}

TEST_F(TapeTest, ActivationsReturnAsTheBackwardRuns) {
  table_.begin_step([](int) {});
  const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
  Tape tape;
  const std::size_t before = arena_->used();
  Var y = forward(tape, in, 0);
  const std::size_t forward_holds = arena_->used() - before;
  y->grad = to_tensor(random_values(tokens * C, 2), {1, 1, tokens, C});
  y.reset();
  arena_->reset_peak();
  tape.backward();
  // Gradients and scratch of one block beside activations that shrink: far from twice the forward's
  // share.
  EXPECT_LT(arena_->peak() - before, forward_holds + forward_holds / 3);
  EXPECT_EQ(arena_->used(), before);
}

TEST_F(TapeTest, InferRecordsNothingAndHoldsOneBlock) {
  const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
  std::size_t peaks[2];
  for (const std::int64_t depth : {std::int64_t{2}, layers}) {
    const std::size_t before = arena_->used();
    arena_->reset_peak();
    Tape tape(Tape::Mode::infer);
    const Var y = forward(tape, in, 0, depth);
    peaks[depth == layers] = arena_->peak() - before;
    EXPECT_EQ(arena_->used() - before, y->value.bytes()) << "more than the result is left";
    EXPECT_FALSE(tape.recording());
    tape.backward();
    EXPECT_FALSE(y->grad.defined());
  }
  EXPECT_EQ(peaks[0], peaks[1]) << "memory grows with the depth";
  // Recompute has nothing to do without a backward.
  Tape tape(Tape::Mode::infer);
  EXPECT_EQ(to_values(forward(tape, in, layers)->value), step(0).out);
}

TEST_F(TapeTest, MicroBatchesAddUp) {
  const Vec g = random_values(tokens * C, 2);
  const auto micro = [&](std::uint64_t stream) {
    Tape tape;
    const Var y = forward(tape, to_tensor(random_values(tokens * C, stream), {1, 1, tokens, C}), 2);
    y->grad = to_tensor(g, {1, 1, tokens, C});
    tape.backward();
  };
  const auto grads_of = [&](std::vector<std::uint64_t> streams) {
    table_.begin_step([](int) {});
    for (const auto s : streams) micro(s);
    table_.finish_step();
    return to_values(table_.grads());
  };
  const Vec a = grads_of({11}), b = grads_of({12}), both = grads_of({11, 12});
  Vec sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  EXPECT_GT(relative_error(a, sum), 0.1) << "two equal micro-batches would prove nothing";
  EXPECT_LT(relative_error(both, sum), 1e-6);
  EXPECT_EQ(grads_of({11}), a) << "a step sees the one before it";
}

TEST_F(TapeTest, TheFirstContributionIsTakenOverTheNextAreAdded) {
  const Var v = make_var(to_tensor({1, 2}, {2}));
  Tensor first = to_tensor({3, 4}, {2});
  const void* place = first.raw();
  give_grad(v, std::move(first));
  EXPECT_EQ(v->grad.raw(), place);
  give_grad(v, to_tensor({10, 20}, {2}));
  EXPECT_EQ(to_values(v->grad), (Vec{13, 24}));
  EXPECT_TRUE(grad_target(v).accumulate);
  EXPECT_EQ(to_values(zeroed_grad(v)), (Vec{13, 24}));
  const Var fresh = make_var(to_tensor({1, 2}, {2}));
  EXPECT_FALSE(grad_target(fresh).accumulate);
  EXPECT_EQ(fresh->grad.shape(), (Shape{2}));
  const Var zeroed = make_var(to_tensor({1, 2}, {2}));
  EXPECT_EQ(to_values(zeroed_grad(zeroed)), (Vec{0, 0}));
}

}  // namespace
}  // namespace weft::test
