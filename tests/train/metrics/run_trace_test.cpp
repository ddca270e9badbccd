#include "train/metrics/run_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "core/philox.h"

namespace weft {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;
constexpr auto data_lane = static_cast<std::int32_t>(trace::Lane::data);

TraceSpan span(std::int64_t begin, std::int64_t end, std::int32_t lane = data_lane) {
  TraceSpan s;
  s.lane = lane;
  s.begin = begin;
  s.end = end;
  return s;
}

class TraceFiles : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("weft_trace_" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  nlohmann::json read() { return nlohmann::json::parse(std::ifstream(dir_ / "trace.json")); }
  fs::path dir_;
};

TEST(TraceRows, NestedSpansShareARow) {
  const TraceSpan spans[] = {span(10, 20), span(0, 100), span(10, 90), span(20, 30),
                             span(100, 110)};
  const LaneRows rows = rows_of(spans, trace::Lane::data);
  EXPECT_EQ(rows.rows, 1);
  EXPECT_EQ(rows.spans[1].end, 90) << "of two that begin together the longer is first";
  EXPECT_EQ(rows_of(spans, trace::Lane::step).rows, 0);
}

TEST(TraceRows, SpansThatCrossTakeAnother) {
  const TraceSpan spans[] = {span(0, 50), span(25, 75), span(50, 60), span(60, 100)};
  const LaneRows rows = rows_of(spans, trace::Lane::data);
  EXPECT_THAT(rows.row, ElementsAre(0, 1, 0, 0));
}

TEST(TraceRows, NoTwoOfARowEverCross) {
  const Philox random(11, Purpose::synthetic, 0, 0);
  std::vector<TraceSpan> spans;
  for (std::uint32_t i = 0; i < 2000; ++i) {
    const auto begin = static_cast<std::int64_t>(random.below(2 * i, 20000));
    spans.push_back(span(begin, begin + random.below(2 * i + 1, 60)));
  }
  const LaneRows rows = rows_of(spans, trace::Lane::data);
  ASSERT_EQ(rows.spans.size(), spans.size());
  for (std::size_t i = 0; i < rows.spans.size(); ++i)
    for (std::size_t k = i + 1; k < rows.spans.size() && rows.spans[k].begin < rows.spans[i].end;
         ++k)
      ASSERT_TRUE(rows.row[i] != rows.row[k] || rows.spans[k].end <= rows.spans[i].end)
          << i << " and " << k;
  EXPECT_LT(rows.rows, 40) << "rows are filled before another is begun";
}

TEST_F(TraceFiles, HoldsEveryRankAsAProcessWithItsLanes) {
  RankTrace first{0, "node\"1\"", {"step", "forward", "step\n2"}, {}};
  first.spans = {{0, -1, 0, 5'000'000'000, 5'000'001'500, 0},
                 {1, 2, 1, 5'000'000'100, 5'000'000'101, -7}};
  RankTrace second{1,
                   "node2",
                   {"read"},
                   {span(5'000'002'000, 5'000'004'000), span(5'000'003'000, 5'000'005'000)},
                   1300};
  TraceFile file(dir_ / "trace.json", 5'000'000'000);
  file.add(first);
  file.add(second);
  EXPECT_FALSE(fs::exists(dir_ / "trace.json")) << "not before it is whole";
  const std::pair<std::string, std::string> facts[] = {{"program", "weft \"x\""}};
  file.finish(facts);
  EXPECT_FALSE(fs::exists(dir_ / "trace.json.tmp"));

  const nlohmann::json j = read();
  EXPECT_EQ(j["otherData"]["program"], "weft \"x\"");
  int begins = 0;
  std::map<int, std::string> processes, threads;
  std::vector<nlohmann::json> events;
  for (const auto& e : j["traceEvents"]) {
    if (e["name"] == "trace") {
      EXPECT_EQ(e["ts"], 0.0) << "the first of its rank: viewers list ranks by it";
      EXPECT_EQ(e["args"]["clock_error_ns"], e["pid"] == 0 ? 0 : 1300);
      EXPECT_EQ(threads[e["tid"]], "step");
      ++begins;
      continue;
    }
    if (e["ph"] == "X") events.push_back(e);
    if (e["name"] == "process_name") processes[e["pid"]] = e["args"]["name"];
    if (e["name"] != "thread_name") continue;
    EXPECT_TRUE(threads.emplace(e["tid"], e["args"]["name"]).second) << "numbers are unique";
  }
  EXPECT_EQ(begins, 2);
  EXPECT_EQ(processes[0], "rank 0 on node\"1\"");
  EXPECT_EQ(processes[1], "rank 1 on node2");
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0]["name"], "step");
  EXPECT_EQ(events[0]["ts"], 0.0);
  EXPECT_EQ(events[0]["dur"], 1.5);
  EXPECT_FALSE(events[0].contains("args"));
  EXPECT_EQ(events[1]["ts"], 0.1);
  EXPECT_EQ(events[1]["dur"], 0.001);
  EXPECT_EQ(events[1]["args"]["step\n2"], -7);
  EXPECT_EQ(events[2]["ts"], 2.0);
  EXPECT_EQ(threads[events[2]["tid"]], "data");
  EXPECT_EQ(threads[events[3]["tid"]], "data 2") << "they cross";
}

TEST_F(TraceFiles, ManySpansKeepTheirNanoseconds) {
  // Ten days after the origin: more microseconds than a float's digits, written as whole numbers.
  RankTrace rank{0, "n", {"a"}, {}};
  const std::int64_t late = 864'000'000'000'123;
  for (int i = 0; i < 50000; ++i) rank.spans.push_back(span(late + 10 * i, late + 10 * i + 7));
  {
    TraceFile file(dir_ / "trace.json", 0);
    file.add(rank);
    file.finish({});
  }
  std::ifstream in(dir_ / "trace.json");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_THAT(text, HasSubstr("\"ts\":864000000000.123,\"dur\":0.007,"));
  EXPECT_THAT(text, HasSubstr("\"ts\":864000000500.113,\"dur\":0.007,"));
  EXPECT_EQ(nlohmann::json::parse(text)["traceEvents"].size(), 50007u);
}

TEST_F(TraceFiles, WithoutAnEndThereIsNoFile) {
  { TraceFile file(dir_ / "trace.json", 0); }
  EXPECT_TRUE(fs::is_empty(dir_));
  try {
    TraceFile file(dir_ / "missing" / "trace.json", 0);
    ADD_FAILURE() << "no directory";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), HasSubstr("missing"));
  }
}

TEST_F(TraceFiles, NoRankIsAFileToo) {
  TraceFile file(dir_ / "trace.json", 0);
  file.finish({});
  EXPECT_TRUE(read()["traceEvents"].empty());
}

}  // namespace
}  // namespace weft
