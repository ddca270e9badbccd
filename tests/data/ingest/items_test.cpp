// What an ingest works through: facts of lists, folders with captions, WebDataset shards that are
// not trusted, tables of scores.
#include "data/ingest/items.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "data/ingest/shards.h"
#include "tests/data/ingest/tar_bytes.h"

namespace weft {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

class Items : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / fmt::format("weft_items_{}", getpid());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string put(const std::string& name, const std::string& text) const {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << text;
    return (dir_ / name).string();
  }
  // The error's message, with its hint.
  template <class F>
  static std::string refused(F&& work) {
    try {
      work();
      return "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_FALSE(e.hint().empty());
      return e.what();
    }
  }
  std::string bad_list(const std::string& name, const std::string& text) const {
    return refused([&] { list_items({put(name, text)}, {}); });
  }
  std::string bad_shard(const std::string& text) const {
    return refused([&] { list_items({put("bad.tar", text)}, {}); });
  }

  fs::path dir_;
};

constexpr const char* opensora_header =
    "path,text,num_frames,height,width,aspect_ratio,fps,resolution,aes,flow,match,ocr,cmotion,id,"
    "x\n";

TEST_F(Items, FactsOfOpenSorasTable) {
  const std::string list =
      put("meta.csv",
          std::string(opensora_header) +
              "a.mp4,\"one, two\",51,360,640,0.5625,24.0,230400,4.9,3.5,21.25,2,static,a,?\n"
              "b.mp4,,17.0,,nan,None,NaN,,1e1,,,0,,b,\n");
  const auto items = list_items({list}, {});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].text, "one, two");
  const std::array<double, 8> first = {4.9, 3.5, 21.25, 2, 51, 360, 640, 24};
  EXPECT_EQ(items[0].facts.values, first);
  const Facts& second = items[1].facts;
  EXPECT_EQ(second[Fact::num_frames], 17);
  EXPECT_EQ(second[Fact::aes], 10);
  EXPECT_EQ(second[Fact::ocr], 0);
  for (const Fact f : {Fact::height, Fact::width, Fact::fps, Fact::flow, Fact::match})
    EXPECT_TRUE(std::isnan(second[f]));
}

TEST_F(Items, FactsOfJsonLines) {
  const auto items = list_items(
      {put("m.jsonl", "{\"path\": \"a.mp4\", \"aes\": 4.5, \"flow\": null, \"num_frames\": 51}\n")},
      {});
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].facts[Fact::aes], 4.5);
  EXPECT_EQ(items[0].facts[Fact::num_frames], 51);
  EXPECT_TRUE(std::isnan(items[0].facts[Fact::flow]));
}

TEST_F(Items, ValuesThatAreNoNumbersAreNamed) {
  for (const char* value : {"high", "4.5x", "-1", "inf", "0x10", "1e999", "4 5"})
    EXPECT_THAT(bad_list("a.csv", fmt::format("path,aes\nx.mp4,4\ny.mp4,{}\n", value)),
                AllOf(HasSubstr("a.csv, line 3, column aes"), HasSubstr(value)));
  EXPECT_THAT(bad_list("b.csv", "path,fps\nx,\"\x1b[2J\"\n"),
              AllOf(HasSubstr("line 2, column fps"), testing::Not(HasSubstr("\x1b"))));
  EXPECT_THAT(bad_list("c.csv", "path,aes\n,4\n"), HasSubstr("line 2, column path"));
  for (const char* value : {"\"4\"", "-1", "[1]", "true"})
    EXPECT_THAT(bad_list("d.jsonl", fmt::format("\n{{\"path\": \"x\", \"ocr\": {}}}\n", value)),
                AllOf(HasSubstr("d.jsonl, line 2, column ocr"), HasSubstr(value)));
  EXPECT_THAT(bad_list("e.jsonl", "{\"path\": \"x\", \"text\": [7]}\n"),
              AllOf(HasSubstr("line 1, column text"), HasSubstr("[7]")));
}

TEST_F(Items, FoldersWithCaptions) {
  put("f/b.mp4", "");
  put("f/b.txt", "a cat\n \n");
  put("f/a/c.JPG", "");
  put("f/.hidden.mp4", "");
  put("f/notes.txt", "no caption of anything");
  put("f/d.webm", "");
  fs::create_symlink("/", dir_ / "f/root");  // folders that are links are not entered
  const auto items = list_items({(dir_ / "f").string(), (dir_ / "f/*.mp4").string()}, {});
  ASSERT_EQ(items.size(), 4u);
  EXPECT_EQ(items[0].media.path, dir_ / "f/a/c.JPG");
  EXPECT_EQ(items[0].text, "");
  EXPECT_EQ(items[1].media.path, dir_ / "f/b.mp4");
  EXPECT_EQ(items[1].text, "a cat");
  EXPECT_EQ(items[2].media.path, dir_ / "f/d.webm");
  EXPECT_EQ(items[3].text, "a cat");
  EXPECT_EQ(items[0].media.trust, MediaTrust::untrusted);
  put("g/notes.txt", "");
  EXPECT_THAT(refused([&] { list_items({(dir_ / "g").string()}, {}); }), HasSubstr("no videos"));
  put("f/d.txt", std::string(longest_caption + 1, 'x'));
  EXPECT_THAT(refused([&] { list_items({(dir_ / "f").string()}, {}); }), HasSubstr("d.txt"));
}

TEST_F(Items, SamplesOfAShard) {
  const std::string film(700, 'M'), thumbnail(3, 'J');
  const std::string path = put(
      "s.tar", tar_member("d/a.jpg", thumbnail) + tar_member("d/a.mp4", film) +
                   tar_member("d/a.txt", "a cat\n") +
                   tar_member("d/a.json", "{\"caption\": \"other\", \"aes\": 4.5, \"id\": \"x\"}") +
                   tar_member("d/b.cls", "7") +  // nothing to see
                   tar_member("c.seg.png", "map") + tar_member("c.JSON", "{\"text\": \"of c\"}") +
                   tar_member("c.png", "picture") + tar_end);
  const auto items = list_items({path}, {});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].media.path, path);
  EXPECT_EQ(items[0].media.name(), path + "/d/a.mp4");
  EXPECT_EQ(items[0].media.begin, 512u + 512 + 512);  // behind its header and all of a.jpg
  EXPECT_EQ(items[0].media.bytes, film.size());
  EXPECT_EQ(items[0].text, "a cat");
  EXPECT_EQ(items[0].facts[Fact::aes], 4.5);
  EXPECT_EQ(items[1].media.member, "c.png");
  EXPECT_EQ(items[1].text, "of c");
}

// Names are labels, whatever they say; links lead nowhere.
TEST_F(Items, HostileMembersOfAShard) {
  const std::string path = put("s.tar", tar_member("../../up.mp4", "film") +
                                            tar_member("/etc/passwd.mp4", "", '2', "/etc/passwd") +
                                            tar_member("hard.mp4", "", '1', "../../up.mp4") +
                                            tar_member("null.mp4", "", '3') +
                                            tar_member("\x1b[2J.png", "picture") + tar_end);
  const auto items = list_items({path}, {});
  ASSERT_EQ(items.size(), 2u);
  for (const IngestInput& item : items) {
    EXPECT_EQ(item.media.path, path);  // the only file that will be opened
    EXPECT_EQ(item.media.trust, MediaTrust::untrusted);
  }
  EXPECT_EQ(items[1].media.member, "?[2J.png");
}

TEST_F(Items, ShardsThatAreRefused) {
  const std::string a = tar_member("a.mp4", "film"), caption(longest_caption + 1, 'x');
  EXPECT_THAT(bad_shard("no tar at all"), HasSubstr("bad.tar"));
  EXPECT_THAT(bad_shard("\x1f\x8b compressed"), HasSubstr("bad.tar"));
  EXPECT_THAT(bad_shard(a + tar_member("b.mp4", "x", '0', "", 1 << 30)),
              HasSubstr("b.mp4 is cut off"));
  EXPECT_THAT(bad_shard(a + tar_member("b.txt", "x", '0', "", 4096)), HasSubstr("b.txt"));
  EXPECT_THAT(bad_shard(a + tar_member("a.mov", "film") + tar_end),
              AllOf(HasSubstr("a.mov"), HasSubstr("a.mp4")));
  EXPECT_THAT(bad_shard(tar_member("a.txt", caption) + tar_end), HasSubstr("more than a MiB"));
  EXPECT_THAT(bad_shard(tar_member("a.json", std::string(5000, '[')) + tar_end),
              HasSubstr("a.json is no JSON object"));
  EXPECT_THAT(bad_shard(tar_member("a.json", "{\"aes\": \"4\"}") + tar_end),
              AllOf(HasSubstr("a.json, column aes"), HasSubstr("\"4\"")));
  std::string changed = a;
  changed[0] = 'z';  // the header's sum is another one
  EXPECT_THAT(bad_shard(a + changed + tar_end), HasSubstr("behind its member a.mp4"));
  EXPECT_THAT(refused([&] { list_items({(dir_ / "none.tar").string()}, {}); }),
              HasSubstr("none.tar"));
}

TEST_F(Items, ScoresAreJoinedByPath) {
  const std::string list = put("meta.csv", "path,aes\na.mp4,4\nb/../c.mp4,5\nd.mp4,6\n");
  auto items = list_items({list}, {});
  // Paths as they are for who starts weft, and relative to the table's folder.
  const std::string scores = put(
      "ocr.csv", fmt::format("path,ocr,aes\n{}/a.mp4,3,\nc.mp4,0,5.5\nz.mp4,9,9\n", dir_.string()));
  EXPECT_EQ(join_scores(scores, {}, items), 2u);
  EXPECT_EQ(items[0].facts[Fact::ocr], 3);
  EXPECT_EQ(items[0].facts[Fact::aes], 4);  // the table has no value
  EXPECT_EQ(items[1].facts[Fact::ocr], 0);
  EXPECT_EQ(items[1].facts[Fact::aes], 5.5);
  EXPECT_TRUE(std::isnan(items[2].facts[Fact::ocr]));
  const std::string lines = put("ocr.jsonl", "{\"path\": \"d.mp4\", \"ocr\": 7}\n");
  EXPECT_EQ(join_scores(lines, {}, items), 1u);
  EXPECT_EQ(items[2].facts[Fact::ocr], 7);

  const auto bad = [&](const std::string& text) {
    return refused([&] { join_scores(put("bad.csv", text), {}, items); });
  };
  EXPECT_THAT(bad("path,ocr\na,1\n./a,2\n"), AllOf(HasSubstr("line 3"), HasSubstr("in line 2")));
  EXPECT_THAT(bad("path,text\na,1\n"), HasSubstr("no score"));
  EXPECT_THAT(bad("file,ocr\na,1\n"), HasSubstr("no column `path`"));
  EXPECT_THAT(bad("path,ocr\na,few\n"), HasSubstr("line 2, column ocr: \"few\""));
}

}  // namespace
}  // namespace weft
