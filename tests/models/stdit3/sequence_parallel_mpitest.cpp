// A model whose tokens are shared by all ranks against the same model on each rank alone: output,
// every gradient, loss and samples. Parts are uneven nearly everywhere: 405 tokens and 5 frames on
// 2, 3 and 4 ranks, and fewer frames than ranks.
#include <mpi.h>

#include <algorithm>

#include "core/error.h"
#include "models/stdit3/options.h"
#include "planned_step.h"

namespace weft::test {
namespace {

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

Vec summed(Vec v) {
  MPI_Allreduce(MPI_IN_PLACE, v.data(), static_cast<int>(v.size()), MPI_DOUBLE, MPI_SUM,
                MPI_COMM_WORLD);
  return v;
}

bool same_everywhere(Vec v) {
  Vec first = v;
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
  int same = first == v;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return same != 0;
}

// What one forward and backward gives: the output, and the gradients of every parameter, of x and
// of y.
struct Outcome {
  Vec out;
  std::vector<std::pair<std::string, Vec>> gradients;
};

Outcome run(Model& m, const Stdit3Input& in, const Vec& g) {
  Outcome o;
  ParameterTable& table = m.net.params();
  // What an earlier step left must not shine through where a rank skips a parameter.
  std::fill_n(table.grads().data<float>(), table.grads().numel(), 1e9f);
  table.begin_step([](int) {});
  table.set_counting(true);
  Tape tape;
  const Var x = make_var(in.x), y = make_var(in.captions.y);
  const Var out = m.net.forward(tape, in, x, y);
  o.out = to_values(out->value);
  out->grad = to_tensor(g, out->value.shape());
  tape.backward();
  table.finish_step();
  for (const auto& p : table.all())
    if (p->trainable) o.gradients.emplace_back(p->name, to_values(p->grad));
  o.gradients.emplace_back("x", to_values(x->grad));
  o.gradients.emplace_back("y", to_values(y->grad));
  return o;
}

struct Case {
  const char* name;
  Stdit3Config deck;
  Batch batch;
  double recompute = -1;
};

template <class F>
Case make(const char* name, F&& change) {
  Case c{name, tiny_model(), Batch{}, -1};
  c.deck.num_heads = 3;
  change(c);
  return c;
}

class SequenceGroups : public testing::Test {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 31);
  ArenaScope scope_{*arena_};
  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
};
class SequenceParallel : public SequenceGroups, public testing::WithParamInterface<Case> {};

// Shares of a tensor's length. Every token's own arithmetic is the same on any number of ranks, and
// its bits as a rule are too; a gradient that sums over tokens is f32 sums in another order. In
// bf16 each rank rounds its own part of such a sum.
double output_bound(const Stdit3Config& d) { return d.dtype == "bf16" ? 4 * 0x1p-9 : 1e-6; }
double gradient_bound(const Stdit3Config& d) { return d.dtype == "bf16" ? 8 * 0x1p-9 : 1e-5; }

TEST_P(SequenceParallel, AgreesWithOneRank) {
  const Case& c = GetParam();
  Model model(c.deck);
  Stdit3Input in = make_input(c.deck, c.batch);
  in.recompute = c.recompute;
  const Vec g = random_values(model.outputs(in), 55);
  const std::size_t before = arena_->used();
  const Outcome alone = run(model, in, g);
  model.net.set_sequence_group(world_.get());
  const Outcome shared = run(model, in, g);
  EXPECT_EQ(arena_->used(), before) << "something of the step stayed behind";

  EXPECT_LE(relative_error(shared.out, alone.out), output_bound(c.deck));
  EXPECT_TRUE(same_everywhere(shared.out)) << "ranks would compute different losses";
  double longest = 0;
  for (const auto& [name, gradient] : alone.gradients)
    longest = std::max(longest, std::sqrt(dot(gradient, gradient)));
  EXPECT_EQ(shared.gradients.size(), alone.gradients.size());
  for (std::size_t i = 0; i < alone.gradients.size(); ++i) {
    const auto& [name, expected] = alone.gradients[i];
    const Vec sum = summed(shared.gradients[i].second);
    const double length = std::sqrt(dot(expected, expected));
    // Gradients that are zero but for rounding (q and k of a frame alone) are held to the size of
    // the others.
    const double error = relative_error(sum, expected) * (length > 0 ? length : 1);
    const double relative = error / std::max(length, 1e-3 * longest);
    EXPECT_LE(relative, gradient_bound(c.deck)) << name << " of length " << length;
  }
}

void frames_of_405(Case& c, std::int64_t B, std::int64_t T) {
  c.batch.B = B;
  c.batch.T = T;
  c.batch.H = 30;
  c.batch.W = 54;
}

INSTANTIATE_TEST_SUITE_P(
    Configurations, SequenceParallel,
    testing::Values(make("plain", [](Case& c) { c.batch.W = 9; }),
                    make("S405_T5", [](Case& c) { frames_of_405(c, 2, 5); }),
                    make("S405_T2_one_sample", [](Case& c) { frames_of_405(c, 1, 2); }),
                    make("S405_images", [](Case& c) { frames_of_405(c, 2, 1); }),
                    make("one_image", [](Case& c) { c.batch.B = c.batch.T = 1; }),
                    make("one_clip_of_5", [](Case& c) { c.batch.B = 1, c.batch.T = 5; }),
                    make("masked_T5", [](Case& c) { c.batch.T = 5, c.batch.masked = true; }),
                    make("masked_T2_drop_path",
                         [](Case& c) {
                           c.batch.T = 2;
                           c.batch.masked = c.batch.dropped = true;
                         }),
                    make("half_recomputed",
                         [](Case& c) {
                           c.batch.masked = c.batch.dropped = true;
                           c.deck.recompute = 0.5;
                         }),
                    make("recomputed_for_this_input",
                         [](Case& c) {
                           c.batch.T = 2;
                           c.recompute = 1;
                         }),
                    make("only_train_temporal",
                         [](Case& c) {
                           c.deck.only_train_temporal = true;
                           c.batch.T = 2;
                         }),
                    make("a_sample_without_caption",
                         [](Case& c) {
                           c.batch.captions = {{}, {3, 0}, {}};
                         }),
                    make("absorbed",
                         [](Case& c) {
                           c.deck.hidden_size = 48;
                           c.batch.masked = true;
                         }),
                    make("patches_in_time",
                         [](Case& c) {
                           c.deck.patch_size = {2, 2, 2};
                           c.batch.T = 5;
                         }),
                    make("bf16",
                         [](Case& c) {
                           c.deck.hidden_size = 48;
                           c.deck.dtype = "bf16";
                           c.batch.T = 5;
                         })),
    [](const auto& one) { return std::string(one.param.name); });

// Counts the exchanges of a group.
class Counting : public Communicator {
 public:
  explicit Counting(Communicator& of) : of_(of) {}
  int rank() const override { return of_.rank(); }
  int size() const override { return of_.size(); }
  Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype) override {
    return of_.all_reduce_sum(t, comm_dtype);
  }
  Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype) override {
    return of_.reduce_scatter_sum(t, comm_dtype);
  }
  Ticket all_gather(Tensor t) override {
    ++count;
    return of_.all_gather(t);
  }
  Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                    std::span<const std::int64_t> to_counts) override {
    ++count;
    return of_.all_to_all(from, from_counts, to, to_counts);
  }
  double wait(Ticket ticket) override { return of_.wait(ticket); }
  void progress(std::int64_t step, Phase phase) override { of_.progress(step, phase); }
  void set_timeout(double seconds) override { of_.set_timeout(seconds); }
  void check() override { of_.check(); }
  std::string describe() const override { return of_.describe(); }

  int count = 0;

 private:
  Communicator& of_;
};

// Every bucket is announced once, in order, when its gradient is final, and between the same two
// exchanges on every rank: also by ranks that skip blocks.
TEST_F(SequenceGroups, BucketsAreAnnouncedAlikeOnAllRanks) {
  for (const std::int64_t T : {1, 2, 5})
    for (const double recompute : {0.0, 0.5}) {
      Stdit3Config deck = tiny_model();
      deck.recompute = recompute;
      Stdit3 net(deck);
      net.params().allocate(1, false, true);  // a bucket a parameter
      randomise(net.params(), 4);
      Counting group(*world_);
      net.set_sequence_group(&group);
      const Stdit3Input in = make_input(deck, {.T = T, .W = 9});
      ParameterTable& table = net.params();
      std::fill_n(table.grads().data<float>(), table.grads().numel(), 1e9f);
      const auto gradients_of = [&](std::size_t b) {
        return floats(table.grads().slice(table.buckets()[b].begin, table.buckets()[b].end));
      };
      Vec order;
      std::vector<std::vector<float>> announced;
      table.begin_step([&](int b) {
        order.insert(order.end(), {static_cast<double>(b), static_cast<double>(group.count)});
        announced.push_back(gradients_of(static_cast<std::size_t>(b)));
      });
      table.set_counting(true);
      Tape tape;
      const Var out = net.forward(tape, in);
      out->grad = to_tensor(random_values(out->value.numel(), 55), out->value.shape());
      tape.backward();
      EXPECT_EQ(announced.size(), table.buckets().size()) << "left for the end of the step";
      table.finish_step();
      EXPECT_TRUE(same_everywhere(order));
      // 2 * depth - 1 exchanges each way, and the gathering of the output.
      EXPECT_EQ(group.count, world_size() == 1 ? 0 : 7);
      for (std::size_t b = 0; b < announced.size(); ++b) {
        EXPECT_EQ(order[2 * b], static_cast<double>(b));
        EXPECT_EQ(announced[b], gradients_of(b)) << b;
      }
      const Part frames = nn::share_of(T, world_rank(), world_size());
      for (const auto& p : table.all()) {
        EXPECT_EQ(p->pending, 0) << p->name;
        // A frame alone attends to itself whatever q and k are.
        if (!p->trainable ||
            (p->name.starts_with("temporal_blocks.") && p->name.ends_with("_norm.weight")))
          continue;
        const Vec gradient = to_values(p->grad);
        const bool skipped = p->name.starts_with("spatial_blocks.") || p->name.starts_with("x_emb");
        EXPECT_EQ(dot(gradient, gradient) == 0, frames.size() == 0 && skipped) << p->name;
      }
    }
}

TEST_F(SequenceGroups, LossIsWholeOnEveryRankAndItsGradientIsShared) {
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  const Batch batch{.T = 2, .W = 9, .masked = true};
  const Stdit3Input in = make_input(deck, batch);
  const Tensor eps = to_tensor(random_values(in.x.numel(), 6), in.x.shape());
  Vec losses[2], gradients[2];
  for (const int shared : {0, 1}) {
    model.net.set_sequence_group(shared ? world_.get() : nullptr);
    model.net.params().begin_step([](int) {});
    Tape tape;
    losses[shared] = to_values(flow_loss(tape, model.net, in.x, eps, in, to_tensor({0.5}, {1})));
    tape.backward();
    model.net.params().finish_step();
    gradients[shared] = to_values(model.net.params().grads());
  }
  EXPECT_LE(relative_error(losses[1], losses[0]), 1e-6);
  EXPECT_TRUE(same_everywhere(losses[1]));
  EXPECT_LE(relative_error(summed(gradients[1]), gradients[0]), 1e-5);
}

TEST_F(SequenceGroups, SamplesAreThoseOfOneRank) {
  Stdit3Config deck = tiny_model();
  deck.num_heads = 3;
  Model model(deck);
  SamplerDeck sampler;
  sampler.steps = 4;
  for (const bool conditioned : {false, true}) {
    Vec results[2];
    for (const int shared : {0, 1}) {
      model.net.set_sequence_group(shared ? world_.get() : nullptr);
      SampleRequest request;
      const Shape shape{2, deck.in_channels, 3, 30, 54};
      request.z = to_tensor(random_values(shape.numel(), 31), shape);
      request.y = to_tensor(random_values(2 * 3 * deck.caption_channels, 32),
                            {2, 3, deck.caption_channels});
      const std::vector<std::int64_t> mask = {1, 1, 1, 1, 0, 0};
      request.captions = pack_captions(mask, 3, 2, false);
      request.fps = {24, 12};
      request.size = {240, 432, 9};
      if (conditioned) request.edit = {0, 1, 1, 0, 0.6f, 1};
      request.fresh_noise = [](int step, Tensor& noise) {
        const Tensor n =
            to_tensor(random_values(noise.numel(), 40 + std::uint64_t(step)), noise.shape());
        std::copy_n(n.data<float>(), n.numel(), noise.data<float>());
      };
      results[shared] = to_values(flow_sample(model.net, sampler, DiffusionDeck{}, request));
    }
    const double error = relative_error(results[1], results[0]);
    EXPECT_LE(error, 4e-6);
    EXPECT_TRUE(same_everywhere(results[1]));
  }
}

// The blocks begin with a share of the frames and end with a share of the tokens, and so does what
// a step cache keeps of them.
TEST_F(SequenceGroups, SamplesWithAStepCacheAreThoseOfOneRank) {
  Stdit3Config deck = tiny_model();
  deck.num_heads = 3;
  Model model(deck);
  SamplerDeck sampler;
  sampler.steps = 6;
  sampler.solver = "unipc";
  for (const char* cache : {"teacache", "easycache"})
    for (const bool conditioned : {false, true}) {
      sampler.cache = cache;
      sampler.cache_threshold = 1000;
      Vec results[2];
      std::int64_t skipped[2] = {0, 0};
      for (const int shared : {0, 1}) {
        model.net.set_sequence_group(shared ? world_.get() : nullptr);
        SampleRequest request;
        const Shape shape{2, deck.in_channels, 3, 30, 54};
        request.z = to_tensor(random_values(shape.numel(), 31), shape);
        request.captions = pack_captions({}, 3, 2, true);
        request.fps = {24, 12};
        request.size = {240, 432, 9};
        if (conditioned) request.edit = {0, 1, 1, 0, 1, 1};
        request.skipped = &skipped[shared];
        results[shared] = to_values(flow_sample(model.net, sampler, DiffusionDeck{}, request));
      }
      EXPECT_EQ(skipped[0], std::string(cache) == "teacache" ? 4 : 3);
      EXPECT_EQ(skipped[1], skipped[0]);
      EXPECT_LE(relative_error(results[1], results[0]), 1e-5);
      EXPECT_TRUE(same_everywhere(results[1]));
    }
}

// Groups of two: each has clips of its own.
TEST_F(SequenceGroups, GroupsWorkSideBySide) {
  const int ranks = world_size() % 2 == 0 ? 2 : 1;
  const auto group = nn::make_sequence_group(MPI_COMM_WORLD, ranks);
  EXPECT_EQ(group == nullptr, ranks == 1);
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  Stdit3Input in = make_input(deck, {.T = 5, .W = 9});
  const Vec x = random_values(in.x.numel(), 70 + static_cast<std::uint64_t>(world_rank() / ranks));
  in.x = to_tensor(x, in.x.shape());
  const Vec alone = model(in);
  model.net.set_sequence_group(group.get());
  EXPECT_EQ(model.net.sequence_group().alone(), ranks == 1);
  EXPECT_LE(relative_error(model(in), alone), 1e-6);
}

TEST_F(SequenceGroups, WhatCannotBeSharedIsRefused) {
  const auto code_of = [](const auto& f) {
    try {
      f();
    } catch (const Error& e) {
      return e.code();
    }
    return Exit::done;
  };
  EXPECT_EQ(code_of([] { nn::make_sequence_group(MPI_COMM_WORLD, 64); }), Exit::usage);
  Stdit3 net(tiny_model());
  EXPECT_EQ(code_of([&] { net.check_sequence(3, 5, 6); }), Exit::done);
  EXPECT_EQ(code_of([&] { net.check_sequence(3, 5, 7); }), Exit::usage);
}

// Each rank's own peak, to the byte.
TEST_F(SequenceGroups, PlannedPeakIsTheRealPeak) {
  for (const double recompute : {0.0, 0.5, 1.0}) {
    Stdit3Config deck = tiny_model();
    deck.recompute = recompute;
    Model model(deck);
    const Batch batch{.B = recompute == 0 ? 1 : 2, .T = 2, .H = 30, .W = 54, .dropped = true};
    const auto planning = Arena::planning(), real = Arena::reserve(std::size_t{1} << 28);
    model.net.set_sequence_group(world_.get());
    const std::size_t planned = peak_of_step(*planning, model, batch);
    EXPECT_EQ(planned, peak_of_step(*real, model, batch)) << recompute;
    const auto again = Arena::planning();
    EXPECT_EQ(planned, peak_of_step(*again, model, batch));
  }
}

}  // namespace
}  // namespace weft::test
