// Batch norm over ranks of uneven shares against fp64 over all of them in one place: values,
// gradients, running statistics, and how often ranks talk.
#include "nn/batch_norm.h"

#include <mpi.h>

#include "batch_norm_reference.h"
#include "fixture.h"

namespace weft::test {
namespace {

using nn::Activation;

// Counts the sums over all ranks.
class Counting final : public Communicator {
 public:
  explicit Counting(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  int sums = 0;

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Ticket all_reduce_sum(Tensor t, CommDtype dtype) override {
    ++sums;
    return inner_->all_reduce_sum(std::move(t), dtype);
  }
  Ticket reduce_scatter_sum(Tensor t, CommDtype dtype) override {
    return inner_->reduce_scatter_sum(std::move(t), dtype);
  }
  Ticket all_gather(Tensor t) override { return inner_->all_gather(std::move(t)); }
  Ticket all_to_all(Tensor from, std::span<const std::int64_t> give, Tensor to,
                    std::span<const std::int64_t> get) override {
    return inner_->all_to_all(std::move(from), give, std::move(to), get);
  }
  double wait(Ticket ticket) override { return inner_->wait(ticket); }
  void progress(std::int64_t step, Phase phase) override { inner_->progress(step, phase); }
  void set_timeout(double seconds) override { inner_->set_timeout(seconds); }
  void check() override { inner_->check(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  std::unique_ptr<Communicator> inner_;
};

constexpr std::size_t C = 6;
constexpr std::size_t still = 1, faint = 2;  // channels of variance 0, and of one below eps

// Rank 1 has one position; rank 0 has enough for an ordinary batch norm where it is alone.
std::size_t positions_of(int rank) { return rank == 1 ? 1 : 5 + static_cast<std::size_t>(rank); }

class RanksBatchNorm : public OpTest {
 protected:
  RanksBatchNorm() {
    group_.ranks = &world_;
    group_.size = world_.size();
    table_.allocate(1 << 16, false, true);
    table_.initialise(1);
    randomise_batch_norm(a_, 11);
    randomise_batch_norm(b_, 12);
    table_.begin_step([](int) {});
  }

  // Values of all ranks' positions, a function of `stream`; and where this rank's lie.
  static Vec values(int ranks, std::uint64_t stream) {
    Vec v;
    for (int r = 0; r < ranks; ++r)
      for (const double x : random_values(static_cast<std::int64_t>(positions_of(r) * C),
                                          stream + static_cast<std::uint64_t>(r), 2))
        v.push_back(x);
    return v;
  }
  Vec all_x(std::uint64_t stream) const {
    Vec x = values(group_.size, stream);
    for (std::size_t i = 0; i < x.size(); i += C) x[i + still] = 0.75, x[i + faint] *= 5e-4;
    return rounded(x, DType::f32);
  }
  Vec mine(const Vec& all) const {
    std::size_t first = 0;
    for (int r = 0; r < world_.rank(); ++r) first += positions_of(r) * C;
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return {begin, begin + static_cast<std::ptrdiff_t>(positions_of(world_.rank()) * C)};
  }
  Tensor share(const Vec& all) const {
    const Vec v = mine(all);
    return to_tensor(v, {1, 1, std::int64_t(v.size() / C), 1, std::int64_t{C}});
  }
  // What the ranks' gradients add up to.
  Vec summed(const Tensor& gradient) {
    Vec v = to_values(gradient);
    world_.wait(world_.all_reduce_sum(
        Tensor::borrow(v.data(), {std::int64_t(v.size())}, DType::f64), CommDtype::f32));
    return v;
  }
  bool synchronised() const { return group_.size > 1; }

  Counting world_{make_mpi_communicator(MPI_COMM_WORLD)};
  nn::BatchNormGroup group_;
  ParameterTable table_;
  const nn::BatchNorm a_ = add_batch_norm(table_, "a", C),
                      b_ = add_batch_norm(table_, "b", C, 0, 0.1f);
};

TEST_F(RanksBatchNorm, AgreesWithOneProcessThatHasAllPositions) {
  Vec gamma = to_values(a_.weight->value), beta = to_values(a_.bias->value);
  RunningReference running(C);
  for (std::uint64_t step = 0; step < 3; ++step) {
    Vec x = all_x(100 * step), residual = values(group_.size, 100 * step + 20);
    const Vec cotangent = values(group_.size, 100 * step + 40);
    const auto reference = [&] {
      return activated(sum(normalised(x, gamma, beta, synchronised()), residual), Activation::relu);
    };
    const auto loss = [&] { return dot(reference(), cotangent); };
    table_.begin_step([](int) {});
    Tape tape;
    const Var in = make_var(share(x)), other = make_var(share(residual));
    const auto block = [&, in, other](Tape& t) {
      return nn::batch_norm({t, table_}, in, a_, group_, Activation::relu, other);
    };
    world_.sums = 0;
    const bool again = step == 1;
    const Var out = again ? recompute(tape, block) : block(tape);
    running.step(moments_of(x, C), 0.001f, synchronised());
    running.expect(a_);
    EXPECT_LT(relative_error(to_values(out->value), mine(reference())), 1e-6);
    out->grad = share(cotangent);
    tape.backward();
    table_.finish_step();
    EXPECT_EQ(world_.sums, synchronised() ? again ? 3 : 2 : 0);
    running.expect(a_);
    // Small steps: where the variance is clamped a difference of 1e-5 in x is not small.
    EXPECT_LT(relative_error(to_values(in->grad), mine(differences(x, loss, 1e-7))), 2e-5);
    EXPECT_LT(relative_error(to_values(other->grad), mine(differences(residual, loss))), 1e-5);
    EXPECT_LT(relative_error(summed(a_.weight->grad), differences(gamma, loss)), 1e-5);
    EXPECT_LT(relative_error(summed(a_.bias->grad), differences(beta, loss)), 1e-5);
  }
}

// The sums of several layers travel together, with the results of layers on their own.
TEST_F(RanksBatchNorm, IndependentLayersShareAnExchange) {
  const Vec x = all_x(1), z = all_x(31), cotangent = values(group_.size, 61);
  for (const bool added : {false, true}) {
    std::vector<float> results[2];
    for (const bool together : {false, true}) {
      table_.begin_step([](int) {});
      world_.sums = 0;
      Tape tape;
      const nn::Context c{tape, table_};
      const Var in = make_var(share(x)), other = make_var(share(z));
      std::vector<Var> out;
      if (added && together) {
        out = {nn::batch_norm_add(c, {in, &a_}, {other, &b_}, group_, Activation::relu)};
      } else if (added) {
        const Var b = nn::batch_norm(c, other, b_, group_, Activation::none);
        out = {nn::batch_norm(c, in, a_, group_, Activation::relu, b)};
      } else if (together) {
        out = nn::batch_norms(c, {{in, &a_, Activation::relu}, {other, &b_, Activation::none}},
                              group_);
      } else {
        out = {nn::batch_norm(c, in, a_, group_, Activation::relu),
               nn::batch_norm(c, other, b_, group_, Activation::none)};
      }
      for (const Var& v : out) v->grad = share(cotangent);
      tape.backward();
      table_.finish_step();
      EXPECT_EQ(world_.sums, synchronised() ? together ? 2 : 4 : 0);
      for (const Var& v : out)
        for (const float f : floats(v->value)) results[together].push_back(f);
      for (const Tensor& t :
           {in->grad, other->grad, a_.weight->grad, b_.weight->grad, a_.bias->grad, b_.bias->grad})
        for (const float f : floats(t)) results[together].push_back(f);
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    for (std::size_t i = 0; i < results[0].size(); ++i)
      EXPECT_NEAR(results[0][i], results[1][i], 1e-5 * (1 + std::abs(results[0][i])));
  }
}

// Fixed statistics need nobody.
TEST_F(RanksBatchNorm, RunningStatisticsNeedNoExchange) {
  group_.use_running = true;
  world_.sums = 0;
  Tape tape;
  const Var out =
      nn::batch_norm({tape, table_}, make_var(share(all_x(1))), a_, group_, Activation::relu);
  out->grad = share(all_x(2));
  tape.backward();
  EXPECT_EQ(world_.sums, 0);
  EXPECT_EQ(group_.blocked_seconds, 0);
}

}  // namespace
}  // namespace weft::test
