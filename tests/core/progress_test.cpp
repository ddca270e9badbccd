#include "core/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

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

}  // namespace
}  // namespace weft
