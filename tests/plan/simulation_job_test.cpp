// The jobs that a deck is turned into: costs, sharing out, variation, and Open-Sora's step.
#include "plan/simulation_job.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace weft::simulation {
namespace {

weft::Bucket footage(std::int64_t frames, std::int64_t height, std::int64_t width) {
  weft::Bucket b;
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

// docs/plan.md, Operations of encoding, in TFLOP: 2D VAE, temporal VAE and T5 of one clip.
TEST(SimulationJob, EncodingCostsWhatTheModelsCount) {
  EXPECT_NEAR(encoding_flops(footage(1, 256, 256)) / 3.6e12, 1, 0.02);
  EXPECT_NEAR(encoding_flops(footage(51, 256, 256)) / 23.5e12, 1, 0.02);
  EXPECT_NEAR(encoding_flops(footage(51, 480, 854)) / 135e12, 1, 0.02);
  EXPECT_NEAR(encoding_flops(footage(102, 480, 854)) / 267e12, 1, 0.02);
  EXPECT_NEAR(encoding_flops(footage(51, 720, 1280)) / 313e12, 1, 0.02);
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

TEST(SimulationJob, OpenSoraGivesEachRankTheNextMicroBatch) {
  const DeckStep step = two_buckets();
  BarrierModel model;
  model.rate = 1e12;
  model.dit_flops = {1e12, 3e12};
  model.tensors = 10, model.parameters = 1e6;
  const Barriers job = barriers_job(step, 4, model);
  const StepPlanner planner(step.buckets, step.batch_sizes, 4, step.seed);
  const auto plan = planner.plan(5);
  const auto seconds = job.seconds(5);
  ASSERT_EQ(seconds.size(), 4u);
  for (std::size_t r = 0; r < 4; ++r) {
    const double forward = plan[r].bucket == 0 ? 4.0 : 6.0;  // clips times their operations
    ASSERT_EQ(seconds[r].size(), job.phases.size());
    EXPECT_NEAR(seconds[r][3], forward, 1e-9);
    EXPECT_NEAR(seconds[r][4], 3 * forward, 1e-9);  // with the forward that is run again
    const auto b = static_cast<std::size_t>(plan[r].bucket);
    EXPECT_NEAR(seconds[r][1],
                static_cast<double>(step.batch_sizes[b]) * encoding_flops(step.buckets[b]) / 1e12,
                1e-9);
  }
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
