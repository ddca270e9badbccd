// The simulation against closed formulas: transfers, order statistics, and steps that can be
// calculated by hand; then the jobs that a deck is turned into: costs, sharing out, variation.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/philox.h"
#include "validation/simulate/deck_step.h"

namespace weft::simulation {
namespace {

// What STDiT3-XL/2's trainable parameters weigh on the wire.
constexpr double f32 = 4 * 1.2016e9;

// Nodes of eight cards of 400 Gbit/s.
Network fabric(bool two_level) {
  Network n;
  n.node_rate = 400e9;
  n.two_level = two_level;
  // A flat ring is limited by the network alone if NVLink runs at its peak; two levels at what NCCL
  // measures inside a node.
  n.inside_rate = two_level ? 370e9 : 450e9;
  return n;
}

Network slow_pair() {
  Network n;
  n.ranks_per_node = 1;
  n.node_rate = 1e9;
  return n;
}

double mean_seconds(const std::vector<StepTimes>& steps) {
  double sum = 0;
  for (const StepTimes& s : steps) sum += s.seconds;
  return sum / static_cast<double>(steps.size());
}

// Every rank has `micro_batches` of 1 s forward and 2 s backward; one bucket of `bytes`.
Overlapped even_job(int ranks, int micro_batches, double bytes) {
  Overlapped job;
  job.buckets = {{bytes, bytes, 1, 0}};
  job.work = [=](std::int64_t) {
    return RankWork(static_cast<std::size_t>(ranks), std::vector<Work>(micro_batches, Work{1, 2}));
  };
  return job;
}

// `weft plan` and the simulation reckon with the same collectives.
TEST(SimulationFormulas, AgreeWithThePlans) {
  CommModel comm{1, described_machine("8x400", 141)};
  for (const int ranks : {1, 2, 8, 16, 128, 1024}) {
    comm.ranks = ranks;
    const double formula = comm.reduce_scatter(f32);
    EXPECT_NEAR(
        collective_seconds(network_of(comm.machine), ranks, Collective::reduce_scatter, f32),
        formula, 1e-9 + 1e-6 * formula);
    const double in_bf16 = comm.sum_gradients(f32 / 4, true, false);
    EXPECT_NEAR(collective_seconds(network_of(comm.machine), ranks, Collective::bf16_sum, f32 / 2),
                in_bf16, 1e-9 + 1e-6 * in_bf16);
  }
}

// parallel.zero = 3: of four blocks' gathers and sums, 0.1 s each, all but the first gather and the
// last sum are under the computation; a rank with fewer micro-batches passes along.
TEST(Simulation, BlocksAreGatheredUnderTheComputation) {
  Overlapped job;
  job.buckets = {{0, 0, 1, 0}};
  for (int b = 0; b < 4; ++b) job.blocks.push_back({2e8, 2e8, (b + 1) / 4.0, (3 - b) / 4.0});
  const auto seconds = [&](std::vector<std::vector<Work>> work) {
    job.work = [work](std::int64_t) { return work; };
    return mean_seconds(play(slow_pair(), 2, job, 3, 1));
  };
  const Work work{4, 8};
  EXPECT_NEAR(seconds({{work}, {work}}), 12.2, 1e-4);
  EXPECT_NEAR(seconds({{work, work}, {work, work}}), 24.2, 1e-4);
  EXPECT_NEAR(seconds({{work, work}, {work}}), 24.2, 1e-4);
  EXPECT_NEAR(seconds({{Work{}}, {Work{}}}), 0.1 * (6 + 4), 1e-4);
  job.overlap = false;
  EXPECT_NEAR(seconds({{work}, {work}}), 13.0, 1e-4);
}

TEST(Simulation, TransfersTakeWhatTheFormulasSay) {
  for (const bool two_level : {false, true})
    for (const int ranks : {1, 2, 8, 9, 16, 100, 128})
      for (const auto kind :
           {Collective::reduce_scatter, Collective::all_reduce, Collective::bf16_sum}) {
        Network n = fabric(two_level);
        n.start = 8.4e-6, n.hop_inside = 3.4e-6, n.hop_between = 14e-6;
        const double formula = collective_seconds(n, ranks, kind, 25e6);
        EXPECT_NEAR(play_collective(n, ranks, kind, 25e6), formula, 1e-6 * formula + 1e-9)
            << ranks << " ranks, two levels " << two_level;
      }
}

// Two nodes, 1 GB/s between them: half of 2 GB takes 1 s each way. Of four buckets of 0.5 GB, 0.25
// s each, the first three hide in the 2 s of backward that follow them; the last is all exposed,
// and so is the first that the forward needs.
TEST(Simulation, WhatNothingHidesIsExposed) {
  Overlapped job = even_job(2, 1, 0);
  job.buckets = {
      {.5e9, .5e9, .25, .75}, {.5e9, .5e9, .5, .5}, {.5e9, .5e9, .75, .25}, {.5e9, .5e9, 1, 0}};
  job.optimizer = 0.5;
  job.report_bytes = 0;
  const auto hidden = play(slow_pair(), 2, job, 2, 1);
  for (const StepTimes& s : hidden) {
    EXPECT_NEAR(s.exposed, 0.25 + 0.25, 1e-6);
    EXPECT_NEAR(s.seconds, 3 + 0.5 + 0.5, 1e-6);
    EXPECT_NEAR(s.mean_busy, 3.5, 1e-6);
  }
  job.overlap = false;
  for (const StepTimes& s : play(slow_pair(), 2, job, 2, 1)) {
    EXPECT_NEAR(s.exposed, 2, 1e-6);
    EXPECT_NEAR(s.seconds, 3.5 + 2, 1e-6);
  }
  job.overlap = true;
  job.sharded = false;  // all-reduce: twice the bytes, nothing under the forward
  for (const StepTimes& s : play(slow_pair(), 2, job, 2, 1)) EXPECT_NEAR(s.exposed, 0.5, 1e-6);
}

TEST(Simulation, TheSlowestRankIsWaitedFor) {
  Overlapped job = even_job(4, 1, 0);
  job.report_bytes = 0;
  job.work = [](std::int64_t) {
    RankWork w(4, {Work{1, 2}});
    w[2] = {Work{1, 3}};
    return w;
  };
  for (const StepTimes& s : play(Network(), 4, job, 2, 1)) {
    EXPECT_NEAR(s.seconds, 4, 1e-6);
    EXPECT_NEAR(s.wait, 0.75, 1e-6);  // three ranks of four wait a second
    EXPECT_NEAR(s.spread(), 4 / 3.25 - 1, 1e-6);
  }
}

// Every rank's time varies by cv: a step takes 1 + cv * the expected greatest of n normals.
TEST(Simulation, VariationCostsWhatOrderStatisticsSay) {
  constexpr double cv = 0.05;
  for (const int ranks : {8, 128}) {
    Overlapped job = even_job(ranks, 1, 0);
    job.report_bytes = 0;
    job.work = [=](std::int64_t step) {
      const Philox random(3, Purpose::synthetic, static_cast<std::uint64_t>(step), 0);
      RankWork w(static_cast<std::size_t>(ranks));
      for (std::size_t r = 0; r < w.size(); ++r) {
        const double f = 1 + cv * static_cast<double>(random.normal(static_cast<std::uint32_t>(r)));
        w[r] = {Work{f, 2 * f}};
      }
      return w;
    };
    const double seconds = mean_seconds(play(Network(), ranks, job, 400, 0));
    // 400 steps leave a deviation of about cv * 0.6 / 20 of the mean.
    EXPECT_NEAR(seconds / 3, 1 + cv * expected_maximum(ranks), 4 * cv * 0.6 / 20);
  }
}

Bucket footage(std::int64_t frames, std::int64_t height, std::int64_t width) {
  Bucket b;
  b.name = std::to_string(frames) + "x" + std::to_string(height);
  b.clips = 1000;
  b.pixel_frames = frames, b.pixel_height = height, b.pixel_width = width;
  b.frames = b.height = b.width = 4;
  return b;
}

// Two buckets, 1 + 2 and 2 + 4 seconds a micro-batch.
DeckStep two_buckets() {
  DeckStep s;
  s.buckets = {footage(51, 256, 256), footage(51, 480, 854)};
  s.batch_sizes = {4, 2};
  s.costs.work = {{1, 2}, {2, 4}};
  s.costs.optimizer = 8;
  s.micro_batches = 32;
  s.schedule = {{1 << 20, true, 0.5, 0.5}, {1 << 16, false, 1, 0.25}, {1 << 16, false, 1, 0.5}};
  return s;
}

double sum(const RankWork& ranks) {
  double s = 0;
  for (const auto& rank : ranks)
    for (const Work& w : rank) s += w.forward + w.backward;
  return s;
}

TEST(SimulationJob, PlaysTheStepPlanOfTheTrainer) {
  const DeckStep step = two_buckets();
  const StepPlanner planner(step.buckets, step.batch_sizes, step.micro_batches, step.seed);
  double planned = 0;
  for (const MicroBatch& m : planner.plan(3)) planned += m.bucket == 0 ? 3 : 6;
  const Overlapped job = overlapped_job(step, 8);
  EXPECT_NEAR(sum(job.work(3)), planned, 1e-9);
  EXPECT_EQ(job.work(3).size(), 8u);
  EXPECT_DOUBLE_EQ(job.optimizer, 1);  // an eighth
  double placed = 0;
  for (const double s : rank_seconds(step, 8, 3)) placed += s;
  EXPECT_NEAR(placed, planned, 1e-9);
}

TEST(SimulationJob, BucketsOnTheWire) {
  DeckStep step = two_buckets();
  step.bf16_model = step.bf16_wire = true;
  const Overlapped job = overlapped_job(step, 2);
  ASSERT_EQ(job.buckets.size(), 3u);
  EXPECT_DOUBLE_EQ(job.buckets[0].gradient_bytes, 2 << 20);
  EXPECT_DOUBLE_EQ(job.buckets[0].weight_bytes, 2 << 20);
  EXPECT_DOUBLE_EQ(job.buckets[1].weight_bytes, 4 << 16);  // f32 weights
  // The second travels back after the third, so it cannot be had before that.
  EXPECT_DOUBLE_EQ(job.buckets[1].needed, 0.5);
}

TEST(SimulationJob, RanksThatShareClipsHaveTheSameWork) {
  DeckStep step = two_buckets();
  step.sp = 2;
  const RankWork work = overlapped_job(step, 8).work(0);
  for (std::size_t r = 0; r < 8; r += 2) {
    ASSERT_EQ(work[r].size(), work[r + 1].size());
    for (std::size_t i = 0; i < work[r].size(); ++i)
      EXPECT_EQ(work[r][i].forward, work[r + 1][i].forward);
  }
  EXPECT_NEAR(sum(work), 2 * sum(overlapped_job(two_buckets(), 4).work(0)), 1e-9);
}

TEST(SimulationJob, VariationHasItsMeanAndDeviationAndRepeats) {
  DeckStep step = two_buckets();
  step.variation = 0.1;
  const Overlapped job = overlapped_job(step, 16);
  double mean = 0, squares = 0;
  int n = 0;
  for (int s = 0; s < 100; ++s) {
    const RankWork even = overlapped_job(two_buckets(), 16).work(s), varied = job.work(s);
    for (std::size_t r = 0; r < 16; ++r) {
      const double factor = varied[r][0].forward / even[r][0].forward;
      mean += factor, squares += factor * factor, ++n;
    }
  }
  mean /= n;
  EXPECT_NEAR(mean, 1, 4 * 0.1 / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n - mean * mean), 0.1, 0.01);
  EXPECT_EQ(job.work(7)[3][0].forward, job.work(7)[3][0].forward);
}

TEST(SimulationJob, MeasuredCostsOfAFile) {
  const DeckStep step = two_buckets();
  const std::vector<double> recompute = {0, 1};
  const auto path = std::filesystem::temp_directory_path() /
                    ("weft_simulated_costs_" + std::to_string(getpid()) + ".json");
  const auto read = [&](const std::string& text) {
    std::ofstream(path) << text;
    return measured_costs(path.string(), Deck(), step.buckets, recompute);
  };
  const StepCosts c = read(R"({"seconds": {"51x256": 3, "51x480": 8}, "host": 0.5})");
  EXPECT_DOUBLE_EQ(c.work[0].forward, 1);
  EXPECT_DOUBLE_EQ(c.work[0].backward, 2);
  EXPECT_DOUBLE_EQ(c.work[1].forward, 2);  // runs twice
  EXPECT_DOUBLE_EQ(c.work[1].backward, 6);
  EXPECT_DOUBLE_EQ(c.host, 0.5);
  EXPECT_THROW(read(R"({"seconds": {"51x256": 3}})"), Error);
  EXPECT_THROW(read(R"({"seconds": {"51x256": -3, "51x480": 8}})"), Error);
  EXPECT_THROW(read("seconds"), Error);
  std::filesystem::remove(path);
  EXPECT_THROW(measured_costs(path.string(), Deck(), step.buckets, recompute), Error);
}

}  // namespace
}  // namespace weft::simulation
