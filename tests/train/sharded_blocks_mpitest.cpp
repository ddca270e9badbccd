// parallel.zero = 3 beside 1 over 1, 2 and 3 ranks: the same weights, whatever each rank has to do.
#include "train/sharded_blocks.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "nn/nn.h"
#include "ops/pointwise.h"
#include "train/data_parallel.h"

namespace weft {
namespace {

constexpr int blocks = 5, width = 320, rows = 4;

// A chain of blocks between a stem and a head, trained on waves.
class Chain {
 public:
  Chain(int zero, bool bf16_model, Communicator& comm, bool overlap = true,
        const std::string& wire = "f32")
      : comm_(comm) {
    add("stem");
    for (int i = 0; i < blocks; ++i) add("blocks." + std::to_string(i));
    add("head");
    ParallelDeck deck;
    deck.zero = zero;
    deck.overlap = overlap;
    deck.wire = wire;
    table.allocate(1, bf16_model, true,
                   sharding_of(deck, table, {"blocks."}, comm.rank(), comm.size()));
    table.initialise(3);
    parallel =
        std::make_unique<DataParallel>(deck, comm, table, [](std::function<void()> act) { act(); });
    parallel->make_state(true, {0.9});
    parallel->spread_weights();
  }

  // A step in which this rank has so many micro-batches, the one with the most `most`.
  void step(int mine, int most, bool recomputed = false) {
    Tensor local = Tensor::empty({1}, DType::f64), reported = Tensor::empty({1}, DType::f64),
           squares = Tensor::empty({1}, DType::f64);
    ops::fill_zero(reported);
    ops::fill_zero(squares);
    parallel->begin_step(local);
    for (int i = 0; i < (parallel->in_lockstep() ? most : mine); ++i) {
      if (i >= mine) {
        parallel->pass_without_clips();
        continue;
      }
      parallel->begin_micro_batch();
      const CountingScope counted(table, i + 1 == (parallel->in_lockstep() ? most : mine));
      Tape tape;
      const Var y = forward(tape, static_cast<int>(done_) * 10 + comm_.rank() * 3 + i, recomputed);
      y->grad = wave(rows, 17 + static_cast<int>(done_) + i, y->value.dtype());
      tape.backward();
    }
    table.finish_step();
    parallel->join();
    parallel->norm(reported, squares);
    TrainDeck train;
    train.lr = 1e-2;
    train.warmup_steps = 0;
    parallel->update(std::span(&train, 1), done_++, squares);
  }

  // A forward without a backward; the sum of its result.
  double look(int seed) {
    Tape tape(Tape::Mode::infer);
    const Tensor y = forward(tape, seed, false)->value;
    Tensor wide = Tensor::empty(y.shape(), DType::f32);
    ops::convert(y, wide);
    double sum = 0;
    for (const float v : wide.span<float>()) sum += v;
    return sum;
  }

  // f32 masters, and averages, of what this rank has of each parameter in `parts`' division.
  std::vector<float> owned(const Chain& parts) const {
    std::vector<float> all;
    for (const auto& p : parts.table.all()) {
      const Parameter& mine = *table.find(p->name);
      const Part held = p->sharded ? p->owned : Part{0, p->shape.numel()};
      for (const bool average : {false, true}) {
        // Parts of whole parameters differ with the layout: their weights alone.
        if (!p->sharded && average) continue;
        const auto values = p->sharded ? of_state(mine, held, average) : whole(mine);
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  }

  ParameterTable table;
  std::unique_ptr<DataParallel> parallel;

 private:
  void add(const std::string& name) {
    nn::Linear l;
    l.weight = &table.add(name + ".weight", {width, width}, {Init::Kind::normal, 0.05f});
    l.bias = &table.add(name + ".bias", {width}, {Init::Kind::normal, 0.05f});
    l.weight->bf16_only = true;
    layers_.push_back(l);
  }
  static Tensor wave(int count, int seed, DType dtype) {
    Tensor t = Tensor::empty({count, width}, DType::f32);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<float>()[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i) + seed));
    if (dtype == DType::f32) return t;
    Tensor low = Tensor::empty(t.shape(), dtype);
    ops::convert(t, low);
    return low;
  }
  Var forward(Tape& tape, int seed, bool recomputed) {
    Var x = make_var(wave(rows, seed, table.working().defined() ? DType::bf16 : DType::f32));
    for (const nn::Linear& l : layers_) {
      const auto part = [this, x, l](Tape& t) { return nn::linear({t, table}, x, l, x); };
      x = recomputed && tape.recording() ? recompute(tape, part) : part(tape);
    }
    return x;
  }
  // Collected from the ranks that have it.
  std::vector<float> of_state(const Parameter& p, Part range, bool average) const {
    std::vector<float> values(static_cast<std::size_t>(p.shape.numel()), 0);
    const OptimizerState& state = parallel->state();
    const Part part = state.part(p.bucket);
    const Tensor from = average ? state.ema(p.bucket) : state.master(p.bucket);
    for (std::int64_t i = 0; i < p.shape.numel(); ++i)
      if (const std::int64_t at = p.offset + i; at >= part.begin && at < part.end)
        values[static_cast<std::size_t>(i)] = from.data<float>()[at - part.begin];
    // Each element is on one rank only if the state is sharded.
    if (state.sharded())
      MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT,
                    MPI_SUM, MPI_COMM_WORLD);
    return {values.begin() + range.begin, values.begin() + range.end};
  }
  std::vector<float> whole(const Parameter& p) const {
    return of_state(p, {0, p.shape.numel()}, false);
  }

  Communicator& comm_;
  std::vector<nn::Linear> layers_;
  std::int64_t done_ = 0;
};

class ShardedBlocksTest : public testing::Test {
 protected:
  ShardedBlocksTest() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  }
  // Collective: equal on every rank.
  static bool everywhere(bool good) {
    int all = good ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all != 0;
  }
  static void expect_same(const Chain& one, const Chain& other, const std::string& what) {
    const std::vector<float> a = one.owned(other), b = other.owned(other);
    EXPECT_TRUE(everywhere(a.size() == b.size() &&
                           std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0))
        << what;
  }
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 28);
  ArenaScope scope_{*arena_};
  std::unique_ptr<Communicator> comm_ = make_communicator(MPI_COMM_WORLD);
  int rank_ = 0, ranks_ = 1;
};

TEST_F(ShardedBlocksTest, OneMicroBatchARankGivesTheBitsOfZero1) {
  for (const bool bf16_model : {false, true})
    for (const bool overlap : {true, false}) {
      const std::string wire = overlap ? "f32" : "bf16";
      Chain whole(1, bf16_model, *comm_, overlap, wire);
      Chain parts(3, bf16_model, *comm_, overlap, wire);
      EXPECT_EQ(parts.table.sharded_buckets(), ranks_ > 1 ? blocks : 0);
      for (int step = 0; step < 4; ++step) {
        whole.step(1, 1);
        parts.step(1, 1, step % 2 == 1);
      }
      whole.parallel->settle();
      parts.parallel->settle();
      expect_same(whole, parts, bf16_model ? "bf16" : "f32");
    }
}

TEST_F(ShardedBlocksTest, RanksWithLessToDoPassAlong) {
  Chain whole(1, false, *comm_), parts(3, false, *comm_);
  for (int step = 0; step < 3; ++step) {
    const int mine = (rank_ + step) % 3;  // none, one or two
    const int most = ranks_ == 3 ? 2 : ranks_ == 2 ? std::max(step % 3, (step + 1) % 3) : step;
    whole.step(mine, most);
    parts.step(mine, most);
  }
  whole.parallel->settle();
  parts.parallel->settle();
  const std::vector<float> a = whole.owned(parts), b = parts.owned(parts);
  ASSERT_TRUE(everywhere(a.size() == b.size()));
  double off = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += std::pow(a[i] - b[i], 2);
    size += double{a[i]} * a[i];
  }
  // Sums in another order: AdamW turns roundings of small gradients into parts of a step.
  EXPECT_TRUE(everywhere(off <= 1e-6 * size)) << off / size;
}

TEST_F(ShardedBlocksTest, ForwardsBetweenStepsLeaveNoTrace) {
  Chain whole(1, false, *comm_), parts(3, false, *comm_);
  for (int step = 0; step < 3; ++step) {
    whole.step(1, 1);
    parts.step(1, 1);
    whole.parallel->settle();
    parts.parallel->begin_passes(false);
    // Each rank its own number of them, perhaps none.
    bool same = true;
    for (int i = 0; i < (rank_ + step) % 3; ++i) same = same && whole.look(i) == parts.look(i);
    parts.parallel->end_passes();
    parts.parallel->end_passes();  // no more is said
    EXPECT_TRUE(everywhere(same));
  }
  expect_same(whole, parts, "after forwards");
}

TEST_F(ShardedBlocksTest, WhatItDoesNotShare) {
  ParallelDeck deck;
  deck.zero = 3;
  ParameterTable table;
  table.add("blocks.0.weight", {4}, {});
  EXPECT_THROW(sharding_of(deck, table, {}, 0, 2), Error) << "no blocks";
  EXPECT_FALSE(sharding_of(deck, table, {"blocks."}, 0, 1)) << "one rank";
  EXPECT_TRUE(sharding_of(deck, table, {"blocks."}, 0, 2));
  table.add("blocks.0.lora_A", {4}, {}).role = Parameter::Role::adapter;
  EXPECT_FALSE(sharding_of(deck, table, {"blocks."}, 0, 2)) << "adapters";
  deck.zero = 1;
  EXPECT_FALSE(sharding_of(deck, table, {}, 0, 2));
}

}  // namespace
}  // namespace weft
