#include "models/sadtalker/face/landmarks.h"

#include <cmath>

#include "tests/models/sadtalker/face/fixture.h"

namespace weft {
namespace {

constexpr std::size_t each = heatmap_side * heatmap_side;

struct Maps {
  std::vector<float> values = std::vector<float>(heatmap_points * each, 0.0f);
  Maps() {
    for (std::size_t p = 0; p < heatmap_points; ++p) at(p, 20 * 64 + 20) = 1;
  }
  float& at(std::size_t point, std::size_t index) { return values[point * each + index]; }
  Points98 decode(std::int64_t height = 64, std::int64_t width = 64) const {
    return decode_heatmaps(values, height, width);
  }
};

using Point = std::array<double, 2>;

TEST(Heatmaps, PeakAndAQuarterTowardsTheGreaterNeighbour) {
  Maps m;
  m.at(0, 20 * 64 + 21) = 0.5f;
  m.at(1, 20 * 64 + 19) = 0.5f;
  m.at(1, 21 * 64 + 20) = -0.5f;
  m.at(2, 30 * 64 + 9) = 1;  // as great, but later
  const Points98 p = m.decode();
  EXPECT_EQ(p[0], (Point{20.75, 20.5}));
  EXPECT_EQ(p[1], (Point{20.25, 20.25}));
  EXPECT_EQ(p[2], (Point{20.5, 20.5}));
  // In pixels of the crop.
  EXPECT_EQ(m.decode(32, 128)[0], (Point{41.5, 10.25}));
}

TEST(Heatmaps, NeighboursAlongARowAreTheFlattenedMaps) {
  Maps m;
  m.at(0, 20 * 64 + 20) = 0;
  m.at(0, 10 * 64 + 63) = 1;
  m.at(0, 11 * 64) = 0.5f;  // of the next row
  m.at(1, 20 * 64 + 20) = 0;
  m.at(1, 0) = 1;
  m.at(1, each - 1) = 0.5f;  // "before" the first
  m.at(2, 20 * 64 + 20) = 0;
  m.at(2, each - 1) = 1;  // has no value behind it: its own counts
  const Points98 p = m.decode();
  EXPECT_EQ(p[0][0], 63.75);
  EXPECT_EQ(p[1][0], 0.25);
  EXPECT_EQ(p[2][0], 63.75);
}

TEST(Heatmaps, OnePeakAtAnEdgeChangesTheColumnsOfAll) {
  Maps m;
  m.at(0, 21 * 64 + 20) = 0.5f;
  m.at(0, each - 1) = -1;
  EXPECT_EQ(m.decode()[0][1], 20.75);
  // Another point in the last row: what is below is now the map's last value.
  m.at(5, 20 * 64 + 20) = 0;
  m.at(5, 63 * 64 + 5) = 1;
  EXPECT_EQ(m.decode()[0][1], 20.25);
  // The first row likewise, to which index 64 belongs.
  Maps n;
  n.at(0, 0) = 0.5f;
  EXPECT_EQ(n.decode()[0][1], 20.5);
  n.at(7, 20 * 64 + 20) = 0;
  n.at(7, 65) = 1;
  EXPECT_EQ(n.decode()[0][1], 20.5);
  n.at(7, 65) = 0;
  n.at(7, 64) = 1;
  EXPECT_EQ(n.decode()[0][1], 20.25);
}

TEST(Heatmaps, RefusesWhatIsNotFinite) {
  Maps m;
  m.at(97, 5) = std::nanf("");
  EXPECT_THAT(test::complaint([&] { m.decode(); }), testing::HasSubstr("not finite"));
}

TEST(Landmarks68, AreSomeOf98AndMeansOfTwo) {
  Points98 p;
  for (std::size_t i = 0; i < p.size(); ++i)
    p[i] = {static_cast<double>(i), 1000.0 - static_cast<double>(i)};
  const Landmarks l = to_68(p);
  const auto x = [&](std::size_t i) { return l[i][0]; };
  EXPECT_EQ(std::vector<float>({x(0), x(1), x(16)}), (std::vector<float>{0, 2, 32}));
  EXPECT_EQ(std::vector<float>({x(17), x(18), x(21), x(22), x(25), x(26)}),
            (std::vector<float>{33, 37.5f, 37.5f, 46, 46, 46}));
  EXPECT_EQ(std::vector<float>({x(27), x(35), x(36), x(41), x(42), x(47), x(48), x(67)}),
            (std::vector<float>{51, 59, 60, 67, 68, 75, 76, 95}));
  EXPECT_EQ(l[67][1], 905);
}

}  // namespace
}  // namespace weft
