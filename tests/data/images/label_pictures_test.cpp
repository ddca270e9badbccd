#include "data/images/label_pictures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft {
namespace {

using ::testing::ElementsAre;

const std::vector<Rgb> palette = {{}, {1, 2, 3}, {40, 50, 60}};

TEST(LabelPictures, Colours) {
  const std::vector<std::uint8_t> labels = {2, 0, 1, 9};
  EXPECT_THAT(coloured(labels, palette), ElementsAre(40, 50, 60, 0, 0, 0, 1, 2, 3, 0, 0, 0));
  EXPECT_THAT(as_labels(std::vector<std::uint8_t>{0, 254}), ElementsAre(1, 255));
}

TEST(LabelPictures, PanelsAndBlends) {
  const std::vector<std::uint8_t> a = {1, 2, 3, 4, 5, 6}, b = {10, 20, 30, 40, 50, 255};
  EXPECT_THAT(side_by_side({a, b}, {2, 1}), ElementsAre(1, 2, 3, 10, 20, 30, 4, 5, 6, 40, 50, 255));
  EXPECT_THAT(blended(a, b), ElementsAre(6, 11, 17, 22, 28, 131));
}

}  // namespace
}  // namespace weft
