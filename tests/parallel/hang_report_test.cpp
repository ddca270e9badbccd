// A hang's cause and table, from states that are made up.
#include "parallel/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::uint64_t mib = 1 << 20;
constexpr Collective scatter{"reduce-scatter", DType::f32, 16 * mib};
constexpr Collective gather{"all-gather", DType::f32, 4 * mib};

// A job of `size` ranks in step 7, all with 56 collectives done and in number 57.
class HangReportTest : public ::testing::Test {
 protected:
  void make(std::size_t size) {
    records_ = std::vector<FlightRecord>(size);
    states_.assign(size, {});
    for (std::size_t r = 0; r < size; ++r) {
      names_.push_back({static_cast<int>(r), "n" + std::to_string(r / 4)});
      for (std::uint64_t n = 1; n <= 57; ++n) records_[r].issued(n, scatter);
      states_[r] = {true, false, 7, "backward", 61, 57, 57, 56, {}};
    }
  }
  std::string report() {
    for (std::size_t r = 0; r < states_.size(); ++r)
      states_[r].records =
          states_[r].answers ? records_[r].entries() : std::vector<FlightRecord::Entry>();
    return hang_report("reduce-scatter 57 did not end within 60 s", states_, names_);
  }
  std::vector<FlightRecord> records_;
  std::vector<RankState> states_;
  std::vector<RankName> names_;
};

std::string cause(const std::string& report) { return report.substr(0, report.find('\n')); }
std::size_t lines(const std::string& s) {
  return static_cast<std::size_t>(std::count(s.begin(), s.end(), '\n')) + 1;
}

TEST_F(HangReportTest, ARankThatDoesNotAnswer) {
  make(4);
  states_[2] = {};
  const std::string s = report();
  EXPECT_EQ(cause(s),
            "reduce-scatter 57 did not end within 60 s; late: rank 2 on n0 (does not answer)");
  EXPECT_EQ(lines(s), 6);
  EXPECT_THAT(s, HasSubstr("\n  late        2  n0       -  -               -  does not answer"));
  EXPECT_THAT(
      s, HasSubstr("56 reduce-scatter (f32, 16.000 MiB)  57 reduce-scatter (f32, 16.000 MiB)"));
}

TEST_F(HangReportTest, ARankThatIsElsewhere) {
  make(4);
  states_[1] = {true, true, 8, "data", 63, 56, 56, 56, {}};
  records_[1].issued(56, scatter);
  EXPECT_EQ(cause(report()),
            "reduce-scatter 57 did not end within 60 s; late: rank 1 on n0 (has not issued it: in "
            "data of step 9 for 63 s); issued collectives: rank 1 has 56, the others 57");
}

TEST_F(HangReportTest, ARecordThatDiffersComesFirst) {
  make(4);
  records_[2].issued(57, gather);
  const std::string s = report();
  EXPECT_THAT(s, StartsWith("collective 57 differs: rank 2 has all-gather (f32, 4.000 MiB), the "
                            "others reduce-scatter (f32, 16.000 MiB); "));
  EXPECT_THAT(s, HasSubstr("57 all-gather (f32, 4.000 MiB)"));
  EXPECT_THAT(s, HasSubstr("\n  differs     2  n0 "));
}

TEST_F(HangReportTest, ADifferenceTooSmallForMebibytes) {
  make(4);
  records_[0].issued(57, {"reduce-scatter", DType::f32, 16 * mib + 4});
  EXPECT_THAT(report(),
              StartsWith("collective 57 differs: rank 0 has reduce-scatter (f32, 16777220 "
                         "bytes), the others reduce-scatter (f32, 16777216 bytes); "));
}

TEST_F(HangReportTest, OfTwoRanksNoneIsRight) {
  make(2);
  records_[1].issued(40, gather);
  for (std::uint64_t n = 41; n <= 57; ++n) records_[1].issued(n, scatter);
  EXPECT_THAT(report(),
              StartsWith("collective 40 differs: rank 0 has reduce-scatter (f32, 16.000 MiB), rank "
                         "1 has all-gather (f32, 4.000 MiB); "));
}

TEST_F(HangReportTest, OldRecordsAreNotCompared) {
  make(2);
  records_[1].issued(3, gather);
  for (std::size_t r = 0; r < 2; ++r) {
    for (std::uint64_t n = 57; n <= 400; ++n) records_[r].issued(n, scatter);
    states_[r].issued = states_[r].begun = 400;
    states_[r].completed = 399;
  }
  EXPECT_THAT(report(), HasSubstr("all ranks are in it"));
}

TEST_F(HangReportTest, AllStuckOutsideOfCollectives) {
  make(3);
  for (RankState& s : states_) s = {true, true, 9, "data", 60, 57, 57, 57, {}};
  const std::string s = report();
  EXPECT_THAT(cause(s),
              HasSubstr("late: rank 0 on n0 (in data of step 10 for 60 s), rank 1 on n0"));
  EXPECT_THAT(s, HasSubstr("57 reduce-scatter (f32, 16.000 MiB)  -"));
}

TEST_F(HangReportTest, OfManyRanksTheLateOnesAndAFew) {
  make(128);
  for (const std::size_t r : {70U, 71U, 90U}) states_[r] = {};
  const std::string s = report();
  EXPECT_EQ(lines(s), 1 + 1 + 4 + 3 + 1);
  EXPECT_THAT(s, HasSubstr("\n  late       90  n22"));
  EXPECT_THAT(s, HasSubstr("\n              3  n0 "));
  EXPECT_THAT(s, Not(HasSubstr("\n              4  n1 ")));
  EXPECT_THAT(s, HasSubstr("... 121 more ranks, none of them late"));
}

TEST_F(HangReportTest, TravelsAsBytes) {
  make(1);
  RankState s = states_[0];
  s.records = records_[0].entries();
  s.stalled = s.on_storage = true;
  const RankState t = RankState::from_bytes(s.to_bytes());
  EXPECT_TRUE(t.answers && t.stalled && t.on_storage);
  EXPECT_EQ(t.step, 7);
  EXPECT_EQ(t.phase, "backward");
  EXPECT_EQ(t.phase_seconds, 61);
  EXPECT_EQ(t.issued, 57U);
  EXPECT_EQ(t.begun, 57U);
  EXPECT_EQ(t.completed, 56U);
  ASSERT_EQ(t.records.size(), 57U);
  EXPECT_EQ(t.records.back().number, 57U);
  EXPECT_TRUE(t.records.back().same_as(s.records.back()));
}

TEST(FlightRecord, KeepsTheLastOnes) {
  FlightRecord record;
  for (std::uint64_t n = 1; n <= 1000; ++n) record.issued(n, n % 2 == 0 ? gather : scatter);
  const auto entries = record.entries();
  ASSERT_EQ(entries.size(), FlightRecord::length);
  EXPECT_EQ(entries.front().number, 1000 - FlightRecord::length + 1);
  EXPECT_EQ(entries.back().describe(), "all-gather (f32, 4.000 MiB)");
}

}  // namespace
}  // namespace weft
