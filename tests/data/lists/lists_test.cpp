// What the keys of decks name: lists with facts and captions, folders, globs, WebDataset shards
// that are not trusted; and tables of scores that are joined with it.
#include "data/lists/lists.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "data/lists/folders.h"
#include "tests/data/lists/tar_bytes.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Lists : public FolderTest {
 protected:
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
  static std::vector<MediaItem> listed(const std::vector<std::string>& inputs,
                                       const fs::path& results = {}) {
    return list_media(inputs, "ingest.inputs", {}, Described::yes, results);
  }
  // Paths below the folder, and captions.
  std::vector<std::pair<std::string, std::string>> captions(const std::string& input) const {
    std::vector<std::pair<std::string, std::string>> found;
    for (const MediaItem& item : listed({input}))
      found.emplace_back(fs::path(item.media.path).lexically_relative(dir_), item.text);
    return found;
  }
  std::string bad_list(const std::string& name, const std::string& text) const {
    return refused([&] { listed({write(name, text)}); });
  }
  std::string bad_shard(const std::string& text) const {
    return refused([&] { listed({write("bad.tar", text)}); });
  }
};

constexpr const char* opensora_header =
    "path,text,num_frames,height,width,aspect_ratio,fps,resolution,aes,flow,match,ocr,cmotion,id,"
    "x\n";

TEST_F(Lists, FactsOfOpenSorasTable) {
  const std::string list =
      write("meta.csv",
            std::string(opensora_header) +
                "a.mp4,\"one, two\",51,360,640,0.5625,24.0,230400,4.9,3.5,21.25,2,static,a,?\n"
                "b.mp4,,17.0,,nan,None,NaN,,1e1,,,0,,b,\n");
  const auto items = listed({list});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].text, "one, two");
  const std::vector<double> first = {4.9, 3.5, 21.25, 2, 51, 360, 640, 24};
  EXPECT_EQ(items[0].facts.values, first);
  const Facts& second = items[1].facts;
  EXPECT_EQ(second[Fact::num_frames], 17);
  EXPECT_EQ(second[Fact::aes], 10);
  EXPECT_EQ(second[Fact::ocr], 0);
  for (const Fact f : {Fact::height, Fact::width, Fact::fps, Fact::flow, Fact::match})
    EXPECT_TRUE(std::isnan(second[f]));
}

TEST_F(Lists, ColumnsThatAJobNames) {
  const auto with = [&](const std::string& name, const std::string& text) {
    return list_media({write(name, text)}, "ingest.inputs", {}, Described::yes, {}, {"x", "y"});
  };
  const std::string json = "{\"path\": \"a.mp4\", \"Y\": 0.5, \"x\": null, \"z\": \"text\"}";
  for (const MediaItem& item :
       {with("a.csv", "path,aes,z,y\na.mp4,1,text,0.5\n").at(0), with("a.jsonl", json + "\n").at(0),
        with("a.tar", tar_member("a.mp4", "film") + tar_member("a.json", json) + tar_end).at(0)}) {
    ASSERT_EQ(item.facts.values.size(), 10u);
    EXPECT_TRUE(std::isnan(item.facts.values[8]));
    EXPECT_EQ(item.facts.values[9], 0.5);
  }
  EXPECT_THAT(refused([&] { with("b.csv", "path,x\na.mp4,many\n"); }),
              HasSubstr("line 2, column x: \"many\""));
  EXPECT_EQ(columns_in(write("c.jsonl", json + "\n")), "path, Y, x, z");
}

TEST_F(Lists, FactsOfJsonLines) {
  const auto items = listed({write(
      "m.jsonl", "{\"path\": \"a.mp4\", \"aes\": 4.5, \"flow\": null, \"num_frames\": 51}\n")});
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].facts[Fact::aes], 4.5);
  EXPECT_EQ(items[0].facts[Fact::num_frames], 51);
  EXPECT_TRUE(std::isnan(items[0].facts[Fact::flow]));
}

// Any number is one, as for pandas: tables have -1 where a tool gave up. A size of 0 is no size.
TEST_F(Lists, NumbersBelowZero) {
  const auto items =
      listed({write("m.csv", "path,match,ocr,num_frames,height\na.mp4,-1.0,-1,0,-1\n")});
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].facts[Fact::match], -1);
  EXPECT_EQ(items[0].facts[Fact::ocr], -1);
  EXPECT_TRUE(std::isnan(items[0].facts[Fact::num_frames]));
  EXPECT_TRUE(std::isnan(items[0].facts[Fact::height]));
}

TEST_F(Lists, ValuesThatAreNoNumbersAreNamed) {
  for (const char* value : {"high", "4.5x", "inf", "0x10", "1e999", "4 5"})
    EXPECT_THAT(bad_list("a.csv", fmt::format("path,aes\nx.mp4,4\ny.mp4,{}\n", value)),
                AllOf(HasSubstr("a.csv, line 3, column aes"), HasSubstr(value)));
  EXPECT_THAT(bad_list("b.csv", "path,fps\nx,\"\x1b[2J\"\n"),
              AllOf(HasSubstr("line 2, column fps"), testing::Not(HasSubstr("\x1b"))));
  EXPECT_THAT(bad_list("c.csv", "path,aes\n,4\n"), HasSubstr("line 2, column path"));
  for (const char* value : {"\"4\"", "[1]", "true"})
    EXPECT_THAT(bad_list("d.jsonl", fmt::format("\n{{\"path\": \"x\", \"ocr\": {}}}\n", value)),
                AllOf(HasSubstr("d.jsonl, line 2, column ocr"), HasSubstr(value)));
  EXPECT_THAT(bad_list("e.jsonl", "{\"path\": \"x\", \"text\": [7]}\n"),
              AllOf(HasSubstr("line 1, column text"), HasSubstr("[7]")));
}

using Captions = std::vector<std::pair<std::string, std::string>>;

TEST_F(Lists, NamesOfColumns) {
  const Captions wanted = {{"a.mp4", "a cat"}, {"b.mp4", "a dog, asleep"}};
  for (const char* text : {"path,text\na.mp4,a cat\nb.mp4,\"a dog, asleep\"\n",
                           "path, text\na.mp4, a cat\nb.mp4, \"a dog, asleep\"\n",
                           "text, path\na cat, a.mp4\n\"a dog, asleep\", b.mp4\n",
                           "Path,CAPTION\na.mp4,a cat\nb.mp4,\"a dog, asleep\"\n",
                           "\xef\xbb\xbf\"\xef\xbb\xbfpath\", Text ,caption\na.mp4,a "
                           "cat,x\nb.mp4,\"a dog, asleep\",x\n"})
    EXPECT_EQ(captions(write("l.csv", text)), wanted) << text;
  EXPECT_EQ(captions(write("l.JSONL",
                           "\xef\xbb\xbf{\"Path\": \"a.mp4\", \"caption\": \"a cat\"}\r\n"
                           "{\"path\": \"b.mp4\", \" Text\": \"a dog, asleep\"}\r\n")),
            wanted);
}

// What pandas.read_csv reads as NaN (pandas 2.2, STR_NA_VALUES).
TEST_F(Lists, MissingValues) {
  for (const char* none : {"",     "#N/A",   "#N/A N/A", "#NA",  "-1.#IND", "-1.#QNAN", "-NaN",
                           "-nan", "1.#IND", "1.#QNAN",  "<NA>", "N/A",     "NA",       "NULL",
                           "NaN",  "None",   "n/a",      "nan",  "null",    "\"nan\"",  " "}) {
    const auto items =
        listed({write("l.csv", fmt::format("path,text,aes\na.mp4,{0},{0}\n", none))});
    EXPECT_EQ(items.at(0).text, "") << none;
    EXPECT_TRUE(std::isnan(items[0].facts[Fact::aes])) << none;
  }
  EXPECT_EQ(captions(write("l.jsonl",
                           "{\"path\": \"a.mp4\", \"text\": \"None\", \"aes\": \"nan\"}\n"
                           "{\"path\": \"b.mp4\", \"text\": null}\n")),
            (Captions{{"a.mp4", ""}, {"b.mp4", ""}}));
  EXPECT_EQ(captions(write("l.csv", "path,text\na.mp4,nan bread\n")),
            (Captions{{"a.mp4", "nan bread"}}));
  EXPECT_THAT(bad_list("p.csv", "path,text\nNA,x\n"), HasSubstr("line 2, column path: no value"));
}

TEST_F(Lists, TextOfOtherEncodings) {
  EXPECT_THAT(bad_list("l.csv", "path,text\na.mp4,x\nb.mp4,\"two\ncaf\xe9\"\n"),
              HasSubstr("l.csv, line 4, column text: the byte 0xe9 is not UTF-8"));
  EXPECT_THAT(bad_list("l.csv", "path,n\xe4me\na.mp4,x\n"), HasSubstr("line 1"));
  EXPECT_THAT(bad_list("l.jsonl", "{\"path\": \"a\"}\n{\"path\": \"caf\xe9\"}\n"),
              HasSubstr("l.jsonl, line 2: the byte 0xe9"));
  EXPECT_THAT(bad_list("l.csv", std::string("\xff\xfep\0a\0t\0h\0", 10)), HasSubstr("UTF-16"));
  EXPECT_THAT(bad_list("l.csv", std::string("p\0a\0t\0h\0\n\0", 10)), HasSubstr("UTF-16"));
  EXPECT_THAT(bad_list("l.csv", std::string("\0p\0a\0t\0h\0\n", 10)), HasSubstr("UTF-16"));
  EXPECT_THAT(bad_list("z.jsonl", "{\"path\": \"a\\u0000b.mp4\"}\n"), HasSubstr("zero byte"));
  write("v/a.mp4", "");
  write("v/a.txt", "caf\xe9\n");
  const std::string folder = (dir_ / "v").string();
  EXPECT_THAT(refused([&] { listed({folder}); }), HasSubstr("a.txt, line 1: the byte 0xe9"));
  write("v/a.txt", std::string("\xff\xfe\x61\0", 4));
  EXPECT_THAT(refused([&] { listed({folder}); }), HasSubstr("a.txt is UTF-16 text"));
  write("v/a.txt", "\xef\xbb\xbf a cat\r\n\r\n");
  EXPECT_EQ(captions(folder), (Captions{{"v/a.mp4", "a cat"}}));
}

TEST_F(Lists, OtherFormsOfTablesAreNamed) {
  for (const auto& [name, begin, said] : std::vector<std::array<std::string, 3>>{
           {"m.parquet", "PAR1", "a Parquet table"},
           {"m.xlsx", "PK\3\4", "a workbook or a ZIP"},
           {"m.h5", "\x89HDF\r\n\x1a\n", "an HDF5 file"},
           {"m.csv.gz", "\x1f\x8b", "packed with gzip"},
           {"m.csv", "PAR1", "a Parquet table"},
           {"m.tsv", "path\ttext", "not a list that weft can read"},
           {"m.txt", "a.mp4", "not a list that weft can read"},
           {"m.json", "[]", "not a list that weft can read"}})
    EXPECT_THAT(bad_list(name, begin + std::string(20, ' ')),
                AllOf(HasSubstr(name), HasSubstr(said)));
}

TEST_F(Lists, FoldersWithCaptions) {
  write("f/b.mp4", "");
  write("f/b.txt", "a cat\n \n");
  write("f/a/c.JPG", "");
  write("f/.hidden.mp4", "");
  write("f/notes.txt", "no caption of anything");
  write("f/d.webm", "");
  fs::create_symlink("/", dir_ / "f/root");  // folders that are links are not entered
  const auto items = listed({(dir_ / "f").string(), (dir_ / "f/*.mp4").string()});
  ASSERT_EQ(items.size(), 4u);
  EXPECT_EQ(items[0].media.path, dir_ / "f/a/c.JPG");
  EXPECT_EQ(items[0].below, "a/c.JPG");
  EXPECT_EQ(items[0].text, "");
  EXPECT_EQ(items[1].media.path, dir_ / "f/b.mp4");
  EXPECT_EQ(items[1].text, "a cat");
  EXPECT_EQ(items[2].media.path, dir_ / "f/d.webm");
  EXPECT_EQ(items[3].text, "a cat");
  EXPECT_EQ(items[0].media.trust, MediaTrust::untrusted);
  EXPECT_EQ(items[3].media.trust, MediaTrust::deck);
  write("g/notes.txt", "");
  EXPECT_THAT(refused([&] { listed({(dir_ / "g").string()}); }),
              AllOf(HasSubstr("no videos"), HasSubstr("1 file (.txt 1)")));
  write("f/d.txt", std::string(longest_caption + 1, 'x'));
  EXPECT_THAT(refused([&] { listed({(dir_ / "f").string()}); }), HasSubstr("d.txt"));
}

TEST_F(Lists, WhatAFolderLeavesOut) {
  for (const char* name : {"a.MTS", "b.m2ts", "c.3gp", "d.mpg", "e.VOB", "f.png", "f.txt", "f.json",
                           "g.cr2", "h.CR2", "notes.txt", "README", ".Trash-1000/files/x.mp4",
                           ".ipynb_checkpoints/x.png", "out/result.mp4", "sub/i.webm"})
    write(std::string("f/") + name, "x");
  fs::create_symlink(dir_ / "f/sub", dir_ / "f/linked");
  fs::create_symlink(dir_ / "f/loop", dir_ / "f/loop");
  fs::create_symlink(dir_ / "f/d.mpg", dir_ / "f/link.mpg");
  const FolderFiles found =
      files_below((dir_ / "f").string(),
                  [](const std::string& name) { return kind_of_name(name) != MediumKind::other; },
                  dir_ / "f/out");
  std::vector<std::string> names;
  for (const std::string& file : found.files)
    names.push_back(fs::path(file).lexically_relative(dir_ / "f"));
  EXPECT_THAT(names, testing::ElementsAre("a.MTS", "b.m2ts", "c.3gp", "d.mpg", "e.VOB", "f.png",
                                          "link.mpg", "sub/i.webm"));
  EXPECT_EQ(found.left_out,
            "5 files (without an ending 2, .cr2 2, .txt 1), 1 linked folder, 2 hidden");
  EXPECT_FALSE(found.only_hidden);
}

TEST_F(Lists, FoldersThatCannotBeRead) {
  if (geteuid() == 0) GTEST_SKIP() << "root may read everything";
  write("f/a.mp4", "x");
  write("f/lost+found/b.mp4", "x");
  fs::permissions(dir_ / "f/lost+found", fs::perms::none);
  const FolderFiles found =
      files_below((dir_ / "f").string(), [](const std::string&) { return true; });
  EXPECT_EQ(found.files.size(), 1u);
  EXPECT_THAT(found.left_out, AllOf(HasSubstr("1 folder that cannot be read"),
                                    HasSubstr("lost+found: Permission denied")));
  const std::string locked = (dir_ / "f/lost+found").string();
  EXPECT_THAT(refused([&] { listed({locked}); }), HasSubstr("Permission denied"));
  EXPECT_THAT(refused([&] { listed({locked + "/*.mp4"}); }), HasSubstr("Permission denied"));
  EXPECT_EQ(missing_file(locked + "/b.mp4"), locked + "/b.mp4 (Permission denied)");
  fs::permissions(dir_ / "f/lost+found", fs::perms::owner_all);
}

// A glob takes what it names: lists and folders too, and of "*" the media.
TEST_F(Lists, Globs) {
  write("v/a.mp4", "");
  write("v/a.txt", "a cat");
  write("v/sub/b.png", "");
  write("v/c.bin", "");
  write("l/one.csv", "path\nx.mp4\n");
  write("l/two.csv", "path\ny.mp4\n");
  EXPECT_EQ(captions((dir_ / "v/*").string()),
            (Captions{{"v/a.mp4", "a cat"}, {"v/sub/b.png", ""}}));
  EXPECT_EQ(captions((dir_ / "v/*.bin").string()), (Captions{{"v/c.bin", ""}}));
  EXPECT_EQ(captions((dir_ / "l/*.csv").string()), (Captions{{"l/x.mp4", ""}, {"l/y.mp4", ""}}));
}

TEST_F(Lists, FilesThatAreNotThere) {
  EXPECT_EQ(missing_file("lavfi:testsrc"), "");
  EXPECT_EQ(missing_file(dir_ / "none.mp4"), dir_ / "none.mp4");
  const std::string lengthy(300, 'x');
  EXPECT_THAT(missing_file(lengthy), HasSubstr("File name too long"));
  std::vector<std::string> missing;
  for (int i = 0; i < 12; ++i) missing.push_back(fmt::format("gone{:02}.mp4", i));
  EXPECT_NO_THROW(report_missing(missing, 13, "item", "hint"));
  EXPECT_THAT(refused([&] { report_missing(missing, 12, "item", "hint"); }),
              AllOf(HasSubstr("12 of 12 items are not there: gone00.mp4, "),
                    HasSubstr("gone09.mp4 and 2 more")));
  EXPECT_THAT(refused([&] { report_missing({"a"}, 2, "item", "hint", true); }),
              HasSubstr("1 of 2 items is not there: a"));
}

TEST_F(Lists, SamplesOfAShard) {
  const std::string film(700, 'M'), thumbnail(3, 'J');
  const std::string path = write(
      "s.tar", tar_member("d/a.jpg", thumbnail) + tar_member("d/a.mp4", film) +
                   tar_member("d/a.txt", "a cat\n") +
                   tar_member("d/a.json", "{\"caption\": \"other\", \"aes\": 4.5, \"id\": \"x\"}") +
                   tar_member("d/b.cls", "7") +  // nothing to see
                   tar_member("c.seg.png", "map") + tar_member("c.JSON", "{\"text\": \"of c\"}") +
                   tar_member("c.png", "picture") + tar_end);
  const auto items = listed({path});
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
TEST_F(Lists, HostileMembersOfAShard) {
  const std::string path = write(
      "s.tar",
      tar_member("../../up.mp4", "film") + tar_member("/etc/passwd.mp4", "", '2', "/etc/passwd") +
          tar_member("hard.mp4", "", '1', "../../up.mp4") + tar_member("null.mp4", "", '3') +
          tar_member("\x1b[2J.png", "picture") + tar_end);
  const auto items = listed({path});
  ASSERT_EQ(items.size(), 2u);
  for (const MediaItem& item : items) {
    EXPECT_EQ(item.media.path, path);  // the only file that will be opened
    EXPECT_EQ(item.media.trust, MediaTrust::untrusted);
  }
  EXPECT_EQ(items[1].media.member, "\\x1b[2J.png");
}

TEST_F(Lists, ShardsThatAreRefused) {
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
  EXPECT_THAT(refused([&] { listed({(dir_ / "none.tar").string()}); }), HasSubstr("none.tar"));
}

TEST_F(Lists, ScoresAreJoinedByPath) {
  const std::string list = write("meta.csv", "path,aes\na.mp4,4\nb/../c.mp4,5\nd.mp4,6\n");
  auto items = listed({list});
  // Absolute, relative to the table's folder, through a link.
  fs::create_directory_symlink(dir_, dir_ / "link");
  const std::string scores =
      write("ocr.csv",
            fmt::format("path,ocr,aes\n{}/link/a.mp4,3,\nc.mp4,0,5.5\nz.mp4,9,9\n", dir_.string()));
  EXPECT_EQ(join_scores(scores, {}, items), 2u);
  EXPECT_EQ(items[0].facts[Fact::ocr], 3);
  EXPECT_EQ(items[0].facts[Fact::aes], 4);  // the table has no value
  EXPECT_EQ(items[1].facts[Fact::ocr], 0);
  EXPECT_EQ(items[1].facts[Fact::aes], 5.5);
  EXPECT_TRUE(std::isnan(items[2].facts[Fact::ocr]));
  const std::string lines = write("ocr.jsonl", "{\"path\": \"d.mp4\", \"ocr\": 7}\n");
  EXPECT_EQ(join_scores(lines, {}, items), 1u);
  EXPECT_EQ(items[2].facts[Fact::ocr], 7);

  // Columns that a job names.
  const std::string quality = write("quality.csv", "path,psnr,motion\na.mp4,30.5,\nd.mp4,-2,1\n");
  EXPECT_THAT(refused([&] { join_scores(quality, {}, items); }), HasSubstr("path, psnr, motion"));
  EXPECT_EQ(join_scores(quality, {}, items, {"Motion", "psnr"}), 2u);
  EXPECT_TRUE(std::isnan(items[0].facts.values.at(8)));
  EXPECT_EQ(items[0].facts.values.at(9), 30.5);
  EXPECT_EQ(items[0].facts[Fact::ocr], 3);
  EXPECT_EQ(items[2].facts.values.at(8), 1);
  EXPECT_EQ(items[2].facts.values.at(9), -2);

  const auto bad = [&](const std::string& text) {
    return refused([&] { join_scores(write("bad.csv", text), {}, items); });
  };
  EXPECT_THAT(bad("path,ocr\na,1\n./a,2\n"), AllOf(HasSubstr("line 3"), HasSubstr("in line 2")));
  EXPECT_THAT(bad("path,text\na,1\n"), HasSubstr("no score"));
  EXPECT_THAT(bad("file,ocr\na,1\n"), HasSubstr("no column `path`"));
  EXPECT_THAT(bad("path,ocr\na,few\n"), HasSubstr("line 2, column ocr: \"few\""));
}

}  // namespace
}  // namespace weft
