// Dry runs and formulas against the tables of docs/plan.md: traffic of a block, machine constants,
// expected maximum.
#include "plan/step_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "models/stdit3/task.h"
#include "plan/plan.h"
#include "train/data_parallel.h"

namespace weft {
namespace {

using testing::HasSubstr;

// STDiT3-XL/2 in bf16, and clips of T frames of S tokens with captions of 300.
struct Xl2 {
  Deck deck;
  std::unique_ptr<Stdit3Task> task;
  AbsentRanks sharing{1, 2};

  explicit Xl2(bool shared = false) {
    deck.model.dtype = "bf16";
    deck.get<Stdit3Deck>().freeze_y_embedder = true;
    task = std::make_unique<Stdit3Task>(deck);
    task->share_clips(shared ? &sharing : nullptr);
    task->params().allocate(1 << 22, true, true);
  }
  MicroBatchCost cost(std::int64_t clips, std::int64_t T, std::int64_t S, double recompute = 0) {
    const Rates ideal{790e12, 790e12, 790e12, 4.3e12, 0, "ideal"};
    Bucket b;
    b.clips = clips;
    b.channels = 4;
    b.dtype = DType::f32;
    b.frames = T;
    b.height = S == 256 ? 32 : S == 1590 ? 60 : 90;
    b.width = 4 * S / b.height;
    b.pixel_frames = 51, b.pixel_height = 8 * b.height, b.pixel_width = 8 * b.width;
    return dry_run_cost(*task, b, clips, recompute, DeviceKind::cuda, ideal, 370e9);
  }
};

// Against docs/plan.md, Traffic of a block: sums by hand for operations whose gates, residuals and
// modulations cost nothing of their own, so that the model's own code takes a little longer.
TEST(DryRun, RooflineTable) {
  struct Row {
    std::int64_t clips, T, S;
    double forward, backward;  // ms
  };
  const Row rows[] = {{1, 4, 256, 3.0, 6.2},   {20, 15, 256, 228, 465}, {5, 15, 1590, 378, 785},
                      {2, 30, 1590, 303, 628}, {2, 15, 3600, 378, 800}, {1, 30, 3600, 378, 800}};
  Xl2 model;
  for (const Row& r : rows) {
    const MicroBatchCost c = model.cost(r.clips, r.T, r.S);
    EXPECT_GE(1e3 * c.forward, 0.99 * r.forward) << r.T << "x" << r.S;
    EXPECT_LE(1e3 * c.forward, 1.13 * r.forward) << r.T << "x" << r.S;
    EXPECT_GE(1e3 * c.backward, 0.99 * r.backward) << r.T << "x" << r.S;
    EXPECT_LE(1e3 * c.backward, 1.07 * r.backward) << r.T << "x" << r.S;
  }
}

// Three times the forward's operations (docs/models/stdit3.md, Operations), as the model itself
// counts them.
TEST(DryRun, Flops) {
  Xl2 model;
  const MicroBatchCost c = model.cost(1, 15, 1590);
  EXPECT_NEAR(c.flops, 169.5e12, 0.01 * 169.5e12);
  EXPECT_NEAR(c.flops, 3 * model.task->model().forward_flops(15, 1590, 300), 5e-3 * c.flops);
}

TEST(DryRun, RecomputationAndSequenceParallelism) {
  const MicroBatchCost half = Xl2().cost(2, 30, 1590, 0.5);
  EXPECT_NEAR(half.again, 0.5 * half.forward, 0.02 * half.forward);
  EXPECT_EQ(half.exchange, 0);
  const MicroBatchCost shared = Xl2(true).cost(2, 30, 1590, 0.5);
  // Half the tokens, but the captions whole, and pieces that are packed. The cut changes before
  // every block but the first, forward and backward; then the output is gathered.
  EXPECT_NEAR(shared.forward, half.forward / 2, 0.05 * half.forward);
  EXPECT_NEAR(shared.exchange, 2 * 55 * (2.0 * 1152 * 47700) / 2 / 370e9, 0.01 * shared.exchange);
}

CommModel comm(const std::string& fabric, double share, bool hierarchical) {
  CommModel c{128, described_machine(fabric, 141), hierarchical};
  c.machine.card_share = share;
  c.machine.link_latency = c.machine.card_latency = 0;
  return c;
}

TEST(CommModel, AllReduceTable) {
  struct Row {
    const char* fabric;
    double share, flat, hierarchical;  // ms, in bf16; f32 takes twice that
  };
  const Row rows[] = {{"8x400", 1, 11.9, 11.4},
                      {"8x400", 0.92, 13.0, 12.2},
                      {"1x200", 1, 191, 180},
                      {"1x200", 0.92, 207, 196}};
  const double bytes = 2 * 1.2016e9;
  for (const Row& r : rows) {
    EXPECT_NEAR(1e3 * comm(r.fabric, r.share, false).all_reduce(bytes), r.flat, 0.005 * r.flat);
    EXPECT_NEAR(1e3 * comm(r.fabric, r.share, true).all_reduce(bytes), r.hierarchical,
                0.005 * r.hierarchical);
    EXPECT_DOUBLE_EQ(comm(r.fabric, r.share, true).all_reduce(2 * bytes),
                     2 * comm(r.fabric, r.share, true).all_reduce(bytes));
  }
}

// parallel.wire = "bf16": half the bytes inside a node; over nodes f32 inside and half of it
// between, one after the other.
TEST(CommModel, GradientsInBf16) {
  CommModel c = comm("1x200", 1, true);
  const double elements = 1e9, inside = 7.0 / 8 * 4e9 / 370e9, between = 15.0 / 16 * 4e9 / 25e9;
  EXPECT_DOUBLE_EQ(c.sum_gradients(elements, false, false), c.reduce_scatter(4e9));
  EXPECT_NEAR(c.sum_gradients(elements, true, false), inside + between / 2, 1e-6);
  EXPECT_NEAR(c.sum_gradients(elements, true, true), inside + between, 1e-6);
  c.ranks = 8;
  EXPECT_DOUBLE_EQ(c.sum_gradients(elements, true, false), c.reduce_scatter(2e9));
}

TEST(CommModel, OneRankAndOneNode) {
  CommModel c{1, described_machine("8x400", 141)};
  EXPECT_EQ(c.all_reduce(1e9), 0);
  c.ranks = 8;
  EXPECT_EQ(c.nodes(), 1);
  EXPECT_NEAR(c.reduce_scatter(1e9), 7.0 / 8 * 1e9 / 370e9, 1e-4);
  c.ranks = 9;
  EXPECT_EQ(c.nodes(), 2);
  EXPECT_EQ((CommModel{9, described_machine("4x400", 80, 4)}.nodes()), 3);
}

TEST(CommModel, FabricsThatAreNone) {
  for (const char* fabric :
       {"8xnan", "nanx400", "infx400", "8xinf", "0x400", "8x0", "1.5x400", "8"})
    EXPECT_THROW(described_machine(fabric, 80), Error) << fabric;
}

TEST(Machine, Fabrics) {
  EXPECT_DOUBLE_EQ(described_machine("8x400", 141).node_bandwidth(), 0.92 * 400e9);
  EXPECT_DOUBLE_EQ(described_machine("1x200", 141).node_bandwidth(), 0.92 * 25e9);
  EXPECT_EQ(described_machine("4x100", 80).cards_a_node, 4);
  EXPECT_DOUBLE_EQ(described_machine("4x100", 80).memory_bytes, 80e9);
  for (const char* bad : {"8x", "x400", "eight", "0x400", "8x-1", "8x400x2", "2.5x100", ""}) {
    try {
      described_machine(bad, 141);
      FAIL() << bad;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_FALSE(e.hint().empty());
    }
  }
  try {
    described_machine("8x40O", 141);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.hint(), HasSubstr("8x400"));
  }
}

// docs/plan.md, Machine constants: 5 clips of 51 frames at 480p, 2.15 s a step at half of 790
// TFLOP/s, 56 buckets: 99.8 % with overlap, 91.2 % without.
TEST(StepTime, OverlapAndItsLack) {
  std::vector<BucketSchedule> buckets;
  for (int i = 0; i < 56; ++i)
    buckets.push_back(
        {static_cast<std::int64_t>(1.2016e9 / 56), true, (i + 1) / 56.0, (55 - i) / 56.0});
  const MicroBatchCost work{2.15 / 3, 2.15 * 2 / 3, 0, 0, 0};
  ParallelDeck deck;
  deck.wire = "bf16";
  const auto efficiency = [&](bool overlap, int zero) {
    deck.overlap = overlap;
    deck.zero = zero;
    const StepTime t =
        step_time(std::span(&work, 1), buckets, comm("1x200", 0.92, true), deck, true, 1e15);
    return t.compute / (t.compute + t.exposed());
  };
  EXPECT_NEAR(efficiency(true, 0), 0.998, 0.001);
  EXPECT_NEAR(efficiency(false, 0), 0.912, 0.006);  // the table's serial column is of a flat ring
  EXPECT_GT(efficiency(true, 1), 0.997);
  EXPECT_NEAR(efficiency(false, 1), 0.912, 0.006);
}

TEST(StepTime, WhatCannotBeHidden) {
  ParallelDeck deck;
  CommModel c{8, described_machine("8x400", 141)};
  c.machine.link_latency = 0;
  const double takes = c.reduce_scatter(4e9);
  const std::vector<BucketSchedule> all_at_the_end{{1000000000, false, 1, 0}};
  const std::vector<MicroBatchCost> work{{1, 2, 0, 0, 0}, {1, 2, 0, 0, 0}};
  StepTime t = step_time(work, all_at_the_end, c, deck, false, 1e12);
  EXPECT_DOUBLE_EQ(t.compute, 6);
  EXPECT_NEAR(t.exposed_reduce, takes, 1e-9);  // complete when the backward is
  EXPECT_NEAR(t.exposed_gather, takes, 1e-9);  // and needed at once
  EXPECT_NEAR(t.optimizer, 1e9 / 8 * optimizer_bytes_an_element / 1e12, 1e-12);
  t = step_time(work, std::vector<BucketSchedule>{{1000000000, false, 0.1, 0.9}}, c, deck, false,
                1e12);
  EXPECT_EQ(t.exposed(), 0);
  // A rank without work has nothing to hide behind.
  t = step_time({}, std::vector<BucketSchedule>{{1000000000, false, 0.1, 0.9}}, c, deck, false,
                1e12);
  EXPECT_NEAR(t.exposed(), 2 * takes, 1e-9);
  deck.zero = 0;
  t = step_time(work, all_at_the_end, c, deck, false, 1e12);
  EXPECT_NEAR(t.exposed_reduce, 2 * takes, 1e-9);
  EXPECT_EQ(t.gather, 0);
  EXPECT_NEAR(t.optimizer, 1e9 * optimizer_bytes_an_element / 1e12, 1e-12);
}

// parallel.zero = 3: four blocks in parts, a whole bucket at the end.
TEST(StepTime, BlocksInParts) {
  ParallelDeck deck;
  deck.zero = 3;
  CommModel c{8, described_machine("8x400", 141)};
  c.machine.link_latency = 0;
  std::vector<BucketSchedule> buckets;
  for (int b = 0; b < 4; ++b)
    buckets.push_back({1000000000, true, (b + 1) / 4.0, (3 - b) / 4.0, true});
  const double gather = c.all_gather(2e9), sum = c.reduce_scatter(4e9);
  const MicroBatchCost slow{400, 800, 0, 0, 0}, none{};
  // Under enough work only the first gather, which the update hides, and the last sum are seen.
  StepTime t = step_time(std::span(&slow, 1), buckets, c, deck, true, 1e9);
  EXPECT_NEAR(t.gather, 6 * gather, 1e-9) << "two of four are still there when the forward turns";
  EXPECT_NEAR(t.reduce, 4 * sum, 1e-9);
  EXPECT_NEAR(t.exposed_gather, 0, 1e-9);
  EXPECT_NEAR(t.exposed_reduce, sum, 1e-9);
  EXPECT_NEAR(step_time(std::span(&slow, 1), buckets, c, deck, true, 1e15).exposed_gather, gather,
              1e-3);
  const std::vector<MicroBatchCost> twice{slow, slow};
  t = step_time(twice, buckets, c, deck, true, 1e9);
  EXPECT_NEAR(t.gather, (6 + 4) * gather, 1e-9) << "and two when it begins again";
  EXPECT_NEAR(t.reduce, 8 * sum, 1e-9);
  EXPECT_NEAR(t.exposed(), sum, 1e-9);
  // Without work, or without overlap, all of it.
  t = step_time(std::span(&none, 1), buckets, c, deck, true, 1e15);
  EXPECT_NEAR(t.exposed(), 6 * gather + 4 * sum, 1e-3);
  deck.overlap = false;
  t = step_time(std::span(&slow, 1), buckets, c, deck, true, 1e15);
  EXPECT_NEAR(t.exposed(), 6 * gather + 4 * sum, 1e-3);
}

// What a plan says of a rank's state is what the table and the optimizer take.
TEST(StateBytes, AreThoseOfTheTable) {
  for (const bool bf16_model : {false, true})
    for (const bool in_parts : {false, true})
      for (const int ranks : {1, 8, 13}) {
        Deck deck;
        deck.model.dtype = bf16_model ? "bf16" : "f32";
        deck.parallel.zero = in_parts ? 3 : 1;
        Stdit3Deck& m = deck.get<Stdit3Deck>();
        m.hidden_size = 64, m.depth = 3, m.num_heads = 2, m.caption_channels = 16;
        m.model_max_length = 4;
        Stdit3Task task(deck);
        ParameterTable& table = task.params();
        const int rank = ranks - 1;
        table.allocate(1000, bf16_model, true,
                       sharding_of(deck.parallel, table, task.blocks_named(), rank, ranks));
        EXPECT_EQ(table.sharded_buckets(), in_parts && ranks > 1 ? 6 : 0);
        const OptimizerState state(table, ranks > 1, rank, ranks);
        const MemoryKinds planned = state_bytes(table, bf16_model, ranks > 1, ranks);
        // Of f32 masters the table counts the whole ones with the weights.
        EXPECT_EQ(planned.weights + planned.masters + planned.moments + planned.ema,
                  table.weight_bytes() + state.bytes())
            << bf16_model << in_parts << ranks;
        EXPECT_EQ(planned.gradients, table.gradient_bytes());
      }
}

// Gradients are complete in the order of the backward, and the weights of what comes first are
// needed at once.
TEST(DryRun, ScheduleFollowsTheBlocks) {
  Deck deck;
  deck.model.dtype = "bf16";
  Stdit3Deck& m = deck.get<Stdit3Deck>();
  m.freeze_y_embedder = true;
  m.hidden_size = 64;
  m.num_heads = m.depth = 4;
  m.caption_channels = 16;
  Stdit3Task task(deck);
  task.params().allocate(1 << 16, true, true);
  Bucket b;
  b.clips = 1, b.channels = 4, b.dtype = DType::f32;
  b.frames = 5, b.height = b.width = 16;
  const auto schedule = dry_run_schedule(task, std::span(&b, 1), DeviceKind::cuda, h200_targets());
  ASSERT_GT(schedule.size(), 3u);
  ASSERT_EQ(schedule.size(), task.params().buckets().size());
  double before = 0;
  for (const BucketSchedule& s : schedule) {
    EXPECT_GE(s.ready, before);
    EXPECT_LE(s.ready, 1);
    EXPECT_GE(s.needed, 1 - s.ready - 0.25)
        << "the forward needs first what the backward ends with";
    before = s.ready;
  }
  EXPECT_LT(schedule[0].ready, 0.5);
  EXPECT_GT(schedule[0].needed, 0.5);
  EXPECT_GT(schedule.back().ready, 0.95);
  EXPECT_LT(schedule.back().needed, 0.05);
}

TEST(Variation, ExpectedMaximum) {
  EXPECT_NEAR(expected_maximum(1), 0, 1e-6);
  // Tabulated values (Harter, Expected values of normal order statistics, Biometrika 48, 1961).
  EXPECT_NEAR(expected_maximum(2), 1 / std::sqrt(M_PI), 1e-6);
  EXPECT_NEAR(expected_maximum(8), 1.42360, 1e-4);
  EXPECT_NEAR(expected_maximum(32), 2.06967, 1e-4);
  EXPECT_NEAR(expected_maximum(100), 2.50759, 1e-4);
  const std::pair<int, double> expected[] = {{8, 1.42},  {16, 1.77}, {32, 2.07},
                                             {64, 2.34}, {96, 2.49}, {128, 2.59}};
  for (const auto& [n, m] : expected) EXPECT_NEAR(expected_maximum(n), m, 0.02) << n;
  EXPECT_NEAR(efficiency_of_variation(0.05, 96), 0.889, 0.002);
}

TEST(Rates, FromAFile) {
  const std::string path = testing::TempDir() + fmt::format("weft_rates_{}.json", getpid());
  std::ofstream(path)
      << R"({"products": 7e14, "attention_forward": 4e14, "attention_backward": 3e14,
                            "bandwidth": 4e12, "gaps": 0.02})";
  const Rates r = read_rates(path);
  EXPECT_EQ(r.products, 7e14);
  EXPECT_THAT(r.origin, HasSubstr(path));
  for (const char* bad : {"{}", "[1]", "not json", R"({"products": "many"})"}) {
    std::ofstream(path) << bad;
    EXPECT_THROW(read_rates(path), Error);
  }
  std::filesystem::remove(path);
  EXPECT_THROW(read_rates(path), Error) << "missing";
  EXPECT_THAT(h200_targets().origin, HasSubstr("not measured"));
}

}  // namespace
}  // namespace weft
