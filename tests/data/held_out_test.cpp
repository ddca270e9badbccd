#include "data/held_out.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "core/error.h"
#include "data/step_plan.h"

namespace weft {
namespace {

using testing::HasSubstr;

TrainingData split(const std::string& path, double share, std::uint64_t seed = 7) {
  DataDeck data;
  data.path = path;
  data.short_sides = {32};
  data.max_side = 64;
  data.crop = 32;
  return open_training_data(data, {}, {"", share, seed});
}

constexpr const char* three_buckets =
    "synthetic:clips=20,frames=2,height=8,width=8;clips=7,frames=1,height=8,width=8;"
    "clips=1,frames=3,height=8,width=8";

std::set<std::int64_t> ids_of(const ClipSource& source) {
  std::set<std::int64_t> ids;
  for (int b = 0; b < std::ssize(source.buckets()); ++b)
    for (std::int64_t i = 0; i < source.buckets()[b].clips; ++i)
      EXPECT_TRUE(ids.insert(source.sample_id(b, i)).second);
  return ids;
}

TEST(HeldOut, TheShareOfEachBucketRoundedAndNeverAll) {
  const TrainingData data = split(three_buckets, 0.25);
  const auto& held = data.held_out.clips->buckets();
  const auto& rest = data.training->buckets();
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0].clips, 5);
  EXPECT_EQ(held[1].clips, 2);  // of 1.75
  EXPECT_EQ(held[2].clips, 0);
  for (std::size_t b = 0; b < 3; ++b) EXPECT_EQ(rest[b].name, held[b].name);
  std::set<std::int64_t> all = ids_of(*data.training);
  all.merge(ids_of(*data.held_out.clips));
  EXPECT_EQ(all.size(), 28u) << "no clip is in both";
  EXPECT_EQ(*all.rbegin(), 27);
  EXPECT_EQ(held_out_of(4, 0.99, 1, 0).size(), 3u);
  EXPECT_TRUE(held_out_of(1, 0.99, 1, 0).empty());
}

TEST(HeldOut, OfSeveralStores) {
  DataDeck data;
  data.paths = {"synthetic:clips=40,frames=2,height=8,width=8,seed=1",
                "synthetic:clips=10,frames=2,height=8,width=8,seed=2"};
  data.weights = {1, 1};
  const TrainingData split = open_training_data(data, {}, {"", 0.2, 7});
  const ClipSource &rest = *split.training, &held = *split.held_out.clips;
  EXPECT_EQ(rest.store_names().size(), 2u);
  EXPECT_EQ(rest.buckets().at(0).clips, 40);
  EXPECT_EQ(held.buckets().at(0).clips, 10);
  std::set<std::int64_t> all = ids_of(rest);
  all.merge(ids_of(held));
  EXPECT_EQ(all.size(), 50u) << "no clip is in both";

  // Half of the samples are of each store, and none is held out.
  const auto plan = rest.plan_steps({4}, 10, 3);
  std::array<std::int64_t, 2> of_store{};
  const std::set<std::int64_t> may = ids_of(rest);
  for (std::int64_t step = 0; step < 50; ++step)
    for (const MicroBatch& m : plan->plan(step))
      for (std::size_t i = 0; i < m.clips.size(); ++i) {
        ASSERT_TRUE(may.contains(m.samples[i]));
        ASSERT_EQ(m.samples[i], rest.sample_id(0, m.clips[i]));
        ++of_store[rest.buckets()[0].part_of(m.clips[i]).store];
      }
  EXPECT_NEAR(static_cast<double>(of_store[0]) / static_cast<double>(of_store[0] + of_store[1]),
              0.5, 0.01);
}

TEST(HeldOut, AFunctionOfTheSeed) {
  EXPECT_EQ(held_out_of(1000, 0.1, 7, 0), held_out_of(1000, 0.1, 7, 0));
  EXPECT_NE(held_out_of(1000, 0.1, 7, 0), held_out_of(1000, 0.1, 8, 0));
  EXPECT_NE(held_out_of(1000, 0.1, 7, 0), held_out_of(1000, 0.1, 7, 1));
  const auto numbers = held_out_of(1000, 0.1, 7, 0);
  EXPECT_TRUE(std::ranges::is_sorted(numbers));
  // A larger share holds out the same and more.
  const auto more = held_out_of(1000, 0.2, 7, 0);
  EXPECT_TRUE(std::ranges::includes(more, numbers));
}

// The steps name clips by their ids in the whole source, and read their bytes.
TEST(HeldOut, TrainingNeverSeesThem) {
  const TrainingData data = split(three_buckets, 0.25);
  const auto whole = open_clip_source(three_buckets, true);
  const std::set<std::int64_t> held = ids_of(*data.held_out.clips);
  const auto plan = data.training->plan_steps({2, 2, 2}, 3, 5);
  std::set<std::int64_t> seen;
  for (std::int64_t step = 0; step < 40; ++step)
    for (const MicroBatch& m : plan->plan(step))
      for (std::size_t i = 0; i < m.clips.size(); ++i) {
        seen.insert(m.samples[i]);
        std::vector<std::byte> one(data.training->clip_bytes(m)), other(one.size());
        data.training->read_sample(m, i, one);
        whole->read(m.bucket, m.samples[i] - whole->sample_id(m.bucket, 0), other);
        EXPECT_EQ(one, other);
      }
  EXPECT_EQ(seen, ids_of(*data.training));
  for (const std::int64_t id : held) EXPECT_FALSE(seen.contains(id));
}

// A damaged clip is replaced by the next one that is trained on.
TEST(HeldOut, TheNextClipIsNoneOfThem) {
  const TrainingData data = split(three_buckets, 0.25);
  const ClipSource& source = *data.training;
  MicroBatch m;
  m.clips = {source.buckets()[0].clips - 1};
  m.samples = {source.sample_id(0, m.clips[0])};
  source.take_next(m, 0);
  EXPECT_EQ(m.clips[0], 0);
  EXPECT_EQ(m.samples[0], source.sample_id(0, 0));
}

TEST(HeldOut, ImagesAndPicturesWithText) {
  const TrainingData images = split("shapes:images=10,classes=3,height=40,width=40", 0.3);
  EXPECT_EQ(images.held_out.images->count(), 3);
  EXPECT_EQ(images.training->buckets()[0].clips, 7);
  const TrainingData texts = split("text:images=10,height=64,width=64,words=1,letters=8..9", 0.3);
  EXPECT_EQ(texts.held_out.texts->count(), 3);
  EXPECT_EQ(texts.training->buckets()[0].clips, 7);
  std::set<std::string> names;
  for (std::int64_t i = 0; i < 3; ++i) names.insert(images.held_out.images->name(i));
  for (std::int64_t i = 0; i < 7; ++i)
    EXPECT_FALSE(names.contains(images.training->info(0, i).source));
}

TEST(HeldOut, AShareOfNoneIsRefused) {
  try {
    split(three_buckets, 0.01);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), HasSubstr("validation.share = 0.01 of the 28 clips"));
  }
}

}  // namespace
}  // namespace weft
