#include "train/metrics/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "core/philox.h"

namespace weft {
namespace {

enum class Noise { normal, heavy, hiccups };
constexpr Noise all_noises[] = {Noise::normal, Noise::heavy, Noise::hiccups};
constexpr int rank_counts[] = {2, 3, 4, 5, 8, 16, 64, 128};

// Times of ranks with unequal work a step. `sigma` is the standard deviation of a step's time.
class Machine {
 public:
  Machine(int ranks, Noise noise, double sigma, std::uint64_t seed)
      : busy(static_cast<std::size_t>(ranks)),
        expected(busy.size()),
        noise_(noise),
        sigma_(sigma),
        seed_(seed) {}

  // `slower(rank, step)` is the factor of a rank's true pace.
  void play(std::int64_t step, const std::function<double(int, std::int64_t)>& slower) {
    // What all ranks share is nobody's fault: clocks of processors, a file system.
    const double common =
        1 + 0.3 * Philox(seed_, Purpose::synthetic, static_cast<std::uint64_t>(step), 1u << 20)
                      .uniform(0);
    for (std::size_t r = 0; r < busy.size(); ++r) {
      const Philox random(seed_, Purpose::synthetic, static_cast<std::uint64_t>(step), r);
      // Work from half to twice the usual, in a unit of its own; now and then none where a rank has
      // others beside it.
      expected[r] =
          busy.size() > 2 && random.uniform(0) < idle ? 0 : 50 * (1 + 3 * random.uniform(1));
      const double pace = common * slower(static_cast<int>(r), step) * (1 + error(random));
      busy[r] = expected[r] * 0.01 * std::max(0.3, pace);
    }
  }

  std::vector<double> busy, expected;
  double idle = 0;

 private:
  double error(const Philox& random) const {
    const double z = random.normal(4);
    if (noise_ == Noise::normal) return sigma_ * z;
    if (noise_ == Noise::heavy) {
      // Student's t with 3 degrees of freedom, scaled to a standard deviation of sigma.
      double squares = 0;
      for (std::uint32_t k = 0; k < 3; ++k) squares += std::pow(random.normal(8 + k), 2);
      return sigma_ / std::sqrt(3.0) * z / std::sqrt(squares / 3);
    }
    // Every twentieth step something else had the processor for up to as long again.
    return sigma_ * z + (random.uniform(12) < 0.05f ? random.uniform(13) : 0);
  }
  Noise noise_;
  double sigma_;
  std::uint64_t seed_;
};

std::string label(int ranks, Noise noise, double sigma, std::uint64_t seed) {
  return std::to_string(ranks) + " ranks, noise " + std::to_string(static_cast<int>(noise)) +
         " of " + std::to_string(sigma) + ", seed " + std::to_string(seed);
}

double alike(int, std::int64_t) { return 1; }

TEST(Stragglers, NoneIsReportedInAThousandCleanSteps) {
  for (const int ranks : rank_counts)
    for (const Noise noise : all_noises)
      for (const double sigma : {0.03, 0.05})
        for (std::uint64_t seed = 1; seed <= (ranks > 16 ? 3u : 10u); ++seed) {
          StragglerWatch watch(ranks);
          Machine machine(ranks, noise, sigma, seed);
          machine.idle = seed % 2 == 0 ? 0.1 : 0;
          for (std::int64_t step = 0; step < 1000; ++step) {
            machine.play(step, alike);
            for (const auto& v : watch.step(machine.busy, machine.expected))
              ADD_FAILURE() << label(ranks, noise, sigma, seed) << ": rank " << v.rank << " by "
                            << v.slower << " at step " << step;
          }
        }
}

TEST(Stragglers, ARankOneFifthSlowerIsFoundWithinTwentySteps) {
  constexpr std::int64_t onset = 100;
  double steps = 0, found = 0;
  for (const int ranks : rank_counts)
    for (const Noise noise : all_noises)
      for (const double sigma : {0.03, 0.05})
        for (std::uint64_t seed = 1; seed <= (ranks > 16 ? 5u : 25u); ++seed) {
          const int culprit = static_cast<int>(seed * 7) % ranks;
          StragglerWatch watch(ranks);
          Machine machine(ranks, noise, sigma, 100 + seed);
          std::int64_t at = -1;
          for (std::int64_t step = 0; step < onset + 60; ++step) {
            machine.play(step, [&](int r, std::int64_t s) {
              return r == culprit && s >= onset ? 1.2 : 1.0;
            });
            for (const auto& v : watch.step(machine.busy, machine.expected)) {
              EXPECT_EQ(v.rank, culprit) << label(ranks, noise, sigma, seed);
              EXPECT_FALSE(v.recovered);
              EXPECT_NEAR(v.slower, 1.17, 0.08);
              EXPECT_EQ(at, -1) << "reported once: " << label(ranks, noise, sigma, seed);
              at = step;
            }
          }
          EXPECT_GE(at, onset) << label(ranks, noise, sigma, seed);
          EXPECT_LT(at, onset + 20) << label(ranks, noise, sigma, seed);
          steps += static_cast<double>(at - onset + 1);
          ++found;
        }
  RecordProperty("mean_steps_to_report", std::to_string(steps / found));
}

TEST(Stragglers, OneThatIsSlowFromTheStartIsFoundToo) {
  for (const int ranks : rank_counts) {
    StragglerWatch watch(ranks);
    Machine machine(ranks, Noise::heavy, 0.04, 5);
    int reports = 0;
    for (std::int64_t step = 0; step < 20; ++step) {
      machine.play(step, [&](int r, std::int64_t) { return r == ranks - 1 ? 1.2 : 1.0; });
      for (const auto& v : watch.step(machine.busy, machine.expected)) {
        EXPECT_EQ(v.rank, ranks - 1);
        ++reports;
      }
    }
    EXPECT_EQ(reports, 1) << ranks;
  }
}

// A rank that is slow and fast in turns is a WARN in a thousand steps, however often.
TEST(Stragglers, RecoveryIsReportedAndARelapseAfterAThousandSteps) {
  for (const int ranks : {2, 8}) {
    StragglerWatch watch(ranks);
    Machine machine(ranks, Noise::heavy, 0.04, 9);
    std::vector<bool> recoveries;
    std::vector<std::int64_t> at;
    for (std::int64_t step = 0; step < 1400; ++step) {
      machine.play(step, [&](int r, std::int64_t s) {
        return r == 1 && ((s >= 50 && s < 150) || (s >= 250 && s < 350) || s >= 850) ? 1.25 : 1.0;
      });
      for (const auto& v : watch.step(machine.busy, machine.expected)) {
        EXPECT_EQ(v.rank, 1);
        recoveries.push_back(v.recovered);
        at.push_back(step);
        EXPECT_EQ(watch.slow(1), !v.recovered);
      }
    }
    ASSERT_EQ(recoveries, (std::vector<bool>{false, true, false})) << ranks << " ranks";
    EXPECT_LT(at[0], 70);
    EXPECT_GE(at[1], 150);
    EXPECT_LT(at[1], 170);
    EXPECT_EQ(at[2], at[0] + StragglerWatch::quiet);  // it has been slow for long then
  }
}

TEST(Stragglers, AWholeNodeIsFoundRankByRank) {
  StragglerWatch watch(16);
  Machine machine(16, Noise::normal, 0.04, 3);
  std::vector<int> reports(16);
  for (std::int64_t step = 0; step < 100; ++step) {
    machine.play(step, [&](int r, std::int64_t s) { return r >= 8 && s >= 40 ? 1.25 : 1.0; });
    for (const auto& v : watch.step(machine.busy, machine.expected)) ++reports[v.rank];
  }
  for (std::size_t r = 0; r < 16; ++r) EXPECT_EQ(reports[r], r >= 8 ? 1 : 0) << r;
}

TEST(Stragglers, AFewLongStepsAreNoStraggler) {
  StragglerWatch watch(4);
  Machine machine(4, Noise::normal, 0.03, 4);
  for (std::int64_t step = 0; step < 300; ++step) {
    // Three steps in a row every twenty, twenty times as long: a checkpoint, a page that was
    // swapped out.
    machine.play(step, [](int r, std::int64_t s) { return r == 2 && s % 20 < 3 ? 20.0 : 1.0; });
    EXPECT_TRUE(watch.step(machine.busy, machine.expected).empty()) << step;
  }
}

// A host that other jobs use: on any rank now and then a delay with a heavy tail, and at times a
// load that takes a share of one rank's processor for some steps on end. None of it is a property
// of the rank.
class LoadedHost {
 public:
  LoadedHost(int ranks, std::uint64_t seed) : ranks_(ranks), seed_(seed) {}

  double slower(int rank, std::int64_t step) const {
    const Philox here(seed_, Purpose::noise, static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(rank));
    double pace = 1;
    // One step in seven is delayed, by a Pareto law: 5 % in most, many times the step in a few.
    if (here.uniform(0) < 0.15f)
      pace += std::min(20.0, 0.05 / std::pow(std::max(1e-6f, here.uniform(1)), 1 / 1.3));
    // One burst in each stretch of 50 steps: 2 to 6 steps on one rank, at half to a third of its
    // pace.
    const std::int64_t stretch = step / 50;
    const Philox burst(seed_, Purpose::sampler, static_cast<std::uint64_t>(stretch), 0);
    const auto victim = static_cast<int>(burst.uniform(0) * static_cast<float>(ranks_));
    const auto begin = static_cast<std::int64_t>(burst.uniform(1) * 40);
    const auto length = 2 + static_cast<std::int64_t>(burst.uniform(2) * 5);
    if (rank == victim && step % 50 >= begin && step % 50 < begin + length)
      pace *= 2 + burst.uniform(3);
    return pace;
  }

 private:
  int ranks_;
  std::uint64_t seed_;
};

TEST(Stragglers, NoneIsReportedInAThousandCleanStepsOfALoadedHost) {
  for (const int ranks : {2, 3, 4, 8})
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
      StragglerWatch watch(ranks);
      Machine machine(ranks, Noise::heavy, 0.04, seed);
      const LoadedHost host(ranks, seed);
      for (std::int64_t step = 0; step < 1000; ++step) {
        machine.play(step, [&](int r, std::int64_t s) { return host.slower(r, s); });
        for (const auto& v : watch.step(machine.busy, machine.expected))
          ADD_FAILURE() << label(ranks, Noise::heavy, 0.04, seed) << ": rank " << v.rank << " by "
                        << v.slower << " at step " << step;
      }
    }
}

TEST(Stragglers, ARankOneFifthSlowerIsFoundOnALoadedHostToo) {
  constexpr std::int64_t onset = 100, within = 40;
  for (const int ranks : {2, 3, 4, 8})
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
      const int culprit = static_cast<int>(seed) % ranks;
      StragglerWatch watch(ranks);
      Machine machine(ranks, Noise::heavy, 0.04, 200 + seed);
      const LoadedHost host(ranks, 200 + seed);
      std::int64_t at = -1;
      for (std::int64_t step = 0; step < onset + within && at < 0; ++step) {
        machine.play(step, [&](int r, std::int64_t s) {
          return host.slower(r, s) * (r == culprit && s >= onset ? 1.2 : 1.0);
        });
        for (const auto& v : watch.step(machine.busy, machine.expected)) {
          EXPECT_EQ(v.rank, culprit);
          at = step;
        }
      }
      EXPECT_GE(at, onset) << label(ranks, Noise::heavy, 0.04, seed) << ": not found";
    }
}

TEST(Stragglers, RanksWithoutWorkAreNotJudged) {
  StragglerWatch watch(3);
  for (int step = 0; step < 100; ++step) {
    const double busy[] = {1.0, 5.0, 0.0}, expected[] = {2.0, 0.0, 0.0};
    EXPECT_TRUE(watch.step(busy, expected).empty());
  }
  StragglerWatch one(1);
  const double busy[] = {1.0}, expected[] = {1.0};
  EXPECT_TRUE(one.step(busy, expected).empty());
}

TEST(Stragglers, TwiceTheWorkIsNotTwiceAsSlow) {
  StragglerWatch watch(2);
  for (int step = 0; step < 100; ++step) {
    const double busy[] = {2.0, 1.0}, expected[] = {20.0, 10.0};
    EXPECT_TRUE(watch.step(busy, expected).empty());
  }
}

}  // namespace
}  // namespace weft
