#include "data/aspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"

namespace weft {
namespace {

TEST(Aspect, KnownSizes) {
  const auto size = [](const char* resolution, const char* key) {
    for (const AspectSize& s : aspect_sizes(resolution))
      if (s.key == key) return std::pair(s.height, s.width);
    return std::pair<std::int64_t, std::int64_t>(0, 0);
  };
  using P = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(size("720p", "0.56"), P(720, 1280));
  EXPECT_EQ(size("720p", "1.00"), P(960, 960));
  EXPECT_EQ(size("720p", "1.78"), P(1280, 720));
  EXPECT_EQ(size("256", "1.00"), P(256, 256));
  EXPECT_EQ(size("144p", "0.56"), P(144, 256));
  EXPECT_EQ(size("144p", "0.75"), P(166, 221));
  EXPECT_EQ(size("512", "0.57"), P(384, 672));
  EXPECT_EQ(size("1024", "0.25"), P(512, 2048));
  EXPECT_EQ(size("2048", "3.11"), P(3584, 1152));
  EXPECT_EQ(size("2880", "0.55"), P(2112, 3840));
  EXPECT_EQ(size("4k", "0.56"), P(2160, 3840));
  EXPECT_EQ(size("480p", "0.48"), P(444, 925));
}

// Every shape has about the area of its resolution and about the ratio of its key.
TEST(Aspect, TablesAreConsistent) {
  EXPECT_EQ(resolution_names().size(), 13u);
  for (const std::string& name : resolution_names()) {
    const bool video = name.back() == 'p' || name.back() == 'k';
    EXPECT_EQ(aspect_sizes(name).size(), video ? 17u : 40u) << name;
    for (const AspectSize& s : aspect_sizes(name)) {
      const double area = static_cast<double>(s.height * s.width);
      // The square families go in steps of the latent patch, so they are rougher.
      const double limit = video ? 0.02 : 0.13;
      EXPECT_NEAR(area / static_cast<double>(resolution_area(name)), 1.0, limit)
          << name << " " << s.key;
      EXPECT_NEAR(static_cast<double>(s.height) / static_cast<double>(s.width), std::stod(s.key),
                  0.025 * std::max(1.0, std::stod(s.key)))
          << name << " " << s.key;
    }
  }
  EXPECT_EQ(resolution_area("144p"), 36864);
  EXPECT_EQ(resolution_area("480p"), 409920);
}

TEST(Aspect, NearestShape) {
  EXPECT_EQ(nearest_aspect("144p", 576, 768).key, "0.75");
  EXPECT_EQ(nearest_aspect("144p", 1080, 1920).key, "0.56");
  EXPECT_EQ(nearest_aspect("720p", 1920, 1080).key, "1.78");
  EXPECT_EQ(nearest_aspect("256", 100, 100).key, "1.00");
  EXPECT_EQ(nearest_aspect("144p", 10, 1000).key, "0.38");
  EXPECT_EQ(nearest_aspect("144p", 1000, 10).key, "2.08");
}

TEST(Aspect, AreaRule) {
  EXPECT_TRUE(area_suffices("480p", 576, 768));   // 442368 >= 0.8 * 409920
  EXPECT_FALSE(area_suffices("720p", 576, 768));  // < 0.8 * 921600 = 737280
  EXPECT_TRUE(area_suffices("720p", 576, 1280));  // exactly 737280
  EXPECT_FALSE(area_suffices("720p", 575, 1280));
}

TEST(Aspect, UnknownNameNamesTheNearest) {
  try {
    resolution_area("144");
    FAIL() << "an unknown resolution was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), testing::HasSubstr("144"));
    EXPECT_THAT(e.hint(), testing::HasSubstr("144p"));
  }
}

}  // namespace
}  // namespace weft
