// Which images a step trains on, and how even its micro-batches are.
#include "data/images/image_source.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "core/philox.h"

namespace weft {
namespace {

// Sizes as ADE20K's: 20,210 images, an eighth of them portrait, sides of 96 to 2100 pixels, mostly
// with a ratio of 4:3.
std::vector<ImageSize> sizes_like_ade(std::int64_t count) {
  std::vector<ImageSize> sizes;
  const Philox random(7, Purpose::synthetic, 9, 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::uint32_t>(8 * i);
    static constexpr double ratios[] = {4.0 / 3, 4.0 / 3, 4.0 / 3, 1.5, 1.5, 1.0, 1.25, 16.0 / 9};
    double ratio = ratios[random.below(at, 8)];
    if (random.uniform(at + 1) < 0.25f) ratio = 1 + 1.2 * random.uniform(at + 2);
    const double side = std::clamp(350 * std::exp(0.45 * random.normal(at + 3)), 96.0, 2000.0);
    const auto low = static_cast<std::int64_t>(side),
               high = std::min<std::int64_t>(2100, static_cast<std::int64_t>(side * ratio));
    const bool portrait = random.uniform(at + 4) < 0.117f;
    sizes.push_back(portrait ? ImageSize{std::max(high, low + 1), low} : ImageSize{low, high});
  }
  return sizes;
}

ImagePlanOptions options_of(std::int64_t G, std::int64_t batch = 2) {
  ImagePlanOptions o;
  o.short_sides = {300, 375, 450, 525, 600};
  o.batch_size = batch;
  o.micro_batches = G;
  return o;
}

double area(const MicroBatch& b) { return static_cast<double>(b.height * b.width); }

// The mean over steps of the costliest micro-batch's share, divided by the mean of all.
double spread(const ImagePlan& plan, std::int64_t steps) {
  double most = 0, all = 0;
  for (std::int64_t s = 0; s < steps; ++s) {
    double highest = 0, sum = 0;
    const auto batches = plan.plan(s);
    for (const MicroBatch& b : batches) {
      highest = std::max(highest, area(b));
      sum += area(b);
    }
    most += highest;
    all += sum / static_cast<double>(batches.size());
  }
  return most / all;
}

// What a sample is trained as, without its place in the order.
using Trained = std::tuple<SampleId, int, std::int64_t, std::int64_t, bool>;
std::vector<Trained> trained(const std::vector<MicroBatch>& batches) {
  std::vector<Trained> out;
  for (const MicroBatch& b : batches)
    for (std::size_t i = 0; i < b.samples.size(); ++i)
      out.emplace_back(b.samples[i], b.bucket, b.views[i].height, b.views[i].width,
                       b.views[i].flip);
  return out;
}

TEST(ImagePlan, PutsImagesOfOneOrientationTogether) {
  const auto sizes = sizes_like_ade(500);
  const ImagePlan plan(sizes, options_of(4));
  for (std::int64_t s = 0; s < 100; ++s) {
    const auto batches = plan.plan(s);
    ASSERT_EQ(batches.size(), 4u);
    for (const MicroBatch& b : batches) {
      ASSERT_EQ(b.samples.size(), 2u);
      const bool portrait = b.bucket >= 5;
      std::int64_t height = 0, width = 0;
      for (std::size_t i = 0; i < 2; ++i) {
        const ImageSize size = sizes[b.samples[i]];
        EXPECT_EQ(size.height > size.width, portrait);
        const ImageSize view =
            training_size(size, std::array{300, 375, 450, 525, 600}[b.bucket % 5], 1000);
        EXPECT_EQ(view, (ImageSize{b.views[i].height, b.views[i].width}));
        height = std::max(height, view.height);
        width = std::max(width, view.width);
      }
      EXPECT_EQ(b.height, (height + 7) / 8 * 8);
      EXPECT_EQ(b.width, (width + 7) / 8 * 8);
    }
  }
}

// Stretches end where they end in the walk, whatever the order within them.
TEST(ImagePlan, TakesEveryImageOnceAnEpoch) {
  const auto sizes = sizes_like_ade(1003);
  for (const std::int64_t G : {2, 8, 128, 1024}) {
    const ImagePlan plan(sizes, options_of(G));
    std::map<SampleId, std::int64_t> seen;
    for (std::int64_t stretch = 1; stretch <= 3; ++stretch) {
      for (std::int64_t s = (stretch - 1) * plan.stretch_steps();
           s < stretch * plan.stretch_steps(); ++s)
        for (const MicroBatch& b : plan.plan(s))
          for (const SampleId id : b.samples) ++seen[id];
      const std::int64_t epochs = stretch * plan.stretch_steps() * G * 2 / 1003;
      EXPECT_EQ(seen.size(), 1003u);
      // An epoch that is under way, and what waits for its orientation's next micro-batch.
      for (const auto& [id, times] : seen) {
        EXPECT_GE(times, epochs - 1) << id;
        EXPECT_LE(times, epochs + 1) << id;
      }
    }
  }
}

TEST(ImagePlan, CollectsAFewImagesOverEpochs) {
  // One portrait among seven, four a micro-batch.
  std::vector<ImageSize> sizes(7, ImageSize{60, 80});
  sizes[3] = {80, 60};
  const ImagePlan plan(sizes, options_of(3, 4));
  std::map<SampleId, std::int64_t> seen;
  for (std::int64_t s = 0; s < plan.stretch_steps(); ++s)
    for (const MicroBatch& b : plan.plan(s)) {
      if (b.samples[0] == 3) {
        EXPECT_EQ(b.samples, (std::vector<SampleId>{3, 3, 3, 3}));
      }
      for (const SampleId id : b.samples) ++seen[id];
    }
  const std::int64_t epochs = plan.stretch_steps() * 3 * 4 / 7;
  EXPECT_EQ(seen.size(), 7u);
  for (const auto& [id, times] : seen) EXPECT_NEAR(times, epochs, 4) << id;
}

TEST(ImagePlan, DependsOnSeedAndStepAlone) {
  const auto sizes = sizes_like_ade(300);
  const ImagePlan forward(sizes, options_of(4)), again(sizes, options_of(4));
  std::vector<std::vector<Trained>> steps;
  for (std::int64_t s = 0; s < 120; ++s) steps.push_back(trained(forward.plan(s)));
  for (std::int64_t s = 119; s >= 0; s -= 7) EXPECT_EQ(trained(again.plan(s)), steps[s]);
  ImagePlanOptions other = options_of(4);
  other.seed = 43;
  EXPECT_NE(trained(ImagePlan(sizes, other).plan(0)), steps[0]);
  EXPECT_NE(steps[0], steps[40]);
}

TEST(ImagePlan, DrawsSizesAndFlipsEvenly) {
  const auto sizes = sizes_like_ade(20210);
  const ImagePlan plan(sizes, options_of(8));
  std::array<int, 5> sides{};
  int flips = 0, samples = 0;
  for (std::int64_t s = 0; s < 1263; ++s)
    for (const MicroBatch& b : plan.plan(s)) {
      ++sides[b.bucket % 5];
      for (const ImageView& v : b.views) flips += v.flip, ++samples;
    }
  for (const int n : sides) EXPECT_NEAR(n, 1263 * 8 / 5.0, 200);  // 5 standard deviations
  EXPECT_NEAR(flips, samples / 2.0, 360);
}

TEST(ImagePlan, StepsAreEven) {
  const auto sizes = sizes_like_ade(20210);
  for (const std::int64_t G : {2, 8, 128})
    EXPECT_LT(spread(ImagePlan(sizes, options_of(G)), 10105 / G), 1.05) << G;
}

TEST(ImageSizes, CutToWholePixels) {
  EXPECT_EQ(training_size({512, 683}, 450, 1000), (ImageSize{450, 600}));
  EXPECT_EQ(training_size({100, 1000}, 300, 1000), (ImageSize{100, 1000}));
  EXPECT_EQ(training_size({1, 5000}, 300, 1000), (ImageSize{1, 1000}));
  EXPECT_EQ(evaluation_size({57, 83}, 30, 80, 8), (ImageSize{32, 48}));
}

}  // namespace
}  // namespace weft
