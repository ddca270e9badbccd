#include "core/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

namespace weft {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ProgressFile : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("weft_progress_" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  Progress::Job job(int rank = 0) const {
    return {dir_ / "status.json", "generate", "clip", "", 10, 4, rank, 2};
  }
  JobStatus read() const {
    const auto status = read_status(dir_ / "status.json");
    EXPECT_TRUE(status);
    return status.value_or(JobStatus());
  }
  fs::path dir_;
};

TEST_F(ProgressFile, TellsOfAJobFromItsBeginningToItsEnd) {
  {
    Progress progress(job());
    JobStatus s = read();
    EXPECT_EQ(s.state, "running");
    EXPECT_EQ(s.command, "generate");
    EXPECT_EQ(s.noun, "clip");
    EXPECT_EQ(s.done, 4) << "what earlier starts made";
    EXPECT_EQ(s.total, 10);
    EXPECT_EQ(s.ranks, 2);
    EXPECT_GT(s.started, 0);
    progress.advance(9, 5, 6, {{"loss", 0.5}, {"bad", std::numeric_limits<double>::infinity()}});
    progress.end(0, 10);
    progress.end(3, 0, "too late");
  }
  const JobStatus s = read();
  EXPECT_EQ(s.state, "finished");
  EXPECT_EQ(s.done, 10);
  EXPECT_EQ(s.code, 0);
  EXPECT_EQ(s.error, "");
  ASSERT_EQ(s.values.size(), 2u);
  EXPECT_EQ(s.values[0], (std::pair<std::string, double>("loss", 0.5)));
  EXPECT_TRUE(std::isnan(s.values[1].second)) << "JSON has no infinity";
}

TEST_F(ProgressFile, AStopIsNoFailure) {
  Progress(job()).end(static_cast<int>(Exit::stopped), 6);
  EXPECT_EQ(read().state, "stopped");
  EXPECT_EQ(read().code, 75);
}

// The error unwinds the job's objects before main reports it.
TEST_F(ProgressFile, AnErrorThatEndsTheJobIsTold) {
  { Progress progress(job()); }
  EXPECT_EQ(read().state, "running");
  note_failure(Error(Exit::data, "clips.h5 is damaged"));
  EXPECT_EQ(read().state, "failed");
  EXPECT_EQ(read().code, 3);
  EXPECT_EQ(read().error, "clips.h5 is damaged");
  EXPECT_EQ(read().done, 4);
}

TEST_F(ProgressFile, AnotherRanksFailureKeepsWhatTheFirstOneTold) {
  JobStatus first;
  first.command = "generate";
  first.done = 7;
  first.values = {{"loss", 2}};
  { Progress progress(job(1)); }
  EXPECT_FALSE(fs::exists(dir_ / "status.json")) << "the first rank alone tells of the job";
  std::ofstream(dir_ / "status.json") << to_text(first);
  note_failure(Error(Exit::hang, "no progress"));
  EXPECT_EQ(read().state, "failed");
  EXPECT_EQ(read().done, 7);
  EXPECT_EQ(read().values, first.values);
}

TEST_F(ProgressFile, AJobThatHasEndedFailsNoMore) {
  Progress(job()).end(0, 10);
  note_failure(Error(Exit::internal, "later"));
  EXPECT_EQ(read().state, "finished");
}

// A page shows the warnings of all starts.
TEST_F(ProgressFile, ARestartKeepsWhatWasKnown) {
  JobStatus before;
  before.command = "generate";
  before.values = {{"loss", 2}};
  before.warnings = {"step 3: loss spike", "the disk is slow"};
  before.earlier_warnings = {{"step 1: loss spike", 4}};
  std::ofstream(dir_ / "status.json") << to_text(before);
  { Progress progress(job()); }
  EXPECT_EQ(read().values, before.values);
  EXPECT_THAT(read().earlier_warnings, testing::ElementsAre(testing::Pair("step 3: loss spike", 5),
                                                            testing::Pair("the disk is slow", 1)));
  EXPECT_EQ(read().pid, getpid());
  Progress::Job anew = job();
  anew.before = 0;
  { Progress progress(anew); }
  EXPECT_TRUE(read().earlier_warnings.empty()) << "it begins anew";
}

TEST_F(ProgressFile, WhatIsNoStatusIsRefused) {
  const fs::path file = dir_ / "status.json";
  EXPECT_FALSE(read_status(file));
  for (const std::string text : {"", "{", "[]", "{\"command\":3}", "{\"command\":\"train\"}"}) {
    std::ofstream(file) << text;
    EXPECT_FALSE(read_status(file)) << text;
  }
  JobStatus s;
  s.command = "train";
  std::string text = to_text(s);
  std::ofstream(file) << text;
  EXPECT_TRUE(read_status(file));
  text[text.find("train")] = 'b';
  std::ofstream(file) << text;
  EXPECT_FALSE(read_status(file)) << "its hash does not match";
  s.warnings = {std::string(5000, 'x')};
  EXPECT_LT(to_text(s).size(), 3000u) << "long texts are cut";
}

TEST(Durations, HaveTwoUnits) {
  EXPECT_EQ(duration_text(0.4), "0 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1 min 00 s");
  EXPECT_EQ(duration_text(3599), "59 min 59 s");
  EXPECT_EQ(duration_text(7384), "2 h 03 min");
  EXPECT_EQ(duration_text(187200), "2 d 4 h");
  EXPECT_EQ(duration_text(NAN), "-");
  EXPECT_EQ(duration_text(-1), "-");
}

TEST(WorkRates, FollowAJobThatBecomesSlower) {
  WorkRate rate;
  EXPECT_EQ(rate.per_second(), 0);
  rate.add(100, 0);
  EXPECT_EQ(rate.per_second(), 0) << "one moment is no time";
  for (int i = 1; i <= 100; ++i) rate.add(100 + i, 4.0 * i);
  EXPECT_NEAR(rate.per_second(), 4, 1e-9);
  for (int i = 1; i <= 1000; ++i) rate.add(200 + i, 400 + i);
  EXPECT_NEAR(rate.per_second(), 1, 1e-9) << "what is minutes old counts no more";
}

TEST(WorkRates, AnyNumberOfSmallStepsIsKeptShort) {
  WorkRate rate;
  for (int i = 0; i <= 100000; ++i) rate.add(i * 1e-3, i);
  EXPECT_NEAR(rate.per_second(), 1000, 1e-6);
}

// ---- What a job took ----

JobWork some_work() {
  JobWork work;
  work.unit = "clip";
  work.items = 60;
  work.seconds = 12;
  work.note = "18 steps; the first 2 left out";
  work.flops = 4.8e13;
  work.limit = 1e13;
  work.threads = 4;
  work.hosts = {"n1", "n2"};
  work.parts = {{"compute", {9, 11}}, {"data_wait", {2.5, 0.5}}};
  return work;
}

TEST(JobSummary, AddsUp) {
  const nlohmann::ordered_json j =
      summary_json("train", some_work(), {{"start", 3}, {"steps", 14}, {"end", 1}});
  EXPECT_EQ(j["wall_seconds"], 18);
  EXPECT_EQ(j["core_hours"], 18.0 * 2 * 4 / 3600);
  EXPECT_EQ(j["speed"]["a_second"], 5);
  EXPECT_EQ(j["speed"]["a_second_a_rank"], 2.5);
  EXPECT_EQ(j["operations"]["a_second_a_rank"], 2e12);
  EXPECT_DOUBLE_EQ(j["operations"]["share_of_limit"], 0.4);
  const auto& compute = j["parts"]["compute"];
  EXPECT_EQ(compute["min"], 9);
  EXPECT_EQ(compute["mean"], 10);
  EXPECT_EQ(compute["max"], 11);
  EXPECT_EQ(compute["greatest_rank"], 1);
  EXPECT_EQ(compute["greatest_host"], "n2");
  EXPECT_EQ(j["parts"]["other"]["mean"], 0.5) << "of 12 s, 11.5 are in both parts of each rank";
  double shares = 0;
  for (const auto& [part, p] : j["parts"].items()) shares += p["share"].get<double>();
  EXPECT_DOUBLE_EQ(shares, 1);
}

TEST(JobSummary, CountsGpuHours) {
  JobWork work = some_work();
  work.on_gpu = true;
  const auto j = summary_json("train", work, {{"steps", 3600}});
  EXPECT_EQ(j["gpu_hours"], 2);
  EXPECT_FALSE(j.contains("core_hours"));
}

TEST(JobSummary, IsSaidInLines) {
  const auto lines = summary_lines(
      summary_json("train", some_work(), {{"start", 3}, {"steps", 90000}, {"end", 1.25}}));
  std::string text;
  for (const auto& [label, line] : lines) text += label + ": " + line + "\n";
  EXPECT_THAT(text, HasSubstr("speed: 5 clips/s, 2.5 a rank (18 steps; the first 2 left out)\n"));
  EXPECT_THAT(text, HasSubstr("work: 2 TFLOP/s a rank, 40.0 % of the 5 TFLOP/s that"));
  EXPECT_THAT(text,
              HasSubstr("compute                9.000    10.000    11.000  83.3 %  rank 1 on n2"));
  EXPECT_THAT(text, HasSubstr("data wait"));
  EXPECT_THAT(text,
              HasSubstr("wall time: 90004.2 s (1-01:00:04): start 3.0, steps 90000.0, end 1.2\n"));
  EXPECT_THAT(text, HasSubstr("core-hours, 2 ranks of 4 threads\n"));
}

TEST(JobSummary, WithoutItemsHasItsTimeAlone) {
  JobWork work = some_work();
  work.items = 0;
  const auto j = summary_json("score", work, {{"start", 1}});
  EXPECT_FALSE(j.contains("speed"));
  EXPECT_FALSE(j.contains("parts"));
  EXPECT_EQ(summary_lines(j).size(), 2u);
}

// Of files of others nothing is taken for granted.
TEST(JobSummary, OfAnotherShapeHasNoLines) {
  EXPECT_TRUE(summary_lines(nlohmann::ordered_json()).empty());
  auto j = summary_json("train", some_work(), {{"start", 1}});
  j["parts"]["compute"] = 3;
  EXPECT_TRUE(summary_lines(j).empty());
}

TEST_F(ProgressFile, EndsWithASummaryBesideTheStatus) {
  {
    Progress progress(job());
    progress.set_work(some_work());
    progress.end(0, 10);
  }
  const auto j = read_summary(dir_ / "status.json");
  EXPECT_EQ(j["command"], "generate");
  double wall = 0;
  for (const auto& [part, seconds] : j["wall"].items()) wall += seconds.get<double>();
  EXPECT_DOUBLE_EQ(wall, j["wall_seconds"]);
  {
    // A next start that makes nothing leaves it; one that fails on the way has none.
    Progress next(job());
    EXPECT_TRUE(read_summary(dir_ / "status.json").is_null()) << "it runs";
    next.end(0, 4);
    EXPECT_FALSE(read_summary(dir_ / "status.json").is_null());
  }
  {
    Progress last(job());
    last.advance(5, 1, 6);
    note_failure(Error(Exit::data, "clips.h5 is damaged"));
    EXPECT_FALSE(fs::exists(dir_ / "summary.json"));
  }
  std::ofstream(dir_ / "summary.json") << R"({"command":"generate","xxh3":"0123456789abcdef"})";
  EXPECT_TRUE(read_summary(dir_ / "status.json").is_null());
}

TEST(WallTime, BelongsToOnePartAtATime) {
  begin_part("outer");
  { const WallPart inner("inner"); }
  const auto parts = wall_parts();
  ASSERT_GE(parts.size(), 3u);
  EXPECT_EQ(parts[0].first, "start");
  const auto named = [&](const std::string& name) {
    return std::ranges::count(parts, name, &std::pair<std::string, double>::first);
  };
  EXPECT_EQ(named("outer"), 1) << "it goes on behind the inner one";
  EXPECT_EQ(named("inner"), 1);
}

}  // namespace
}  // namespace weft
