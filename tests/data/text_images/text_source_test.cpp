// Pictures with text as training samples: targets against distances in f64, what augmentation does
// to pixels and polygons, and the same samples for any number of ranks.
#include "data/text_images/text_images.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "core/error.h"
#include "data/clip_store.h"
#include "data/step_plan.h"
#include "data/text_images/text_view.h"

namespace weft {
namespace {

using testing::HasSubstr;

double distance_to_edges(const Polygon& polygon, Point p) {
  double least = 1e300;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point a = polygon[i], b = polygon[(i + 1) % polygon.size()];
    const double dx = b.x - a.x, dy = b.y - a.y, square = dx * dx + dy * dy;
    const double t =
        square > 0 ? std::clamp(((p.x - a.x) * dx + (p.y - a.y) * dy) / square, 0.0, 1.0) : 0;
    least = std::min(least, std::hypot(a.x + t * dx - p.x, a.y + t * dy - p.y));
  }
  return least;
}

// By the crossings of a ray.
bool is_inside(const Polygon& polygon, Point p) {
  bool inside = false;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point a = polygon[i], b = polygon[(i + 1) % polygon.size()];
    if ((a.y > p.y) != (b.y > p.y) && p.x < a.x + (p.y - a.y) / (b.y - a.y) * (b.x - a.x))
      inside = !inside;
  }
  return inside;
}
// Not below 0 within.
double depth(const Polygon& polygon, Point p) {
  const double d = distance_to_edges(polygon, p);
  return is_inside(polygon, p) ? d : -d;
}

Polygon rectangle(double x, double y, double width, double height, double angle) {
  Polygon out;
  for (const auto& [u, v] : {std::pair{-0.5, -0.5}, {0.5, -0.5}, {0.5, 0.5}, {-0.5, 0.5}})
    out.push_back({x + u * width * std::cos(angle) - v * height * std::sin(angle),
                   y + u * width * std::sin(angle) + v * height * std::cos(angle)});
  return out;
}

struct Targets {
  std::vector<std::uint8_t> flags, thresholds;
};
Targets targets_of(const std::vector<TextRegion>& regions, ImageSize size) {
  const auto n = static_cast<std::size_t>(size.height * size.width);
  Targets t{std::vector<std::uint8_t>(n, 0xaa), std::vector<std::uint8_t>(n, 0xaa)};
  write_text_targets(regions, size, t.flags, t.thresholds);
  return t;
}

// Filled polygons have corners that were cut to whole pixels, grown by Clipper and rounded, and
// fillPoly takes their borders too: what lies so near to a border is left open.
constexpr double unsure = 2.6;

TEST(TextTargets, AreDistancesToTheRegionsEdges) {
  std::mt19937 random(7);
  const auto draw = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  int text = 0, counted = 0, decided = 0;
  for (int round = 0; round < 12; ++round) {
    const ImageSize size{90 + round, 130};
    std::vector<TextRegion> regions;
    for (int i = 0; i < 4; ++i)
      regions.push_back(
          {rectangle(draw(0, 130), draw(0, 90), draw(15, 70), draw(10, 30), draw(-3, 3)), i == 3});
    // An arrow, which is not convex.
    if (round % 3 == 0)
      regions.push_back({{{10, 10}, {60, 15}, {110, 10}, {110, 50}, {60, 40}, {10, 50}}, false});
    const Targets t = targets_of(regions, size);
    for (std::int64_t y = 0; y < size.height; ++y)
      for (std::int64_t x = 0; x < size.width; ++x) {
        const auto at = static_cast<std::size_t>(y * size.width + x);
        const Point p{static_cast<double>(x), static_cast<double>(y)};
        bool in_core = false, maybe_core = false, ignored = false, maybe_ignored = false;
        bool near = false, maybe_near = false;
        double value = 0;
        for (const TextRegion& r : regions) {
          const double d = depth(r.polygon, p);
          if (r.ignore) {
            ignored |= d > unsure;
            maybe_ignored |= d > -unsure;
            continue;
          }
          double area = 0, length = 0;
          for (std::size_t i = 0; i < r.polygon.size(); ++i) {
            const Point a = r.polygon[i], b = r.polygon[(i + 1) % r.polygon.size()];
            area += (a.x * b.y - a.y * b.x) / 2;
            length += std::hypot(b.x - a.x, b.y - a.y);
          }
          const double grow = std::abs(area) * 0.84 / length;
          in_core |= d > grow + 0.5 + unsure;
          maybe_core |= d > grow - 0.5 - unsure;
          near |= d > unsure - grow;
          maybe_near |= d > -grow - unsure;
          value = std::max(value, 1 - std::min(1.0, std::abs(d) / grow));
        }
        const std::uint8_t flags = t.flags[at];
        EXPECT_EQ(flags & ~7, 0);
        if (in_core || !maybe_core) {
          EXPECT_EQ((flags & text_bit) != 0, in_core);
          ++decided;
        }
        if (ignored || !maybe_ignored) {
          EXPECT_EQ((flags & counts_bit) == 0, ignored);
        }
        if (near || !maybe_near) {
          EXPECT_EQ((flags & threshold_bit) != 0, near);
        }
        const double expected = (flags & threshold_bit) != 0 ? 255 * value : 0;
        ASSERT_NEAR(t.thresholds[at], expected, 0.51) << x << "," << y;
        text += (flags & text_bit) != 0;
        counted += (flags & threshold_bit) != 0;
      }
  }
  EXPECT_GT(text, 2000);
  EXPECT_GT(counted, 20000);
  EXPECT_GT(decided, 80000);
}

TEST(TextTargets, IgnoreRegionsThatAreTooSmallOrFallApart) {
  const ImageSize size{60, 120};
  // 7 pixels high; of no area; a dumb-bell, whose middle is gone when it is shrunk.
  const std::vector<Polygon> bad = {{{10, 10}, {90, 10}, {90, 17}, {10, 17}},
                                    {{10, 10}, {60, 40}, {110, 70}},
                                    {{5, 5},
                                     {40, 5},
                                     {40, 25},
                                     {80, 25},
                                     {80, 5},
                                     {115, 5},
                                     {115, 55},
                                     {80, 55},
                                     {80, 32},
                                     {40, 32},
                                     {40, 55},
                                     {5, 55}}};
  for (const Polygon& polygon : bad) {
    const Targets t = targets_of({{polygon, false}}, size);
    for (const std::uint8_t f : t.flags) EXPECT_EQ(f & (text_bit | threshold_bit), 0);
    EXPECT_LT(std::ranges::count(t.flags, counts_bit), 60 * 120) << polygon[1].x;
  }
  // The ignored ones do not hide the text of others.
  const Polygon good = {{20, 20}, {100, 20}, {100, 50}, {20, 50}};
  const Targets t = targets_of({{good, false}, {bad[0], false}}, size);
  EXPECT_EQ(t.flags[35 * 120 + 60], text_bit | counts_bit | threshold_bit);
  EXPECT_EQ(t.flags[13 * 120 + 50] & counts_bit, 0);
  // Outside of the picture, partly and wholly, and none at all.
  const Targets out = targets_of(
      {{rectangle(0, 0, 60, 30, 0.2), false}, {rectangle(-900000, 900000, 60, 30, 0), false}},
      size);
  EXPECT_NE(out.flags[0] & text_bit, 0);
  EXPECT_EQ(targets_of({}, size).flags, std::vector<std::uint8_t>(60 * 120, counts_bit));
}

// A grey ground with a bright rectangle as its region.
TextImage bright_rectangle(const Polygon& polygon, ImageSize size) {
  TextImage image;
  image.size = size;
  for (std::int64_t y = 0; y < size.height; ++y)
    for (std::int64_t x = 0; x < size.width; ++x)
      image.rgb.insert(
          image.rgb.end(), 3,
          is_inside(polygon, {static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5}) ? 220
                                                                                           : 60);
  image.regions = {{polygon, false}};
  return image;
}

Polygon scaled(const Polygon& polygon, double by) {
  Point middle;
  for (const Point& p : polygon)
    middle = {middle.x + p.x / static_cast<double>(polygon.size()),
              middle.y + p.y / static_cast<double>(polygon.size())};
  Polygon out;
  for (const Point& p : polygon)
    out.push_back({middle.x + by * (p.x - middle.x), middle.y + by * (p.y - middle.y)});
  return out;
}

TEST(TextTargets, RegionsThatTeachNothingAreCounted) {
  const TextRegion good{{{5, 5}, {65, 5}, {65, 25}, {5, 25}}};
  const TextRegion marked{good.polygon, true};
  const TextRegion small{{{5, 5}, {65, 5}, {65, 12}, {5, 12}}};
  const TextRegion bow_tie{{{5, 5}, {65, 35}, {65, 5}, {5, 35}}};
  // Crosses too, and the larger part is learnt.
  const TextRegion lopsided{{{5, 5}, {65, 35}, {65, 15}, {5, 35}}};
  const TextRegion outside{{{200, 5}, {260, 5}, {260, 25}, {200, 25}}};
  RegionCounts counts;
  for (const std::vector<TextRegion>& picture :
       {std::vector{good, small}, {marked}, {bow_tie, lopsided}, {outside}, {}})
    counts.add(picture, {100, 100});
  EXPECT_EQ(
      counts.text(),
      "no region to learn from in 3 of 5 pictures; of 6 regions, 1 marked as ignored, 1 with a "
      "side below 8 pixels before augmentation, 1 of crossing edges, 1 outside");
  RegionCounts unread;  // without sizes
  unread.add(std::vector{outside});
  EXPECT_EQ(unread.without + unread.outside, 0);
}

TEST(TextView, MovesPolygonsAsItMovesPixels) {
  std::set<std::int64_t> areas;
  int flipped = 0;
  for (const ImageSize size : {ImageSize{150, 260}, ImageSize{800, 500}}) {
    const double w = static_cast<double>(size.width), h = static_cast<double>(size.height);
    const TextImage image = bright_rectangle(rectangle(w / 3, h / 2, w / 4, h / 6, 0.3), size);
    TextImage out, again;
    for (std::uint64_t draw = 0; draw < 60; ++draw) {
      change_text(image, 96, draw * 77777, out);
      change_text(image, 96, draw * 77777, again);
      EXPECT_EQ(out.rgb, again.rgb);
      EXPECT_EQ(out.size, (ImageSize{96, 96}));
      ASSERT_EQ(out.regions.size(), 1u) << draw;  // the crop keeps the only one
      const Polygon& polygon = out.regions[0].polygon;
      ASSERT_EQ(polygon.size(), 4u);
      const Polygon core = scaled(polygon, 0.7), around = scaled(polygon, 1.4);
      areas.insert(std::llround(polygon_area(polygon)));
      const Point a = polygon[0], b = polygon[1], c = polygon[2];
      flipped += (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x) < 0;
      for (std::int64_t y = 0; y < 96; ++y)
        for (std::int64_t x = 0; x < 96; ++x) {
          const Point p{static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5};
          const std::uint8_t v = out.rgb[(y * 96 + x) * 3];
          ASSERT_GT(v, is_inside(core, p) ? 180 : -1) << draw << " at " << x << "," << y;
          ASSERT_LT(v, is_inside(around, p) ? 256 : 90) << draw << " at " << x << "," << y;
        }
    }
  }
  EXPECT_GT(areas.size(), 100u);
  EXPECT_GT(flipped, 35);
  EXPECT_LT(flipped, 85);
}

TEST(TextView, CropsCutNoRegion) {
  TextImage image = bright_rectangle(rectangle(60, 60, 50, 30, 0), {400, 400});
  for (const auto& [x, y] : {std::pair{200, 300}, {330, 90}, {300, 340}, {90, 350}})
    image.regions.push_back({rectangle(x, y, 50, 30, 0), x == 330});
  TextImage out;
  std::map<std::size_t, int> kept;
  for (std::uint64_t draw = 0; draw < 200; ++draw) {
    change_text(image, 64, draw, out);
    ++kept[out.regions.size()];
    for (const TextRegion& r : out.regions)
      for (const Point& p : r.polygon) {
        EXPECT_GE(std::min(p.x, p.y), -1e-6);
        EXPECT_LE(std::max(p.x, p.y), 64 + 1e-6);
      }
  }
  EXPECT_EQ(kept.count(0), 0u);
  EXPECT_GE(kept.size(), 3u);
  // Without any region the whole picture stays.
  image.regions.clear();
  change_text(image, 64, 1, out);
  EXPECT_TRUE(out.regions.empty());
}

TEST(TextView, FitsAndPads) {
  TextImage out;
  fit_text(bright_rectangle(rectangle(100, 50, 100, 50, 0), {100, 200}), 64, out);
  EXPECT_EQ(out.size, (ImageSize{64, 64}));
  ASSERT_EQ(out.regions.size(), 1u);
  EXPECT_NEAR(out.regions[0].polygon[0].x, 16, 1e-9);
  EXPECT_NEAR(out.regions[0].polygon[2].y, 24, 1e-9);
  const auto at = [&](int x, int y) { return out.rgb[(y * 64 + x) * 3]; };
  EXPECT_EQ(at(32, 16), 220);
  EXPECT_EQ(at(3, 3), 60);
  EXPECT_EQ(at(32, 33), 0);
}

TEST(TextSource, GivesTheSameSamplesToAnyNumberOfMicroBatches) {
  DataDeck deck;
  deck.path = "text:images=7,height=64..96,width=64..96,words=0..3,letters=10..20";
  deck.crop = 64;
  const auto source = open_clip_source(deck);
  const Bucket& bucket = source->buckets().at(0);
  EXPECT_EQ(bucket.name, "text-64");
  EXPECT_EQ(bucket.clip_bytes(), 64u * 64 * 5);
  EXPECT_EQ(samples_in_batch(bucket, 9), 9);

  using Sample = std::pair<SampleId, std::uint64_t>;
  const auto walk = [&](std::int64_t batch, std::int64_t count, std::int64_t steps) {
    std::vector<Sample> all;
    const auto plan = source->plan_steps({batch}, count, 42);
    for (std::int64_t s = 0; s < steps; ++s)
      for (const MicroBatch& m : plan->plan(s)) {
        EXPECT_EQ(std::ssize(m.clips), batch);
        EXPECT_EQ(source->clip_bytes(m), bucket.clip_bytes());
        for (std::size_t i = 0; i < m.clips.size(); ++i)
          all.emplace_back(m.samples[i], m.views[i].draw);
      }
    return all;
  };
  const auto all = walk(2, 3, 14);  // 84 samples, 12 epochs
  EXPECT_EQ(walk(6, 1, 14), all);
  EXPECT_EQ(walk(12, 1, 7), all);  // more than there are pictures
  for (std::size_t e = 0; e < 12; ++e) {
    std::set<SampleId> seen;
    for (std::size_t i = 0; i < 7; ++i) seen.insert(all[e * 7 + i].first);
    EXPECT_EQ(seen.size(), 7u);
  }
  EXPECT_EQ(std::set<Sample>(all.begin(), all.end()).size(), all.size());
  const auto other = source->plan_steps({2}, 3, 43)->plan(0);
  EXPECT_NE(other[0].views[0].draw, all[0].second);
}

TEST(TextSource, ReadsPixelsAndTargets) {
  DataDeck deck;
  deck.path = "text:images=5,height=96,width=128,words=2..3,letters=12..24";
  deck.crop = 96;
  const auto images = open_text_images(deck.path, {});
  for (const bool augment : {true, false}) {
    deck.augment = augment;
    const auto source = open_clip_source(deck);
    const auto batch = source->plan_steps({5}, 1, 1)->plan(3)[0];
    std::vector<std::byte> sample(source->clip_bytes(batch)), plain = sample;
    for (std::size_t i = 0; i < 5; ++i) {
      source->read_sample(batch, i, sample);
      source->read(0, batch.clips[i], plain);
      EXPECT_EQ(sample == plain, !augment);
      TextImage image, view;
      images->read(batch.clips[i], image);
      if (augment)
        change_text(image, 96, batch.views[i].draw, view);
      else
        fit_text(image, 96, view);
      const Targets t = targets_of(view.regions, {96, 96});
      EXPECT_EQ(std::memcmp(sample.data(), view.rgb.data(), 96 * 96 * 3), 0);
      EXPECT_EQ(std::memcmp(sample.data() + 96 * 96 * 3, t.flags.data(), 96 * 96), 0);
      EXPECT_EQ(std::memcmp(sample.data() + 96 * 96 * 4, t.thresholds.data(), 96 * 96), 0);
    }
  }
  deck.crop = 100;
  try {
    open_clip_source(deck);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_EQ(e.hint(), "set data.crop = 96");
  }
}

}  // namespace
}  // namespace weft
