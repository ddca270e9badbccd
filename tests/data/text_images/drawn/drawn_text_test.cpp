// Text drawn in memory: the same every time, ink within its polygon, clear errors.
#include "data/text_images/drawn/drawn_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <thread>

#include "core/error.h"
#include "media/writers.h"

namespace weft {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(e.what()) + " HINT: " + e.hint();
  }
  return "";
}

// Of a convex polygon, clockwise on the screen: not below 0 within.
double depth(const Polygon& polygon, Point p) {
  double least = 1e9;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point a = polygon[i], b = polygon[(i + 1) % polygon.size()];
    const double cross = (b.x - a.x) * (p.y - a.y) - (b.y - a.y) * (p.x - a.x);
    least = std::min(least, cross / std::hypot(b.x - a.x, b.y - a.y));
  }
  return least;
}

TEST(DrawnText, IsTheSameEveryTimeAndDiffersByPictureAndSeed) {
  const auto one = make_drawn_text("text:images=6,height=96..128,width=96..160,seed=1", {});
  const auto again = make_drawn_text("text: images=6, height=96..128,width=96..160 ,\nseed=1", {});
  const auto other = make_drawn_text("text:images=6,height=96..128,width=96..160,seed=2", {});
  EXPECT_EQ(one->count(), 6);
  EXPECT_EQ(one->name(2), "text:seed=1 picture 2");
  TextImage a, b, c, before;
  std::set<std::int64_t> heights;
  for (std::int64_t i = 0; i < 6; ++i) {
    one->read(i, a);
    // On another thread, after other pictures.
    std::thread([&] { again->read(5 - i, b), again->read(i, b); }).join();
    other->read(i, c);
    EXPECT_EQ(a.size, one->size(i));
    EXPECT_EQ(std::ssize(a.rgb), a.size.height * a.size.width * 3);
    EXPECT_EQ(a.rgb, b.rgb);
    ASSERT_EQ(a.regions.size(), b.regions.size());
    for (std::size_t r = 0; r < a.regions.size(); ++r)
      EXPECT_EQ(a.regions[r].polygon, b.regions[r].polygon);
    EXPECT_NE(a.rgb, c.rgb);
    EXPECT_NE(a.rgb, before.rgb);
    before = a;
    heights.insert(a.size.height);
  }
  EXPECT_GT(heights.size(), 2u);
}

TEST(DrawnText, HasAsManyWordsOfThatHeightAsAskedFor) {
  const auto images =
      make_drawn_text("text:images=20,height=320,width=480,words=3,letters=20..24", {});
  TextImage image;
  int all = 0;
  for (std::int64_t i = 0; i < images->count(); ++i) {
    images->read(i, image);
    EXPECT_LE(image.regions.size(), 3u);
    all += static_cast<int>(image.regions.size());
    for (const TextRegion& r : image.regions) {
      ASSERT_EQ(r.polygon.size(), 4u);
      EXPECT_FALSE(r.ignore && min_area_rect(r.polygon).shorter_side > 8.1);
      for (const Point& p : r.polygon) {
        EXPECT_GT(p.x, 0);
        EXPECT_GT(p.y, 0);
        EXPECT_LT(p.x, 480);
        EXPECT_LT(p.y, 320);
      }
      EXPECT_LT(min_area_rect(r.polygon).shorter_side, 24 * 2.5);
    }
  }
  EXPECT_GE(all, 50);
  const auto none = make_drawn_text("text:images=2,height=64,width=64,words=0", {});
  none->read(1, image);
  EXPECT_TRUE(image.regions.empty());
}

TEST(DrawnText, IgnoresWordsThatAreTooSmall) {
  const auto images =
      make_drawn_text("text:images=8,height=200,width=200,words=6,letters=4..5", {});
  TextImage image;
  int ignored = 0;
  for (std::int64_t i = 0; i < images->count(); ++i) {
    images->read(i, image);
    for (const TextRegion& r : image.regions) {
      ignored += r.ignore;
      EXPECT_TRUE(r.ignore || min_area_rect(r.polygon).shorter_side >= 7);
    }
  }
  EXPECT_GT(ignored, 5);
}

// One word a picture, on an even ground: about half of them have no sign, outline or shadow, and
// of those all ink lies in the polygon and reaches all its sides.
TEST(Lettering, PutsThePolygonAroundTheInk) {
  int plain = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Picture picture{{200, 400}, std::vector<std::uint8_t>(200 * 400 * 3, 128)};
    Draws draws(Philox(seed, Purpose::synthetic, 0, 0));
    const auto regions = write_words(draws, {1, 1}, {24, 40}, picture);
    if (regions.empty()) continue;
    ASSERT_EQ(regions.size(), 1u);
    const Polygon& polygon = regions[0].polygon;
    int inside = 0, outside = 0;
    std::array<double, 4> nearest{1e9, 1e9, 1e9, 1e9};  // of ink to each side
    for (std::int64_t y = 0; y < 200; ++y)
      for (std::int64_t x = 0; x < 400; ++x) {
        const std::uint8_t* p = picture.rgb.data() + (y * 400 + x) * 3;
        if (p[0] == 128 && p[1] == 128 && p[2] == 128) continue;
        const Point at{static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5};
        (depth(polygon, at) > -1 ? inside : outside)++;
        for (std::size_t i = 0; i < 4; ++i) {
          const Point a = polygon[i], b = polygon[(i + 1) % 4];
          nearest[i] = std::min(nearest[i],
                                std::abs((b.x - a.x) * (at.y - a.y) - (b.y - a.y) * (at.x - a.x)) /
                                    std::hypot(b.x - a.x, b.y - a.y));
        }
      }
    EXPECT_GT(inside, 20) << seed;
    if (outside > 0) continue;
    ++plain;
    for (const double d : nearest) EXPECT_LT(d, 6) << seed;
  }
  EXPECT_GE(plain, 12);
}

TEST(DrawnText, RefusesWhatMakesNoSense) {
  const auto open = [](const std::string& keys) {
    return message_of([&] { make_drawn_text("text:" + keys, {}); });
  };
  EXPECT_THAT(open("image=3"), HasSubstr("did you mean \"images\"?"));
  EXPECT_THAT(open("words=9..8"), HasSubstr("words = 9..8 of text is out of range"));
  EXPECT_THAT(open("height=8"), HasSubstr("choose 32 to 8192"));
  EXPECT_THAT(open("seed=x"), HasSubstr("not a whole number"));
  EXPECT_THAT(open("images"), HasSubstr("is not key=value"));
  EXPECT_THAT(open("pictures=/nowhere"), HasSubstr("/nowhere"));
  const auto folder =
      std::filesystem::temp_directory_path() / ("weft_pictures_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  EXPECT_THAT(open("pictures=" + folder.string()), HasSubstr("has no pictures"));
  std::filesystem::remove_all(folder);
}

TEST(DrawnText, DrawsOnGivenPictures) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("weft_grounds_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  std::vector<std::uint8_t> red;
  for (int i = 0; i < 60 * 80; ++i) red.insert(red.end(), {200, 10, 10});
  write_png((folder / "red.png").string(), 60, 80, red);
  const auto images =
      make_drawn_text("text:images=4,height=64,width=96,words=0,pictures=" + folder.string(), {});
  TextImage image;
  for (std::int64_t i = 0; i < 4; ++i) {
    images->read(i, image);
    double sum[3] = {};
    for (std::size_t k = 0; k < image.rgb.size(); ++k) sum[k % 3] += image.rgb[k];
    EXPECT_GT(sum[0], 1.5 * sum[1]);
    EXPECT_GT(sum[0], 1.5 * sum[2]);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft
