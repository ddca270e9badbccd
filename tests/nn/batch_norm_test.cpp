// Batch norm of one rank: values and gradients against fp64, and when running statistics change.
#include "nn/batch_norm.h"

#include "batch_norm_reference.h"
#include "core/error.h"
#include "fixture.h"
#include "nn/conv.h"

namespace weft::test {
namespace {

using nn::Activation;

constexpr std::int64_t C = 5;
const Shape shape{2, 1, 3, 2, C};

class BatchNormTest : public OpTest {
 protected:
  void SetUp() override {
    table_.allocate(1 << 16, false, true);
    table_.initialise(1);
    randomise_batch_norm(a_, 11);
    randomise_batch_norm(b_, 12);
    std::fill_n(table_.grads().data<float>(), table_.grads().numel(), 7.0f);  // an earlier step's
    table_.begin_step([](int) {});
  }
  Vec running() const {
    Vec all;
    for (const Parameter* p : {a_.running_mean, a_.running_var, a_.tmp_running_mean,
                               a_.tmp_running_var, a_.running_iter})
      for (const double v : to_values(p->value)) all.push_back(v);
    return all;
  }

  ParameterTable table_;
  const nn::BatchNorm a_ = add_batch_norm(table_, "a", C, 0, 0.1f),
                      b_ = add_batch_norm(table_, "b", C, 0, 0.1f);
  nn::BatchNormGroup group_;
  Vec x_ = random_values(shape.numel(), 1, 2), other_ = random_values(shape.numel(), 2, 2),
      cotangent_ = random_values(shape.numel(), 3);
  Vec gamma_a_, beta_a_, gamma_b_, beta_b_;
};

TEST_F(BatchNormTest, NamesAndStarts) {
  ParameterTable table;
  const nn::BatchNorm w = add_batch_norm(table, "layer.bn1", 3, 1e-4f);
  EXPECT_EQ(w.momentum, 0.001f);
  table.allocate(1 << 16, false, true);
  table.initialise(5);
  const auto holds = [&](const char* name, std::int64_t n, double value, bool trainable) {
    const Parameter* p = table.find(std::string("layer.bn1.") + name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->trainable, trainable) << name;
    EXPECT_LT(relative_error(to_values(p->value), Vec(static_cast<std::size_t>(n), value)), 1e-7)
        << name;
  };
  holds("weight", 3, 1, true);
  holds("bias", 3, 1e-4, true);
  holds("running_mean", 3, 0, false);
  holds("running_var", 3, 1, false);
  holds("_tmp_running_mean", 3, 0, false);
  holds("_tmp_running_var", 3, 1, false);
  holds("_running_iter", 1, 1, false);
  EXPECT_EQ(table.all().size(), 7u);
}

// x alone, with another value added, with itself added, and with another batch norm added; x has a
// gradient from elsewhere in every second case.
TEST_F(BatchNormTest, ValuesAndGradients) {
  enum { alone, residual, itself, second };
  for (const Activation act : {Activation::none, Activation::relu, Activation::relu6})
    for (const int kind : {alone, residual, itself, second})
      for (const bool more : {false, true}) {
        SCOPED_TRACE(fmt::format("act {} kind {} more {}", static_cast<int>(act), kind, more));
        table_.begin_step([](int) {});
        Vec x = x_, other = kind == itself ? x_ : other_;
        Vec ga = to_values(a_.weight->value), ba = to_values(a_.bias->value);
        Vec gb = to_values(b_.weight->value), bb = to_values(b_.bias->value);
        const auto reference = [&] {
          Vec y = normalised(x, ga, ba, false);
          if (kind == residual) y = sum(y, other);
          if (kind == itself) y = sum(y, x);
          if (kind == second) y = sum(y, normalised(other, gb, bb, false));
          return activated(y, act);
        };
        const auto loss = [&] { return dot(reference(), cotangent_); };
        Tape tape;
        const nn::Context c{tape, table_};
        const Var in = make_var(to_tensor(x, shape)), in2 = make_var(to_tensor(other, shape));
        const Var out = kind == second ? nn::batch_norm_add(c, {in, &a_}, {in2, &b_}, group_, act)
                                       : nn::batch_norm(c, in, a_, group_, act,
                                                        kind == residual ? in2
                                                        : kind == itself ? in
                                                                         : nullptr);
        EXPECT_LT(relative_error(to_values(out->value), reference()), 1e-6);
        out->grad = to_tensor(cotangent_, shape);
        const Vec before = random_values(shape.numel(), 9);
        if (more)
          for (const Var& v : {in, in2}) v->grad = to_tensor(before, shape);
        tape.backward();
        table_.finish_step();
        const auto wanted = [&](Vec d) { return more ? sum(d, before) : d; };
        EXPECT_LT(relative_error(to_values(in->grad), wanted(differences(x, loss))), 1e-5);
        if (kind == residual || kind == second) {
          EXPECT_LT(relative_error(to_values(in2->grad), wanted(differences(other, loss))), 1e-5);
        }
        EXPECT_LT(relative_error(to_values(a_.weight->grad), differences(ga, loss)), 1e-5);
        EXPECT_LT(relative_error(to_values(a_.bias->grad), differences(ba, loss)), 1e-5);
        if (kind == second) {
          EXPECT_LT(relative_error(to_values(b_.weight->grad), differences(gb, loss)), 1e-5);
          EXPECT_LT(relative_error(to_values(b_.bias->grad), differences(bb, loss)), 1e-5);
        }
      }
}

// Running statistics: no influence of x on them, gamma and beta are trained all the same.
TEST_F(BatchNormTest, WithRunningStatistics) {
  group_.use_running = true;
  a_.running_mean->set(0, std::vector<float>{0.1f, -0.2f, 0.3f, 1, -1});
  a_.running_var->set(0, std::vector<float>{1, 2, 0.5f, 4, 1e-7f});
  const Vec start = running(), mean = to_values(a_.running_mean->value),
            var = to_values(a_.running_var->value);
  Vec x = x_, gamma = to_values(a_.weight->value), beta = to_values(a_.bias->value);
  const auto reference = [&] {
    Vec y(x.size());
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = (x[i] - mean[i % C]) / std::sqrt(var[i % C] + 1e-5) * gamma[i % C] + beta[i % C];
    return activated(y, Activation::relu);
  };
  const auto loss = [&] { return dot(reference(), cotangent_); };
  Tape tape;
  const Var in = make_var(to_tensor(x, shape));
  const Var out = nn::batch_norm({tape, table_}, in, a_, group_, Activation::relu);
  EXPECT_LT(relative_error(to_values(out->value), reference()), 1e-6);
  out->grad = to_tensor(cotangent_, shape);
  tape.backward();
  table_.finish_step();
  EXPECT_LT(relative_error(to_values(in->grad), differences(x, loss)), 1e-5);
  EXPECT_LT(relative_error(to_values(a_.weight->grad), differences(gamma, loss)), 1e-5);
  EXPECT_LT(relative_error(to_values(a_.bias->grad), differences(beta, loss)), 1e-5);
  EXPECT_EQ(running(), start);
}

TEST_F(BatchNormTest, RunningStatisticsFollowEachStepOnce) {
  RunningReference wanted(C);
  for (int step = 0; step < 3; ++step) {
    const Vec x = random_values(shape.numel(), 20 + static_cast<std::uint64_t>(step), 2);
    wanted.step(moments_of(x, C), 0.1f, false);
    table_.begin_step([](int) {});
    Tape tape;
    const Var in = make_var(to_tensor(x, shape));
    const auto block = [this, in](Tape& t) {
      return nn::batch_norm({t, table_}, in, a_, group_, Activation::relu);
    };
    const Var out = step == 1 ? block(tape) : recompute(tape, block);
    wanted.expect(a_);
    out->grad = to_tensor(cotangent_, shape);
    tape.backward();  // replays the forward in steps 0 and 2
    wanted.expect(a_);
    Tape infer(Tape::Mode::infer);
    nn::batch_norm({infer, table_}, in, a_, group_, Activation::relu);
    wanted.expect(a_);
  }
}

// Where no backward follows, the result takes the place of x.
TEST_F(BatchNormTest, InferringOverwritesX) {
  table_.begin_step([](int) {});
  std::vector<float> results[2];
  for (const bool infers : {false, true}) {
    Tape tape(infers ? Tape::Mode::infer : Tape::Mode::discard);
    const Var in = make_var(to_tensor(x_, shape)), residual = make_var(to_tensor(other_, shape));
    const void* const x = in->value.raw();
    const Var out = nn::batch_norm({tape, table_}, in, a_, group_, Activation::relu, residual);
    EXPECT_EQ(out->value.raw() == x, infers);
    results[infers] = floats(out->value);
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(BatchNormTest, RecomputedPartsRepeatTheirBits) {
  std::vector<float> results[2];
  for (const bool again : {false, true}) {
    table_.begin_step([](int) {});
    Tape tape;
    const Var in = make_var(to_tensor(x_, shape));
    const auto block = [&, in](Tape& t) {
      const nn::Context c{t, table_};
      return nn::batch_norm(c, nn::batch_norm(c, in, a_, group_, Activation::relu), b_, group_,
                            Activation::none, in);
    };
    const Var out = again ? recompute(tape, block) : block(tape);
    out->grad = to_tensor(cotangent_, shape);
    tape.backward();
    table_.finish_step();
    for (const Tensor& t : {out->value, in->grad, a_.weight->grad, b_.bias->grad})
      for (const float v : floats(t)) results[again].push_back(v);
  }
  EXPECT_EQ(results[0], results[1]);
}

// Frozen weights get no gradient, and x that needs none gets none.
TEST_F(BatchNormTest, FrozenWeightsAndInputs) {
  const FrozenScope frozen(table_, "a.");
  Tape tape;
  const Var in = make_var(to_tensor(x_, shape), false),
            residual = make_var(to_tensor(other_, shape));
  const Var out = nn::batch_norm({tape, table_}, in, a_, group_, Activation::relu, residual);
  out->grad = to_tensor(cotangent_, shape);
  const Tensor y = out->value;
  tape.backward();
  EXPECT_FALSE(in->grad.defined());
  EXPECT_FALSE(a_.weight->grad_written);
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    EXPECT_EQ(residual->grad.data<float>()[i],
              y.data<float>()[i] > 0 ? static_cast<float>(cotangent_[i]) : 0.0f);
}

TEST_F(BatchNormTest, OnePositionHasNoVariance) {
  Tape tape;
  const Var one = make_var(to_tensor(random_values(C, 1), {1, 1, 1, 1, C}));
  EXPECT_THROW(nn::batch_norm({tape, table_}, one, a_, group_, Activation::relu), Error);
  group_.use_running = true;
  EXPECT_NO_THROW(nn::batch_norm({tape, table_}, one, a_, group_, Activation::relu));
}

// A dry run of a residual block finds the peak of the run, for a group of ranks too.
TEST_F(BatchNormTest, DryRunsFindThePeak) {
  const Shape large{2, 1, 33, 40, C};
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    table_.begin_step([](int) {});
    Tape tape;
    const nn::Context c{tape, table_};
    const Var x = make_var(Tensor::empty(large, DType::f32));
    if (!arena.is_planning()) std::fill_n(x->value.data<float>(), large.numel(), 0.5f);
    const Var h = nn::batch_norms(c, {{x, &a_, Activation::relu}}, group_)[0];
    const Var out = nn::batch_norm_add(c, {h, &b_}, {x, &a_}, group_, Activation::relu);
    out->grad = Tensor::empty(large, DType::f32);
    if (!arena.is_planning()) std::fill_n(out->grad.data<float>(), large.numel(), 0.5f);
    tape.backward();
    table_.finish_step();
    return arena.peak();
  };
  const auto planning = Arena::planning(), real = Arena::reserve(std::size_t{1} << 28);
  const std::size_t planned = peak(*planning);
  EXPECT_EQ(planned, peak(*real));
  group_.size = 8;  // no communicator: nothing is exchanged
  const auto of_group = Arena::planning();
  EXPECT_EQ(peak(*of_group), planned);
}

}  // namespace
}  // namespace weft::test
