// Lists of pictures with polygons: JSON lines and ICDAR 2015's form, whole and broken.
#include "data/text_images/text_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "data/clip_store.h"
#include "media/writers.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class TextLists : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    const std::vector<std::uint8_t> grey(20 * 30 * 3, 99);
    for (const char* name : {"a.png", "b.png"}) write_png((dir_ / name).string(), 20, 30, grey);
  }
  std::string refused(const std::string& path) {
    try {
      open_text_images(path, {});
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return e.what();
    }
    return "";
  }
  std::string refused_line(const std::string& line) {
    return refused(
        write("broken.jsonl", "{\"path\": \"a.png\", \"polygons\": []}\n" + line + "\n"));
  }
  std::string refused_icdar(const std::string& line) {
    write("gt_b.txt", "");
    write("gt_a.txt", "1,1,9,1,9,9,1,9,fine\r\n" + line + "\r\n");
    return refused(dir_.string());
  }
};

TEST_F(TextLists, ReadJsonLines) {
  const std::string list = write(
      "list.jsonl",
      "\xEF\xBB\xBF{\"path\": \"a.png\", \"polygons\": [{\"points\": [[1, 2], [9.5, 2], [9, 8]], "
      "\"text\": \"x\"}, {\"points\": [[-3, 0], [40, 0], [40, 25], [0, 25]], \"ignore\": true}]}\r"
      "\n\n{\"path\": \"" +
          (dir_ / "b.png").string() + "\", \"polygons\": []}\n");
  EXPECT_TRUE(is_text_list(list));
  const auto images = open_text_images(list, {});
  ASSERT_EQ(images->count(), 2);
  EXPECT_EQ(images->name(0), "a.png");
  EXPECT_EQ(images->size(1), (ImageSize{20, 30}));
  TextImage image;
  images->read(0, image);
  EXPECT_EQ(image.size, (ImageSize{20, 30}));
  EXPECT_EQ(image.rgb, std::vector<std::uint8_t>(20 * 30 * 3, 99));
  ASSERT_EQ(image.regions.size(), 2u);
  EXPECT_EQ(image.regions[0].polygon, (Polygon{{1, 2}, {9.5, 2}, {9, 8}}));
  EXPECT_FALSE(image.regions[0].ignore);
  EXPECT_TRUE(image.regions[1].ignore);
  images->read(1, image);
  EXPECT_TRUE(image.regions.empty());
  EXPECT_THAT(
      describe_text_images(*images, list),
      AllOf(HasSubstr("2 pictures"), HasSubstr("2 regions"), HasSubstr("1 of them ignored")));
}

TEST_F(TextLists, SayWhatTeachesNothing) {
  write("gt_a.txt", "1,1,20,1,20,12,1,12,###\n");
  write("gt_b.txt", "40,1,60,1,60,12,40,12,beside it\n");
  testing::internal::CaptureStderr();
  const auto images = open_text_images(dir_.string(), {});
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr(": no region to learn from in 1 of 2 pictures; of 2 regions, 1 marked"));
  TextImage image;
  testing::internal::CaptureStderr();
  for (const std::int64_t i : {0, 1, 1}) images->read(i, image);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("b.png, 20 of 30 pixels"));
  EXPECT_EQ(said.find("WARN"), said.rfind("WARN"));
}

TEST_F(TextLists, ReadIcdarsForm) {
  write("gt_a.txt",
        "\xEF\xBB\xBF"
        "1,2,9,2,9,8,1,8,Hello, world\r\n4, 4,8,4, 8,6,4,6,###\r\n");
  write("gt/gt_b.txt", "0,0,5,0,5,5,0,5,x");
  const auto check = [](const TextImages& images) {
    ASSERT_EQ(images.count(), 2);
    TextImage image;
    images.read(0, image);
    ASSERT_EQ(image.regions.size(), 2u);
    EXPECT_EQ(image.regions[0].polygon, (Polygon{{1, 2}, {9, 2}, {9, 8}, {1, 8}}));
    EXPECT_FALSE(image.regions[0].ignore);
    EXPECT_TRUE(image.regions[1].ignore);
    images.read(1, image);
    EXPECT_EQ(image.regions.size(), 1u);
  };
  EXPECT_TRUE(is_text_list(dir_.string()));
  check(*open_text_images(dir_.string(), {}));
  check(*open_text_images(write("lists.txt", "a.png\nb.png\n"), {}));
}

TEST_F(TextLists, NameListLineAndValueOfAFault) {
  EXPECT_THAT(refused_line("nonsense"), HasSubstr("broken.jsonl, line 2: not a JSON object"));
  EXPECT_THAT(refused_line("{\"polygons\": []}"), HasSubstr("line 2"));
  EXPECT_THAT(refused_line("{\"path\": \"a.png\"}"), HasSubstr("line 2: no list `polygons`"));
  const auto polygon = [&](const std::string& p) {
    return refused_line("{\"path\": \"a.png\", \"polygons\": [" + p + "]}");
  };
  EXPECT_THAT(polygon("7"), HasSubstr("line 2, polygon 1: \"7\""));
  EXPECT_THAT(polygon("{\"points\": [[1, 2], [3, 4]]}"), HasSubstr("has 2 points"));
  EXPECT_THAT(polygon("{\"points\": [[1, 2], [3, 4], [5]]}"), HasSubstr("[5] is not a point"));
  EXPECT_THAT(polygon("{\"points\": [[1, 2], [3, 4], [1e300, 0]]}"), HasSubstr("is not a point"));
  EXPECT_THAT(polygon("{\"points\": [[1, 2], [3, 4], [5, 6]], \"ignore\": 1}"),
              HasSubstr("`ignore` is not true or false"));
  EXPECT_THAT(refused(write("empty.jsonl", "\n")), HasSubstr("names no picture"));
  EXPECT_THAT(refused((dir_ / "none.jsonl").string()), HasSubstr("none.jsonl"));

  EXPECT_THAT(refused_icdar("1,1,9,1,9,9,1"), HasSubstr("gt_a.txt, line 2: \"\""));
  EXPECT_THAT(refused_icdar("1,1,9,1,9,9,1,nan,x"), HasSubstr("line 2: \"nan\""));
  EXPECT_THAT(refused_icdar("1,1,9,1,9,9,1,9e9,x"), HasSubstr("line 2: \"9e9\""));
  EXPECT_THAT(refused_icdar("one,1,9,1,9,9,1,9,x"), HasSubstr("line 2: \"one\""));
  fs::remove(dir_ / "gt_a.txt");
  EXPECT_THAT(refused(dir_.string()), HasSubstr("a.png has no polygons"));
  EXPECT_THAT(refused(write("notes.txt", "these are not pictures\n")),
              HasSubstr("notes.txt, line 1"));
}

TEST_F(TextLists, NamePicturesThatCannotBeRead) {
  const auto images =
      open_text_images(write("list.jsonl",
                             "{\"path\": \"gone.png\", \"polygons\": []}\n{\"path\": "
                             "\"list.jsonl\", \"polygons\": []}\n"),
                       {});
  TextImage image;
  for (const std::int64_t i : {0, 1}) try {
      images->read(i, image);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(fmt::format("(picture {} of ", i + 1)));
    }
}

TEST_F(TextLists, AreOpenedAsAClipSource) {
  write("gt_a.txt", "1,2,19,2,19,18,1,18,Hello");
  write("gt_b.txt", "");
  DataDeck deck;
  deck.path = dir_.string();
  deck.crop = 64;
  const auto source = open_clip_source(deck);
  ASSERT_EQ(source->buckets().size(), 1u);
  EXPECT_EQ(source->buckets()[0].name, "text-64");
  EXPECT_EQ(source->buckets()[0].clips, 2);
  EXPECT_EQ(source->info(0, 1).source, (dir_ / "b.png").string());
  std::vector<std::byte> sample(source->buckets()[0].clip_bytes());
  EXPECT_EQ(sample.size(), 64u * 64 * 5);
  source->read(0, 0, sample);
  EXPECT_EQ(std::to_integer<int>(sample[0]), 99);
  EXPECT_EQ(std::to_integer<int>(sample[64 * 63 * 3]), 0);  // padding
  // An empty folder is none of pictures, and a folder is no store.
  fs::create_directory(dir_ / "empty");
  EXPECT_FALSE(is_text_list((dir_ / "empty").string()));
}

}  // namespace
}  // namespace weft
