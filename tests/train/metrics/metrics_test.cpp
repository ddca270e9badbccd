#include "train/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class Metrics : public testing::Test {
 protected:
  void SetUp() override {
    run_ = fs::path(testing::TempDir()) / ("weft_metrics_" + std::to_string(getpid()));
    fs::create_directories(run_);
    MetricsWriter writer(run_, 0);
    for (int step = 0; step < 5; ++step) {
      StepMetrics m;
      m.step = step;
      m.loss = 0.125 * step;
      m.samples = {step, step + 1};
      writer.write(m);
    }
    good_ = content();
  }
  void TearDown() override { fs::remove_all(run_); }
  std::string content() const {
    std::ifstream in(run_ / "metrics.jsonl", std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // What a restart after `step` steps says, and leaves of this content.
  std::string restart(const std::string& before, std::int64_t step = 5) {
    std::ofstream(run_ / "metrics.jsonl", std::ios::binary) << before;
    log::sum_up_warnings();  // those of before do not count
    testing::internal::CaptureStderr();
    { MetricsWriter writer(run_, step); }
    return testing::internal::GetCapturedStderr();
  }
  fs::path run_;
  std::string good_;
};

TEST_F(Metrics, ARestartDropsWhatItRepeats) {
  EXPECT_EQ(restart(good_, 3), "");
  EXPECT_EQ(content(), good_.substr(0, good_.find(R"({"step":3)")));
  EXPECT_EQ(restart(good_), "");
  EXPECT_EQ(content(), good_);
}

TEST_F(Metrics, StoresHaveTheirCountsAndLosses) {
  {
    StepMetrics m;
    m.step = 5;
    m.stores = {{"a.h5", 3, 0.25}, {"b.h5", 0, 0}};
    MetricsWriter(run_, 5).write(m);
  }
  EXPECT_THAT(content(),
              HasSubstr(R"("stores":{"a.h5":{"samples":3,"loss":0.25},"b.h5":{"samples":0}})"));
  EXPECT_THAT(good_, testing::Not(HasSubstr("stores"))) << "there are not several";
}

TEST_F(Metrics, LayerNormsAreLinesOfAFileOfTheirOwn) {
  const fs::path layers = run_ / "layer_norms.jsonl";
  EXPECT_FALSE(fs::exists(layers)) << "no step had any";
  const auto lines = [&] {
    std::ifstream in(layers);
    std::vector<std::string> found;
    for (std::string line; std::getline(in, line);) found.push_back(line);
    return found;
  };
  const auto write = [](MetricsWriter& writer, std::int64_t step) {
    StepMetrics m;
    m.step = step;
    if (step % 2 == 1)
      m.layer_norms = {{"blocks.0", 0.5}, {"head", 0.25 * static_cast<double>(step)}};
    writer.write(m);
  };
  {
    MetricsWriter writer(run_, 0);
    for (std::int64_t step = 0; step < 6; ++step) write(writer, step);
  }
  ASSERT_EQ(lines().size(), 3u);
  EXPECT_THAT(lines()[1], HasSubstr(R"({"step":3,"norms":{"blocks.0":0.5,"head":0.75})"));
  // A restart drops what it repeats, also where it writes none itself.
  { MetricsWriter writer(run_, 3); }
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(Metrics, ALineThatACrashCutShortIsNoFault) {
  EXPECT_EQ(restart(good_ + R"({"step":5,"loss":0.2)"), "");
  EXPECT_EQ(content(), good_);
}

TEST_F(Metrics, LinesOfAnOlderWeftHaveNoHash) {
  const std::string old = "{\"step\":0,\"loss\":1.0}\n";
  EXPECT_EQ(restart(old, 1), "");
  EXPECT_EQ(content(), old);
}

TEST_F(Metrics, StepsWithoutALineAreNamed) {
  const auto from = [&](int step) {
    return good_.substr(good_.find("{\"step\":" + std::to_string(step)));
  };
  const auto until = [&](int step) {
    return good_.substr(0, good_.find("{\"step\":" + std::to_string(step)));
  };
  for (const auto& [there, missing] :
       {std::pair{std::string(), "5 of the 5 steps done (\"step\" 0 to 4):"},
        {until(4), "1 of the 5 steps done (\"step\" 4 to 4):"},
        {until(1) + from(3), "2 of the 5 steps done (\"step\" 1 to 2):"},
        {from(1).substr(0, from(1).find('\n') + 1) + from(4),
         "3 of the 5 steps done (\"step\" 0 to 3):"}}) {
    EXPECT_THAT(restart(there), HasSubstr(missing));
    EXPECT_EQ(content(), there);
  }
  fs::remove(run_ / "metrics.jsonl");
  testing::internal::CaptureStderr();
  { MetricsWriter writer(run_, 5); }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("no line of 5 of the 5"));
}

TEST_F(Metrics, TheWaitOfAStepIsTheMeanOfTheRanks) {
  StepMetrics m;
  m.seconds = 1;
  m.split.wait_slowest = 0.006;
  EXPECT_THAT(step_text(m, 10), HasSubstr("wait 0.6 %"));
  m.rank_wait = {0.006F, 0.27F};
  m.slowest_rank = 0;
  EXPECT_THAT(step_text(m, 10), HasSubstr("wait 13.8 %"));
}

// WEFT_FLIPS=1000 for more flips than the usual number.
TEST_F(Metrics, FlippedBitsAreNamed) {
  const char* asked = std::getenv("WEFT_FLIPS");
  const int flips = asked != nullptr ? std::atoi(asked) : 100;
  std::mt19937 random(3);
  int named = 0;
  for (int i = 0; i < flips; ++i) {
    std::string bad = good_;
    const std::size_t at = random() % bad.size();
    bad[at] = static_cast<char>(bad[at] ^ 1 << random() % 8);
    const std::string said = restart(bad);
    const auto line =
        std::count(good_.begin(), good_.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    if (said.empty()) {
      // Only in the letters "xxh3", whose loss leaves a line as an older weft wrote it.
      const std::size_t seal = good_.rfind("\"xxh3\"", at);
      EXPECT_TRUE(seal != good_.npos && at - seal < 6) << "byte " << at << ": " << bad[at];
    } else {
      ++named;
      EXPECT_THAT(said, HasSubstr((run_ / "metrics.jsonl").string() + ", line " +
                                  std::to_string(line + 1) + " is damaged"));
    }
  }
  std::printf("%d flips of metrics.jsonl: %d named, %d without effect\n", flips, named,
              flips - named);
}

}  // namespace
}  // namespace weft
