// A hang's cause and table, from states that are made up.
#include "parallel/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace weft {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::uint64_t mib = 1 << 20;
constexpr Collective scatter{CollectiveKind::reduce_scatter, DType::f32, 16 * mib};
constexpr Collective gather{CollectiveKind::all_gather, DType::f32, 4 * mib};

// A job of `size` ranks in step 8, all with 56 collectives done and in number 57.
class HangReportTest : public ::testing::Test {
 protected:
  void make(std::size_t size) {
    states_.assign(size, {});
    for (std::size_t r = 0; r < size; ++r) {
      RankState& s = states_[r];
      s.rank = static_cast<int>(r);
      s.host = ShortText<60>("n" + std::to_string(r / 4));
      s.answers = true;
      s.step = 7;
      s.phase = Phase::sums;
      s.phase_seconds = 61;
      s.issued = s.begun = 57;
      s.completed = 56;
      s.pending = scatter;
    }
  }
  // Rank `r` stands still in the data of step 9, with nothing pending.
  void stand_still(std::size_t r, std::uint64_t completed) {
    RankState& s = states_[r];
    s.stalled = true;
    s.step = 8;
    s.phase = Phase::data;
    s.phase_seconds = 63;
    s.issued = s.begun = s.completed = completed;
  }
  std::string report() const {
    return hang_report("reduce-scatter 57 did not end within 60 s", states_);
  }
  std::vector<RankState> states_;
};

std::string cause(const std::string& report) { return report.substr(0, report.find('\n')); }
std::size_t lines(const std::string& s) {
  return static_cast<std::size_t>(std::count(s.begin(), s.end(), '\n')) + 1;
}

TEST_F(HangReportTest, ARankThatDoesNotAnswer) {
  make(4);
  states_[2].answers = false;
  const std::string s = report();
  EXPECT_EQ(cause(s),
            "reduce-scatter 57 did not end within 60 s; late: rank 2 on n0 (does not answer)");
  EXPECT_EQ(lines(s), 6);
  EXPECT_THAT(s, ContainsRegex("\n  late +2 +n0 +- +- +- +does not answer +-\n"));
  EXPECT_THAT(
      s, ContainsRegex("\n +3 +n0 +8 +sums +61.0 +56 +reduce-scatter 57 \\(f32, 16.000 MiB\\)"));
}

TEST_F(HangReportTest, ARankThatIsElsewhere) {
  make(4);
  stand_still(1, 56);
  EXPECT_EQ(cause(report()),
            "reduce-scatter 57 did not end within 60 s; late: rank 1 on n0 (has not issued it: in "
            "data of step 9 for 63 s); issued collectives: rank 1 has 56, the others 57");
}

TEST_F(HangReportTest, ACollectiveThatDiffersComesFirst) {
  make(4);
  states_[2].pending = gather;
  const std::string s = report();
  EXPECT_THAT(s, StartsWith("collective 57 differs: rank 2 has all-gather (f32, 4.000 MiB), the "
                            "others reduce-scatter (f32, 16.000 MiB); "));
  EXPECT_THAT(s, ContainsRegex("\n  differs +2 +n0 .* all-gather 57 \\(f32, 4.000 MiB\\)\n"));
}

TEST_F(HangReportTest, ADifferenceTooSmallForMebibytes) {
  make(4);
  states_[0].pending.bytes += 4;
  EXPECT_THAT(report(),
              StartsWith("collective 57 differs: rank 0 has reduce-scatter (f32, 16777220 "
                         "bytes), the others reduce-scatter (f32, 16777216 bytes); "));
}

TEST_F(HangReportTest, OfTwoRanksNoneIsRight) {
  make(2);
  states_[1].pending = gather;
  EXPECT_THAT(report(),
              StartsWith("collective 57 differs: rank 0 has reduce-scatter (f32, 16.000 MiB), rank "
                         "1 has all-gather (f32, 4.000 MiB); "));
}

// A rank that waits for an earlier one may have issued what it likes.
TEST_F(HangReportTest, OnlyTheSameNumberIsCompared) {
  make(3);
  states_[1].issued = 60;
  states_[2].completed = 57;
  states_[2].issued = states_[2].begun = 58;
  states_[2].pending = gather;
  EXPECT_THAT(cause(report()), Not(HasSubstr("differs")));
  make(2);
  EXPECT_THAT(report(), HasSubstr("all ranks are in it: the network or a GPU has stalled"));
}

TEST_F(HangReportTest, AllStuckOutsideOfCollectives) {
  make(3);
  for (std::size_t r = 0; r < 3; ++r) stand_still(r, 57);
  const std::string s = report();
  EXPECT_THAT(cause(s), HasSubstr("late: rank 0 on n0 (in data of step 9 for 63 s), rank 1 on n0"));
  EXPECT_THAT(s, ContainsRegex("\n  late +2 +n0 +9 +data +63.0 +57 +-"));
}

TEST_F(HangReportTest, OfManyRanksTheLateOnesAndAFew) {
  make(128);
  for (const std::size_t r : {70U, 71U, 90U}) states_[r].answers = false;
  const std::string s = report();
  EXPECT_EQ(lines(s), 1 + 1 + 16 + 1);
  EXPECT_THAT(s, ContainsRegex("pending\n  late +70 .*\n  late +71 .*\n  late +90 +n22"));
  EXPECT_THAT(s, ContainsRegex("\n +12 +n3 "));
  EXPECT_THAT(s, Not(ContainsRegex("\n +13 +n3 ")));
  EXPECT_THAT(s, HasSubstr("... 112 more ranks"));
}

TEST(ShortText, CutsWhatDoesNotFit) {
  EXPECT_EQ(ShortText<8>("backward").view(), "backwar");
  EXPECT_EQ(ShortText<9>("backward").view(), "backward");
  EXPECT_TRUE(ShortText<9>().empty());
}

}  // namespace
}  // namespace weft
