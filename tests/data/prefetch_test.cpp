#include "data/prefetch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
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

// Two buckets of six clips, some of them damaged; a clip is full of its number in the source, and
// so is its text.
class Damaged : public ClipSource {
 public:
  explicit Damaged(std::set<std::int64_t> damaged) : damaged_(std::move(damaged)) {
    for (Bucket& b : buckets_) {
      b.frames = 1, b.height = 2, b.width = 2, b.clips = 6;
      b.text_channels = 1;
    }
  }
  const std::vector<Bucket>& buckets() const override { return buckets_; }
  ClipInfo info(int b, std::int64_t i) const override { return {static_cast<float>(6 * b + i)}; }
  void read(int b, std::int64_t i, std::span<std::byte> out) const override {
    if (damaged_.contains(6 * b + i)) throw DamagedClip(Exit::data, "a clip is damaged");
    std::fill(out.begin(), out.end(), static_cast<std::byte>(6 * b + i));
  }
  std::vector<float> read_text(int b, std::int64_t i) const override {
    return {static_cast<float>(6 * b + i)};
  }

 private:
  std::vector<Bucket> buckets_{2};
  std::set<std::int64_t> damaged_;
};

// The clips that come for all of a source's, a micro-batch of three at a time.
std::vector<std::int64_t> delivered(const Damaged& source, double max_damaged) {
  const auto work = [](std::int64_t step) {
    const std::int64_t first = step % 2 * 3, bucket = step / 2;
    MicroBatch m;
    m.bucket = static_cast<int>(bucket);
    for (std::int64_t i = first; i < first + 3; ++i) {
      m.clips.push_back(i);
      m.samples.push_back(6 * bucket + i);
    }
    return Prefetcher::Work{{0, m}};
  };
  Prefetcher prefetch(source, work, 0, 4, 2, 2, far, max_damaged);
  std::vector<std::int64_t> ids;
  for (int step = 0; step < 4; ++step) {
    const LoadedBatch& got = prefetch.next();
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t id = got.what.samples[i];
      EXPECT_EQ(id, 6 * got.what.bucket + got.what.clips[i]);
      EXPECT_EQ(static_cast<std::int64_t>(got.bytes[i * 12]), id);
      EXPECT_EQ(got.text[i], std::vector<float>{static_cast<float>(id)});
      EXPECT_EQ(got.info[i].fps, static_cast<float>(id));
      ids.push_back(id);
    }
  }
  return ids;
}

TEST(Prefetch, DamagedClipsAreReplacedByTheNextWholeOne) {
  // Clips 2, 4 and 5 of the first bucket, and the first of the second: 5's place goes round to clip
  // 0.
  const Damaged source({2, 4, 5, 6});
  const std::vector<std::int64_t> wanted{0, 1, 3, 3, 0, 0, 7, 7, 8, 9, 10, 11};
  for (int round = 0; round < 5; ++round) EXPECT_EQ(delivered(source, 4.0 / 12), wanted);
}

TEST(Prefetch, TooManyDamagedClipsEndTheJob) {
  EXPECT_THROW(delivered(Damaged({2, 4, 5, 6}), 3.9 / 12), DamagedClip);
  EXPECT_THROW(delivered(Damaged({2}), 0), DamagedClip);
  EXPECT_THROW(delivered(Damaged({0, 1, 2, 3, 4, 5}), 1), DamagedClip);  // a bucket without any
}

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
      const std::size_t size = source->buckets()[plan[i].bucket].clip_bytes();
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

// Costs that a step measures decide who gets what in the steps behind the horizon: none of those
// may be planned before.
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

// With a horizon of 0 a step's work is planned when it begins, and what it gave before stays valid
// until the next one.
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
