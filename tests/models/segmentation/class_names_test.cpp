#include "models/segmentation/class_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "core/error.h"
#include "models/segmentation/options.h"
#include "models/segmentation/palette.h"

namespace weft {
namespace {

using ::testing::ElementsAre;

class ClassNames : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(file_); }
  std::filesystem::path file_ =
      std::filesystem::temp_directory_path() / fmt::format("weft_names_{}", getpid());
};

TEST_F(ClassNames, FromWhereTheyAreKnown) {
  Deck deck;
  deck.get<SegmentationDeck>().num_classes = 3;
  EXPECT_THAT(class_names(deck), ElementsAre("class 0", "class 1", "class 2"));
  EXPECT_THAT(class_names(deck, {"a", "b"}), ElementsAre("a", "b", "class 2"));
  std::ofstream(file_) << "x\ny\nz\n";
  deck.get<SegmentationDeck>().class_names = file_.string();
  EXPECT_THAT(class_names(deck), ElementsAre("x", "y", "z"));
  EXPECT_THAT(class_names(deck, {"a", "b", "c"}), ElementsAre("x", "y", "z"));
  deck.get<SegmentationDeck>().num_classes = 4;
  EXPECT_THROW(class_names(deck), Error);
  std::ofstream(file_) << "a\nb\nc\ncaf\xe9\n";
  EXPECT_THROW(class_names(deck), Error);
}

TEST(Palette, ColoursDiffer) {
  EXPECT_EQ(class_colour(-1), Rgb{});
  EXPECT_EQ(class_colour(0), (Rgb{120, 120, 120}));
  EXPECT_EQ(class_colour(149), (Rgb{0x5c, 0, 255}));
  const std::vector<Rgb> all = label_palette(255);
  ASSERT_EQ(all.size(), 256);
  EXPECT_EQ(all[1], class_colour(0));
  std::set<int> beyond;
  for (std::size_t i = 151; i < all.size(); ++i)
    beyond.insert(all[i].r << 16 | all[i].g << 8 | all[i].b);
  EXPECT_EQ(beyond.size(), 105);
}

TEST(Palette, OfTheDataWhereItTellsTheClassesApart) {
  const std::vector<std::uint8_t> own = {0, 0, 0, 128, 0, 0, 0, 128, 0};
  const std::vector<Rgb> taken = label_palette(2, own);
  EXPECT_EQ(taken[1], (Rgb{128, 0, 0}));
  EXPECT_EQ(taken[2], (Rgb{0, 128, 0}));
  EXPECT_EQ(css_colour(taken[2]), "#008000");
  EXPECT_EQ(label_palette(3, own), label_palette(3)) << "a class too few";
  const std::vector<std::uint8_t> grey = {0, 0, 0, 1, 1, 1, 2, 2, 2}, same(9, 7);
  EXPECT_EQ(label_palette(2, grey), label_palette(2));
  EXPECT_EQ(label_palette(2, same), label_palette(2));
}

}  // namespace
}  // namespace weft
