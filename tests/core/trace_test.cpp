#include "core/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <thread>

namespace weft::trace {
namespace {

Span numbered(std::int64_t n) {
  return {"span", Lane::compute, static_cast<double>(n), static_cast<double>(n) + 0.5, n, "n"};
}

TEST(Trace, OffItKeepsNothing) {
  start(4);
  stop();
  add(numbered(1));
  { const Scope scope("step", Lane::step); }
  EXPECT_TRUE(spans().empty());
}

TEST(Trace, TheOldestGoWhenItIsFull) {
  start(4);
  for (int i = 0; i < 11; ++i) add(numbered(i));
  stop();
  const std::vector<Span> kept = spans();
  ASSERT_EQ(kept.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(kept[i].arg, static_cast<std::int64_t>(7 + i));
  start(4);
  stop();
  EXPECT_TRUE(spans().empty()) << "a new start begins empty";
}

TEST(Trace, SpansComeInTheOrderOfTheirEnds) {
  start(8);
  for (const int n : {5, 1, 3}) add(numbered(n));
  stop();
  const std::vector<Span> kept = spans();
  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept[0].arg, 1);
  EXPECT_EQ(kept[1].arg, 3);
  EXPECT_EQ(kept[2].arg, 5);
}

TEST(Trace, ScopesNestAndMeasure) {
  start(8);
  const double before = now_seconds();
  {
    const Scope outer("outer", Lane::step, 3, "step");
    const Scope inner("inner", Lane::compute);
  }
  const double after = now_seconds();
  {
    const Scope begun_while_on("cut", Lane::step);
    stop();
  }
  const std::vector<Span> kept = spans();
  ASSERT_EQ(kept.size(), 2u) << "a span that ends after the stop is none";
  EXPECT_STREQ(kept[0].name, "inner");
  EXPECT_EQ(kept[0].lane, Lane::compute);
  EXPECT_STREQ(kept[1].name, "outer");
  EXPECT_EQ(kept[1].arg, 3);
  EXPECT_STREQ(kept[1].arg_name, "step");
  EXPECT_LE(before, kept[1].begin);
  EXPECT_LE(kept[1].begin, kept[0].begin);
  EXPECT_LE(kept[0].end, kept[1].end);
  EXPECT_LE(kept[1].end, after);
}

TEST(Trace, ThreadsLoseNothing) {
  constexpr int threads = 4, each = 20000;
  start(threads * each);
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t)
    team.emplace_back([t] {
      for (int i = 0; i < each; ++i) add(numbered(t * each + i));
    });
  // A reader at the same time sees whole spans.
  for (int i = 0; i < 5; ++i)
    for (const Span& s : spans()) ASSERT_EQ(s.begin, static_cast<double>(s.arg));
  for (std::thread& t : team) t.join();
  stop();
  std::map<std::int64_t, int> seen;
  for (const Span& s : spans()) ++seen[s.arg];
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(threads * each));
}

// What a span costs: printed, and bounded so generously that only a change of kind can break it.
// The least of many batches, since the host may stand still in some.
TEST(Trace, ASpanIsCheap) {
  const auto scopes = [](int n) {
    double least = std::numeric_limits<double>::infinity();
    for (int batch = 0; batch < 20; ++batch) {
      const double begin = now_seconds();
      for (int i = 0; i < n; ++i) const Scope scope("cost", Lane::compute, i, "n");
      least = std::min(least, (now_seconds() - begin) / n);
    }
    return least;
  };
  stop();
  const double off = scopes(50000);
  start(1 << 12);
  const double on = scopes(5000);
  stop();
  RecordProperty("nanoseconds_off", std::to_string(off * 1e9));
  RecordProperty("nanoseconds_on", std::to_string(on * 1e9));
  EXPECT_LT(off, 1e-6);
  EXPECT_LT(on, 1e-5);
}

}  // namespace
}  // namespace weft::trace
