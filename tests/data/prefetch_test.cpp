#include "data/prefetch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/error.h"
#include "data/synthetic.h"

namespace weft {
namespace {

constexpr std::int64_t far = 1000;  // a horizon behind all steps

// All of a planner's micro-batches of each step.
std::function<Prefetcher::Work(std::int64_t)> all_of(const StepPlanner& planner) {
  return [&planner](std::int64_t step) {
    Prefetcher::Work work;
    for (MicroBatch& m : planner.plan(step))
      work.emplace_back(static_cast<int>(work.size()), std::move(m));
    return work;
  };
}

// Fails on one clip, or blocks on every one until it is let go.
class Awkward : public ClipSource {
 public:
  explicit Awkward(std::int64_t bad, bool blocked = false) : bad_(bad), blocked_(blocked) {}
  const std::vector<Bucket>& buckets() const override { return inner_->buckets(); }
  ClipInfo info(int b, std::int64_t i) const override { return inner_->info(b, i); }
  void read(int b, std::int64_t i, std::span<std::byte> out) const override {
    begun.fetch_add(1);
    std::unique_lock lock(mutex_);
    free_.wait(lock, [&] { return !blocked_; });
    if (i == bad_) throw Error(Exit::data, "clip 5 is damaged");
    inner_->read(b, i, out);
  }
  void let_go() {
    std::lock_guard lock(mutex_);
    blocked_ = false;
    free_.notify_all();
  }
  mutable std::atomic<int> begun = 0;

 private:
  std::unique_ptr<ClipSource> inner_ = make_synthetic_source("clips=16,frames=2,height=8,width=8");
  std::int64_t bad_;
  bool blocked_;
  mutable std::mutex mutex_;
  mutable std::condition_variable free_;
};

class PrefetchShape : public testing::TestWithParam<std::pair<int, int>> {};

TEST_P(PrefetchShape, InOrderWithEqualBytes) {
  const auto [slots, readers] = GetParam();
  const auto source = make_synthetic_source(
      "clips=9,frames=2,height=8,width=8;clips=7,frames=3,height=4,width=12;"
      "clips=5,frames=2,height=4,width=4,latent=1");
  const StepPlanner planner(source->buckets(), 3, 2, 11);
  Prefetcher prefetch(*source, all_of(planner), 4, 40, slots, readers, far);
  for (std::int64_t step = 4; step < 40; ++step) {
    const auto plan = planner.plan(step);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      const LoadedBatch& got = prefetch.next();
      ASSERT_EQ(got.step, step);
      ASSERT_EQ(got.index, static_cast<int>(i));
      ASSERT_EQ(got.what.samples, plan[i].samples);
      const std::size_t size =
          source->buckets()[static_cast<std::size_t>(plan[i].bucket)].clip_bytes();
      ASSERT_EQ(got.bytes.size(), size * plan[i].clips.size());
      ASSERT_GE(got.waited_seconds, 0);
      std::vector<std::byte> clip(size);
      for (std::size_t c = 0; c < plan[i].clips.size(); ++c) {
        source->read(plan[i].bucket, plan[i].clips[c], clip);
        ASSERT_EQ(std::memcmp(clip.data(), got.bytes.data() + c * size, size), 0);
        EXPECT_EQ(got.info[c].source, source->info(plan[i].bucket, plan[i].clips[c]).source);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rings, PrefetchShape,
                         testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(4, 3),
                                         std::pair(1, 4), std::pair(16, 8), std::pair(64, 2)));

// A rank that has nothing in some steps goes on to the next step that has.
TEST(Prefetch, StepsWithoutWork) {
  const auto source = make_synthetic_source("clips=8,frames=2,height=8,width=8");
  const StepPlanner planner(source->buckets(), 1, 1, 3);
  const auto work = [&](std::int64_t step) {
    Prefetcher::Work w;
    if (step % 3 == 1) w.emplace_back(5, planner.plan(step)[0]);
    return w;
  };
  Prefetcher prefetch(*source, work, 0, 30, 4, 2, far);
  for (std::int64_t step = 1; step < 30; step += 3) {
    const LoadedBatch& got = prefetch.next();
    EXPECT_EQ(got.step, step);
    EXPECT_EQ(got.index, 5);
  }
}

TEST(Prefetch, ErrorsAreThrownWhereTheyBelong) {
  const Awkward source(5);
  const auto work = [](std::int64_t step) {
    return Prefetcher::Work{{0, MicroBatch{0, {step}, {step}}}};
  };
  Prefetcher prefetch(source, work, 0, 16, 4, 3, far);
  for (std::int64_t step = 0; step < 5; ++step) EXPECT_EQ(prefetch.next().step, step);
  for (int again = 0; again < 2; ++again) {
    try {
      prefetch.next();
      FAIL() << "a damaged clip was delivered";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
    }
  }
}

TEST(Prefetch, AnErrorOfThePlanReachesTheCaller) {
  const Awkward source(-1);
  const auto work = [](std::int64_t step) -> Prefetcher::Work {
    if (step == 6) throw std::runtime_error("no plan");
    return {{0, MicroBatch{0, {step}, {step}}}};
  };
  Prefetcher prefetch(source, work, 0, 16, 2, 1, far);
  bool thrown = false;
  for (int i = 0; i < 16 && !thrown; ++i) {
    try {
      prefetch.next();
    } catch (const std::runtime_error&) {
      thrown = true;
    }
  }
  EXPECT_TRUE(thrown);
}

TEST(Prefetch, AskingForTooMuchIsABug) {
  const Awkward source(-1);
  const auto work = [](std::int64_t step) {
    return Prefetcher::Work{{0, MicroBatch{0, {step}, {step}}}};
  };
  Prefetcher prefetch(source, work, 0, 2, 4, 1, far);
  prefetch.next();
  prefetch.next();
  EXPECT_THROW(prefetch.next(), Error);
}

// The ring is the bound: with every slot filled and none taken, readers begin no more clips.
TEST(Prefetch, ReadsNoFurtherThanTheRing) {
  const Awkward source(-1);
  const auto work = [](std::int64_t step) {
    return Prefetcher::Work{{0, MicroBatch{0, {step % 16}, {step}}}};
  };
  Prefetcher prefetch(source, work, 0, 1000, 3, 2, far);
  prefetch.next();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(source.begun.load(), 3);
}

TEST(Prefetch, DestroyedWhileReadersAreBusy) {
  for (int round = 0; round < 20; ++round) {
    const auto source = make_synthetic_source("clips=64,frames=8,height=64,width=64");
    const StepPlanner planner(source->buckets(), 4, 2, 3);
    Prefetcher prefetch(*source, all_of(planner), 0, 1000, 8, 4, far);
    for (int i = 0; i < round % 3; ++i) prefetch.next();
  }
}

// The destructor waits for the clips that are being read, and for no other.
TEST(Prefetch, DestroyedInTheMiddleOfARead) {
  const auto work = [](std::int64_t step) {
    return Prefetcher::Work{{0, MicroBatch{0, {0, 1, 2, 3}, {0, 1, 2, 3}}}};
  };
  // The helper may let go before the destructor has begun, but not each time.
  int begun = 0;
  for (int k = 0; k < 10 && begun != 2; ++k) {
    Awkward source(-1, true);
    std::thread helper;
    {
      Prefetcher prefetch(source, work, 0, 1000, 4, 2, far);
      while (source.begun.load() < 2) std::this_thread::yield();
      helper = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        source.let_go();
      });
    }
    helper.join();
    begun = source.begun.load();
  }
  EXPECT_EQ(begun, 2);
}

// Costs that a step measures decide who gets what in the steps behind the horizon: none of those may be planned before.
TEST(Prefetch, PlansNoStepBehindTheHorizon) {
  const Awkward source(-1);
  std::int64_t planned = -1;
  const auto work = [&](std::int64_t step) {
    planned = step;
    // No work in two steps of three: the rank goes through those without next().
    return step % 3 == 0 ? Prefetcher::Work{{0, MicroBatch{0, {step % 16}, {step}}}}
                         : Prefetcher::Work();
  };
  Prefetcher prefetch(source, work, 2, 40, 16, 2, 3);
  EXPECT_EQ(planned, 5);
  for (std::int64_t step = 2; step < 40; ++step) {
    prefetch.begin_step(step);
    EXPECT_EQ(planned, std::min<std::int64_t>(step + 3, 39));
    if (step % 3 != 0) continue;
    EXPECT_EQ(prefetch.next().step, step);
    EXPECT_EQ(planned, std::min<std::int64_t>(step + 3, 39));
  }
  EXPECT_THROW(prefetch.begin_step(3), Error);  // time does not go back
}

// With a horizon of 0 a step's work is planned when it begins, and what it gave before stays valid until the next one.
TEST(Prefetch, NoHorizonAtAll) {
  const Awkward source(-1);
  const auto work = [](std::int64_t step) {
    return Prefetcher::Work{{0, MicroBatch{0, {step}, {step}}},
                            {1, MicroBatch{0, {step + 1}, {step + 1}}}};
  };
  Prefetcher prefetch(source, work, 0, 8, 4, 2, 0);
  for (std::int64_t step = 0; step < 8; ++step) {
    prefetch.begin_step(step);
    EXPECT_EQ(prefetch.next().index, 0);
    EXPECT_EQ(prefetch.next().index, 1);
    EXPECT_THROW(prefetch.next(), Error);
  }
}

TEST(Prefetch, DefaultReaders) {
  EXPECT_EQ(Prefetcher::default_readers(1), 1);
  EXPECT_EQ(Prefetcher::default_readers(4), 1);
  EXPECT_EQ(Prefetcher::default_readers(8), 2);
  EXPECT_EQ(Prefetcher::default_readers(64), 4);
}

}  // namespace
}  // namespace weft
