#include "train/metrics/run_trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/log.h"
#include "core/trace.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

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

// All ranks of this test run on one host, whose clock they share: what ClockOffset must find is
// what the test puts between.
TEST(ClockOffset, OneHostHasOneClock) {
  const ClockOffset clock(MPI_COMM_WORLD);
  const double now = now_seconds();
  EXPECT_NEAR(clock.on_rank_0(now), now, clock.error() + 1e-9);
  EXPECT_LT(clock.error(), 1) << "even where ranks share a processor, one of many trips is fast";
}

TEST(ClockOffset, CorrectsOffsetAndDrift) {
  const int rank = world_rank();
  const double ahead = 1000.0 * rank, rate = 1 + 1e-3 * rank, origin = now_seconds();
  const auto skewed = [&](double t) { return origin + (t - origin) * rate + ahead; };
  ClockOffset clock(MPI_COMM_WORLD, [&] { return skewed(now_seconds()); });
  const double first = now_seconds();
  usleep(300'000);
  const double middle = now_seconds();
  usleep(300'000);
  const double last = now_seconds();
  const double before = clock.error();
  if (rank > 0) {
    // One measurement knows nothing of the drift: 0.3 s at 1 ms a second.
    EXPECT_GT(std::abs(clock.on_rank_0(skewed(middle)) - middle), 0.2e-3 - before);
  }
  clock.measure_again();
  EXPECT_LT(clock.error(), 1);
  for (const double t : {first, middle, last})
    EXPECT_NEAR(clock.on_rank_0(skewed(t)), t, clock.error() + 2e-6) << "rank " << rank;
}

class WriteTrace : public testing::Test {
 protected:
  void SetUp() override {
    int pid = static_cast<int>(getpid());
    MPI_Bcast(&pid, 1, MPI_INT, 0, MPI_COMM_WORLD);
    dir_ = fs::path(testing::TempDir()) / ("weft_gather_" + std::to_string(pid));
    if (world_rank() == 0) fs::create_directories(dir_);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void TearDown() override {
    trace::stop();
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank() == 0) fs::remove_all(dir_);
  }
  fs::path dir_;
};

TEST_F(WriteTrace, EverySpanOfEveryRankArrives) {
  const int rank = world_rank();
  // More than two pieces, and another number on each rank; the last rank has none.
  const int mine = rank + 1 == world_size() && rank > 0 ? 0 : 70000 + rank;
  trace::start();
  const double origin = now_seconds();
  for (int i = 0; i < mine; ++i) {
    const double t = origin + 1e-5 * i;
    trace::add({i % 2 == 0 ? "even" : "odd", trace::Lane::compute, t, t + 5e-6, i, "number"});
  }
  trace::stop();
  write_trace(dir_, MPI_COMM_WORLD);
  if (rank != 0) return;
  const auto j = nlohmann::json::parse(std::ifstream(dir_ / "trace.json"));
  std::map<int, std::map<std::int64_t, std::string>> seen;
  double least = 1e9;
  for (const auto& e : j["traceEvents"]) {
    if (e["ph"] != "X" || e["name"] == "trace") continue;
    seen[e["pid"].get<int>()][e["args"]["number"].get<std::int64_t>()] = e["name"];
    least = std::min(least, e["ts"].get<double>());
    EXPECT_NEAR(e["dur"].get<double>(), 5, 0.01);
  }
  EXPECT_EQ(least, 0) << "time begins with the first span of all ranks";
  for (int r = 0; r < world_size(); ++r) {
    const std::size_t sent =
        r + 1 == world_size() && r > 0 ? 0 : 70000 + static_cast<std::size_t>(r);
    EXPECT_EQ(seen[r].size(), sent) << "rank " << r;
    if (sent > 0) {
      EXPECT_EQ(seen[r][7], "odd");
      EXPECT_EQ(seen[r][8], "even");
    }
  }
  EXPECT_EQ(j["otherData"]["ranks"], std::to_string(world_size()));
}

// No run ends for its trace: what cannot be written is a warning, and nobody waits for ever.
TEST_F(WriteTrace, AFileThatCannotBeWrittenIsAWarning) {
  const std::size_t before = log::warnings().size();
  trace::start(16);
  { const trace::Scope scope("step", trace::Lane::step); }
  write_trace(dir_ / "missing", MPI_COMM_WORLD);
  EXPECT_EQ(log::warnings().size(), before + (world_rank() == 0 ? 1 : 0));
}

TEST_F(WriteTrace, NothingRecordedIsAFileWithoutEvents) {
  trace::start(16);
  trace::stop();
  write_trace(dir_, MPI_COMM_WORLD);
  if (world_rank() != 0) return;
  const auto j = nlohmann::json::parse(std::ifstream(dir_ / "trace.json"));
  for (const auto& e : j["traceEvents"]) EXPECT_TRUE(e["ph"] == "M" || e["name"] == "trace") << e;
}

}  // namespace
}  // namespace weft
