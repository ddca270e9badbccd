// Mixes of stores and data.keep: what an epoch draws, of which store, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "core/error.h"
#include "data/clip_store.h"
#include "data/mix_plan.h"
#include "data/mixed_source.h"
#include "data/synthetic.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string clips(int count, int seed, int frames = 2, int side = 8) {
  return fmt::format("synthetic:clips={},frames={},height={},width={},seed={}", count, frames, side,
                     side, seed);
}

DataDeck mix(std::vector<std::string> paths, std::vector<double> weights = {},
             std::vector<std::string> keep = {}) {
  DataDeck deck;
  deck.paths = std::move(paths);
  deck.weights = std::move(weights);
  deck.keep = std::move(keep);
  return deck;
}

std::unique_ptr<StepPlan> plan_of(const ClipSource& source, std::vector<std::int64_t> sizes,
                                  std::int64_t micro_batches, std::uint64_t seed = 5) {
  return source.plan_steps(std::move(sizes), micro_batches, seed);
}

// An epoch's micro-batches, asked for as steps of one.
std::vector<MicroBatch> epoch_of(const StepPlan& plan, std::int64_t e) {
  std::vector<MicroBatch> all;
  const std::int64_t n = plan.micro_batches_per_epoch();
  for (std::int64_t s = e * n; s < (e + 1) * n; ++s) all.push_back(plan.plan(s).at(0));
  return all;
}

using Counts = std::map<SampleId, std::int64_t>;

void expect_refused(const DataDeck& deck, Exit code, const std::string& what) {
  try {
    open_clip_source(deck);
    ADD_FAILURE() << "taken; expected: " << what;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_THAT(std::string(e.what()) + " | " + e.hint(), HasSubstr(what));
  }
}

TEST(Apportionment, EachTotalToOneAndAllOfThemTogether) {
  const std::vector<double> weights = {0.7, 0.2, 0, 0.1, 1e-4, 3};
  Apportionment shares(weights);
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::mt19937_64 random(3);
  std::vector<std::int64_t> had(weights.size());
  std::int64_t dealt = 0;
  for (int round = 0; round < 5000; ++round) {
    const auto total = static_cast<std::int64_t>(random() % (round % 2 == 0 ? 7 : 5000));
    const std::vector<std::int64_t> counts = shares.deal(total);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), total);
    dealt += total;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double quota = static_cast<double>(total) * weights[i] / all;
      EXPECT_LT(std::abs(static_cast<double>(counts[i]) - quota), 1) << round << " " << i;
      had[i] += counts[i];
      EXPECT_LT(
          std::abs(static_cast<double>(had[i]) - static_cast<double>(dealt) * weights[i] / all), 2)
          << round << " " << i;
    }
  }
  EXPECT_EQ(had[2], 0);
}

TEST(Mix, TenThousandStepsOnAnyRanks) {
  const auto source = open_clip_source(mix({clips(30, 1), clips(10, 2), clips(7, 3)}, {5, 3, 2}));
  const auto store_of = [](SampleId id) { return id < 30 ? 0 : id < 40 ? 1 : 2; };
  constexpr std::int64_t G = 7, size = 2;
  const auto plan = plan_of(*source, {size}, G);
  const std::int64_t epoch = plan->micro_batches_per_epoch();
  EXPECT_EQ(epoch, 47 / size);
  std::map<int, Counts> of_ranks;  // 1, 2, 7
  Counts counts;
  std::map<int, std::int64_t> before;
  for (std::int64_t s = 0; s < 10'000; ++s) {
    const std::vector<MicroBatch> step = plan->plan(s);
    for (const int ranks : {1, 2, 7}) {
      const std::vector<int> owner =
          owners(std::vector<double>(step.size(), 1.0), ranks, SyncMode::per_step);
      for (int r = 0; r < ranks; ++r)
        for (std::size_t i = 0; i < step.size(); ++i)
          if (owner[i] == r)
            for (const SampleId id : step[i].samples) ++of_ranks[ranks][id];
    }
    for (std::size_t i = 0; i < step.size(); ++i) {
      for (const SampleId id : step[i].samples) ++counts[id];
      const std::int64_t done = s * G + static_cast<std::int64_t>(i) + 1;
      if (done % epoch != 0) continue;
      // At the end of an epoch: its shares to one sample, and no clip ahead of another of its
      // store.
      std::map<int, std::int64_t> now;
      std::map<int, std::set<std::int64_t>> times;
      for (SampleId id = 0; id < 47; ++id) {
        now[store_of(id)] += counts[id];
        times[store_of(id)].insert(counts[id]);
      }
      const double weights[] = {0.5, 0.3, 0.2};
      for (int store = 0; store < 3; ++store) {
        const double quota = static_cast<double>(epoch * size) * weights[store];
        EXPECT_LT(std::abs(static_cast<double>(now[store] - before[store]) - quota), 1);
        EXPECT_LT(std::abs(static_cast<double>(now[store]) -
                           static_cast<double>(done * size) * weights[store]),
                  2);
        EXPECT_LE(*times[store].rbegin() - *times[store].begin(), 1) << "step " << s;
      }
      before = now;
    }
  }
  EXPECT_EQ(of_ranks[1], counts);
  EXPECT_EQ(of_ranks[2], counts);
  EXPECT_EQ(of_ranks[7], counts);
}

// A restart asks a new planner for any step first; readers of short epochs ask back and forth.
TEST(Mix, RestartsAtRandomSteps) {
  const auto source = open_clip_source(
      mix({clips(9, 1), clips(4, 2) + ";clips=3,frames=1,height=8,width=8"}, {1, 3}));
  const auto whole = plan_of(*source, {2, 2}, 3);
  std::vector<std::vector<MicroBatch>> steps;
  for (std::int64_t s = 0; s < 2000; ++s) steps.push_back(whole->plan(s));
  std::mt19937_64 random(1);
  const auto same = [&](const StepPlan& plan, std::int64_t s) {
    const std::vector<MicroBatch> step = plan.plan(s);
    ASSERT_EQ(step.size(), steps[s].size());
    for (std::size_t i = 0; i < step.size(); ++i) {
      EXPECT_EQ(step[i].samples, steps[s][i].samples) << "step " << s;
      EXPECT_EQ(step[i].clips, steps[s][i].clips) << "step " << s;
    }
  };
  for (int i = 0; i < 20; ++i) {
    const auto from = static_cast<std::int64_t>(random() % 1990);
    const auto restarted = plan_of(*source, {2, 2}, 3);
    for (std::int64_t s = from; s < from + 10; ++s) same(*restarted, s);
    same(*restarted, from);
    same(*whole, from);
  }
  EXPECT_NE(plan_of(*source, {2, 2}, 3, 6)->plan(0).at(0).samples, steps[0].at(0).samples);
}

// A store of pictures and one of videos: the weights hold over all buckets, whatever their batches.
TEST(Mix, PicturesAndVideosByRatio) {
  const std::string pictures = clips(100, 1, 1) + ",name=p",
                    videos =
                        clips(60, 2, 4) + ",name=v-1;clips=20,frames=2,height=8,width=8,name=v-2";
  const auto source = open_clip_source(mix({pictures, videos}, {1, 3}));
  ASSERT_EQ(source->buckets().size(), 3u);
  const auto plan = plan_of(*source, {32, 5, 3}, 1);
  std::map<int, std::int64_t> samples, batches;
  constexpr int epochs = 200;
  for (int e = 0; e < epochs; ++e) {
    std::map<int, std::int64_t> in_epoch;
    for (const MicroBatch& m : epoch_of(*plan, e)) {
      samples[m.bucket] += std::ssize(m.samples);
      ++in_epoch[m.bucket];
    }
    for (const auto& [b, n] : in_epoch) batches[b] += n;
    // 180 samples: 45 pictures are 1.4 micro-batches.
    EXPECT_GE(in_epoch[0], 1);
    EXPECT_LE(in_epoch[0], 2);
  }
  const double all = static_cast<double>(samples[0] + samples[1] + samples[2]);
  EXPECT_NEAR(static_cast<double>(samples[0]) / all, 0.25, 32 / all);
  EXPECT_NEAR(static_cast<double>(samples[1]) / all, 0.75 * 0.75, 32 / all);
  EXPECT_NEAR(static_cast<double>(samples[2]) / all, 0.75 * 0.25, 32 / all);
}

TEST(Mix, WithoutWeightsEveryClipOnceAnEpoch) {
  const auto source = open_clip_source(mix({clips(12, 1), clips(20, 2)}));
  const auto plan = plan_of(*source, {4}, 1);
  for (int e = 0; e < 3; ++e) {
    Counts counts;
    for (const MicroBatch& m : epoch_of(*plan, e))
      for (const SampleId id : m.samples) ++counts[id];
    EXPECT_EQ(counts.size(), 32u);
    EXPECT_EQ(counts.rbegin()->first, 31);
  }
}

// Named twice it is one store of twice the weight.
TEST(Mix, AStoreNamedTwice) {
  const std::string a = clips(8, 1), b = clips(24, 2);
  const auto source = open_clip_source(mix({a, b, a}, {1, 2, 1}));
  EXPECT_THAT(source->store_names(), ElementsAre(a, b));
  EXPECT_EQ(source->buckets()[0].clips, 32);
  const auto plan = plan_of(*source, {1}, 1);
  EXPECT_EQ(plan->micro_batches_per_epoch(), 40) << "8 + 24 + 8";
  Counts counts;
  for (const MicroBatch& m : epoch_of(*plan, 0)) ++counts[m.samples.at(0)];
  for (SampleId id = 0; id < 8; ++id) EXPECT_TRUE(counts[id] == 2 || counts[id] == 3) << id;
  for (SampleId id = 8; id < 32; ++id) EXPECT_LE(counts[id], 1) << id;

  DataDeck twice = mix({a, a}, {1, 3});
  const auto one = open_clip_source(twice);
  EXPECT_TRUE(one->store_names().empty()) << "there are not several";
  twice.prompt_prefixes = {"", "red, "};
  expect_refused(twice, Exit::usage, "twice, with different data.prompt_prefixes");
}

TEST(Mix, ClipsIdsAndCaptions) {
  const std::string a = clips(3, 1) + ",name=x;clips=2,frames=1,height=8,width=8,name=y",
                    b = clips(4, 2, 1) + ",name=y;clips=5,frames=3,height=8,width=8,name=z";
  DataDeck deck = mix({a, b});
  deck.prompt_prefixes = {"", "film grain, "};
  const auto source = open_clip_source(deck), first = make_synthetic_source(a.substr(10)),
             second = make_synthetic_source(b.substr(10));
  ASSERT_EQ(source->buckets().size(), 3u);
  EXPECT_EQ(source->buckets()[1].name, "y");
  EXPECT_EQ(source->buckets()[1].clips, 6);
  // Bucket, clip: the same in its store.
  const auto equal = [&](int bucket, std::int64_t i, const ClipSource& store, int own,
                         std::int64_t j) {
    std::vector<std::byte> here(source->buckets()[bucket].clip_bytes()), there(here.size());
    source->read(bucket, i, here);
    store.read(own, j, there);
    return here == there;
  };
  EXPECT_TRUE(equal(0, 2, *first, 0, 2));
  EXPECT_TRUE(equal(1, 1, *first, 1, 1));
  EXPECT_TRUE(equal(1, 2, *second, 0, 0));
  EXPECT_TRUE(equal(1, 5, *second, 0, 3));
  EXPECT_TRUE(equal(2, 4, *second, 1, 4));
  EXPECT_EQ(source->info(1, 0).text, first->info(1, 0).text);
  EXPECT_EQ(source->info(1, 3).text, "film grain, " + second->info(0, 1).text);

  // Ids are those of the stores, one after the other.
  std::map<std::pair<int, std::int64_t>, SampleId> ids;
  for (const MicroBatch& m : epoch_of(*plan_of(*source, {1, 1, 1}, 1), 0))
    ids[{m.bucket, m.clips[0]}] = m.samples[0];
  EXPECT_EQ(ids.size(), 14u);
  EXPECT_EQ((ids[{0, 2}]), 2);
  EXPECT_EQ((ids[{1, 1}]), 4);
  EXPECT_EQ((ids[{1, 2}]), 5);
  EXPECT_EQ((ids[{2, 0}]), 9);

  // A damaged clip's place is taken by one of its store.
  MicroBatch m;
  m.bucket = 1, m.clips = {1, 5}, m.samples = {4, 8};
  source->take_next(m, 0);
  source->take_next(m, 1);
  EXPECT_THAT(m.clips, ElementsAre(0, 2));
  EXPECT_THAT(m.samples, ElementsAre(3, 5));

  EXPECT_NE(source->content_id(), open_clip_source(mix({b, a}))->content_id());
  EXPECT_NE(source->content_id(), open_clip_source(mix({a, clips(4, 2)}))->content_id());
  EXPECT_EQ(source->content_id(), open_clip_source(mix({a, b}, {1, 9}))->content_id());
}

TEST(Keep, AShareOfABucketAnotherOneEachEpoch) {
  DataDeck deck;
  deck.path = clips(40, 1) +
              ",name=a-1;clips=30,frames=1,height=8,width=8,name=a-2;"
              "clips=10,frames=3,height=8,width=8,name=b";
  deck.keep = {"a=0.25", "a-2=0.5", "b=0"};
  const auto source = open_clip_source(deck);
  EXPECT_EQ(source->content_id(), make_synthetic_source(deck.path.substr(10))->content_id());
  EXPECT_EQ(samples_in_batch(source->buckets()[2], 4), 0) << "nothing is planned for it";
  const auto plan = plan_of(*source, {1, 1, 1}, 1);
  ASSERT_EQ(plan->micro_batches_per_epoch(), 10 + 15);
  std::set<std::set<SampleId>> different;
  for (int round = 0; round < 5; ++round) {
    std::map<int, Counts> of_round;
    for (int e = 4 * round; e < 4 * (round + 1); ++e) {
      std::map<int, std::set<SampleId>> kept;
      for (const MicroBatch& m : epoch_of(*plan, e)) {
        kept[m.bucket].insert(m.samples[0]);
        ++of_round[m.bucket][m.samples[0]];
      }
      EXPECT_EQ(kept[0].size(), 10u);
      EXPECT_EQ(kept[1].size(), 15u);
      EXPECT_FALSE(kept.contains(2));
      EXPECT_TRUE(different.insert(kept[0]).second);
    }
    // Four epochs of a quarter are a pass.
    EXPECT_EQ(of_round[0].size(), 40u);
    EXPECT_EQ(of_round[1].size(), 30u);
  }
}

// A rare bucket keeps its share over the epochs, not one clip at least in each.
TEST(Keep, OfFewClipsOverManyEpochs) {
  DataDeck deck;
  deck.path = clips(3, 1) + ",name=rare;clips=100,frames=1,height=8,width=8,name=often";
  deck.keep = {"rare=0.1"};
  const auto source = open_clip_source(deck);
  const auto plan = plan_of(*source, {1, 1}, 1);
  std::int64_t rare = 0, all = 0;
  for (int e = 0; e < 100; ++e)
    for (const MicroBatch& m : epoch_of(*plan, e)) ++all, rare += m.bucket == 0 ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(rare), static_cast<double>(all) * 0.3 / 100.3, 1);
}

TEST(Keep, WithWeights) {
  const auto source = open_clip_source(
      mix({clips(40, 1) + ",name=a", clips(10, 2) + ",name=b"}, {1, 1}, {"a=0.5"}));
  const auto plan = plan_of(*source, {1, 1}, 1);
  EXPECT_EQ(plan->micro_batches_per_epoch(), 20 + 10);
  std::map<int, int> batches;
  for (const MicroBatch& m : epoch_of(*plan, 0)) ++batches[m.bucket];
  EXPECT_EQ(batches[0], 15);
  EXPECT_EQ(batches[1], 15);
}

// One store in a list is the store, to the bit.
TEST(Mix, ASingleStoreIsNoMix) {
  DataDeck deck;
  deck.path = clips(13, 1);
  deck.weights = {3};
  deck.prompt_prefixes = {""};
  const auto source = open_clip_source(deck);
  EXPECT_TRUE(source->buckets()[0].parts.empty());
  EXPECT_TRUE(source->store_names().empty());
}

TEST(Mix, WhatIsRefused) {
  const std::string a = clips(8, 1), b = clips(8, 2);
  const auto keep = [&](const std::string& entry) { return mix({a, b}, {}, {entry}); };
  expect_refused(keep("synthetic-2-8x9=0.5"), Exit::usage, "did you mean \"synthetic-2-8x8\"?");
  for (const char* entry : {"synthetic", "synthetic=1.5", "synthetic=-0.1", "synthetic=nan",
                            "synthetic=half", "=0.5", "synthetic=0.5x"})
    expect_refused(keep(entry), Exit::usage, "which is not BUCKET=SHARE");
  expect_refused(mix({a, b}, {}, {"synthetic=0.5", "synthetic=0.6"}), Exit::usage, "twice");
  expect_refused(keep("synthetic=0"), Exit::usage, "leaves no clip to train on");
  expect_refused(mix({a + ",name=x", b + ",name=y"}, {1, 1}, {"y=0"}), Exit::usage,
                 "leaves no clip of " + b);
  expect_refused(mix({a + ",name=x", clips(8, 1, 3) + ",name=x"}), Exit::data,
                 "bucket x holds clips of u8 2x8x8x3 in");
  expect_refused(mix({a, "shapes:images=4,classes=2,height=64,width=64"}), Exit::usage,
                 "holds labelled images");
  expect_refused(mix({a, "nowhere.h5"}), Exit::data, "nowhere.h5");
}

class MixOfFiles : public FolderTest {};

// A store of latents with features, of one clip.
void write_latents(const std::string& path, float scale) {
  ClipStoreWriter writer(path);
  Bucket b;
  b.name = "x";
  b.frames = b.height = b.width = 1, b.channels = 2, b.dtype = DType::f32;
  b.pixel_frames = 1, b.pixel_height = b.pixel_width = 8;
  b.scale = {scale, 1}, b.shift = {0, 0};
  b.text_channels = 1;
  const int bucket = writer.add_bucket(b);
  const std::vector<std::byte> clip(8), text(4);
  writer.append(bucket, clip, {24, "a.mp4", "a dog"}, text);
  writer.commit();
}

TEST_F(MixOfFiles, FeaturesTakeNoPrefixAndLatentsOneScale) {
  write_latents(path("a.h5"), 1);
  write_latents(path("b.h5"), 1);
  write_latents(path("c.h5"), 2);
  DataDeck deck = mix({path("a.h5"), path("b.h5")});
  const auto source = open_clip_source(deck);
  EXPECT_EQ(source->buckets()[0].clips, 2);
  EXPECT_EQ(source->read_text(0, 1).size(), 1u);
  EXPECT_EQ(source->text_tokens(0, 1), 1);
  deck.prompt_prefixes = {"", "film, "};
  expect_refused(deck, Exit::usage, "has \"film, \" for " + path("b.h5"));
  expect_refused(mix({path("a.h5"), path("c.h5")}), Exit::data, "different scales or shifts");
  // However the path is written, it is one store.
  EXPECT_TRUE(open_clip_source(mix({path("a.h5"), path("./a.h5")}))->store_names().empty());
}

}  // namespace
}  // namespace weft
