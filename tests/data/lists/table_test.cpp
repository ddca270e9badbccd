#include "data/lists/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "core/error.h"
#include "core/json.h"
#include "tests/folder.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

class ScoreTable : public FolderTest {
 protected:
  fs::path file(const std::string& text, const std::string& name = "in.csv") const {
    std::ofstream(dir_ / name, std::ios::binary) << text;
    return dir_ / name;
  }
  static std::vector<std::string> paths(const fs::path& path) {
    TableReader table(path);
    std::vector<std::string> found;
    for (TableRow row; table.next(row);) found.push_back(row.path);
    return found;
  }
  // The table with a column ocr, whose values follow the paths.
  static std::string scored(const fs::path& path, const std::map<std::string, Json>& values,
                            std::vector<std::string> columns = {"ocr"}) {
    TableReader table(path);
    std::string out;
    TableWriter writer(table, columns, [&](std::string_view text) { out += text; });
    for (TableRow row; table.next(row);)
      writer.add(row, std::vector<Json>(columns.size(), values.at(row.path)));
    return out;
  }
  static std::string refused(const fs::path& path) {
    try {
      paths(path);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_FALSE(e.hint().empty());
      return e.what();
    }
    return "accepted";
  }
};

TEST_F(ScoreTable, KeepsEveryByteOfACsv) {
  const fs::path in = file(
      "id,path,text\n"
      "007,a.mp4,\"two\nlines, and \"\"quotes\"\"\"\n"
      "1.50,\"b, c.mp4\",\n");
  EXPECT_THAT(paths(in), ElementsAre("a.mp4", "b, c.mp4"));
  EXPECT_EQ(scored(in, {{"a.mp4", 3}, {"b, c.mp4", Json()}}),
            "id,path,text,ocr\n"
            "007,a.mp4,\"two\nlines, and \"\"quotes\"\"\",3\n"
            "1.50,\"b, c.mp4\",,\n");
}

TEST_F(ScoreTable, KeepsLineEndsAndByteOrderMark) {
  EXPECT_EQ(scored(file("\xef\xbb\xbfpath,n\r\na,1\r\nb,2"), {{"a", 0}, {"b", 12}}),
            "\xef\xbb\xbfpath,n,ocr\r\na,1,0\r\nb,2,12\r\n");
  EXPECT_EQ(scored(file("path\ra\rb\r"), {{"a", 1}, {"b", 2}}), "path,ocr\ra,1\rb,2\r");
}

TEST_F(ScoreTable, ReplacesAColumnInItsPlace) {
  EXPECT_EQ(scored(file("ocr,path,n\n9.0,a,1\n,b,2\n"), {{"a", 4}, {"b", Json()}}),
            "ocr,path,n\n4,a,1\n,b,2\n");
}

TEST_F(ScoreTable, SkipsBlankLinesAndFillsShortRows) {
  const fs::path in = file("x,path,y\n\n1,a\n\n2\n\n");
  EXPECT_THAT(paths(in), ElementsAre("a", ""));
  EXPECT_EQ(scored(in, {{"a", 1}, {"", Json()}}), "x,path,y,ocr\n1,a,,1\n2,,,\n");
}

TEST_F(ScoreTable, QuotesAsPandas) {
  // A quote within an unquoted value is one; what follows a closing quote belongs to the value.
  EXPECT_THAT(paths(file("path\na\"b\n\"c\"d\n\"\"\"e\"\n")), ElementsAre("a\"b", "cd", "\"e"));
}

TEST_F(ScoreTable, WritesJsonInCells) {
  EXPECT_EQ(scored(file("path\na\n"), {{"a", parse_json<Json>(R"([[1,2.5],"x"])")}}, {"ocr_boxes"}),
            "path,ocr_boxes\na,\"[[1,2.5],\"\"x\"\"]\"\n");
  EXPECT_EQ(scored(file("path\na\n"), {{"a", "it's, so"}}, {"ocr_fault"}),
            "path,ocr_fault\na,\"it's, so\"\n");
}

TEST_F(ScoreTable, ManyRowsDoNotStayInMemory) {
  std::string text = "path,caption\n";
  for (int i = 0; i < 20000; ++i) text += "clip" + std::to_string(i) + ".mp4,\"a\nb\"\n";
  TableReader table(file(text));
  TableRow row;
  std::int64_t rows = 0;
  for (; table.next(row); ++rows) {
    ASSERT_EQ(row.path, "clip" + std::to_string(rows) + ".mp4");
    ASSERT_EQ(row.line, 2 + 2 * rows);
  }
  EXPECT_EQ(rows, 20000);
  EXPECT_LT(row.text.capacity(), 1000);
}

TEST_F(ScoreTable, FindsColumnsAsPeopleWriteThem) {
  const fs::path in = file("id, Path ,OCR\n1, a.mp4, 7\n2, \"b, c.mp4\",\n");
  EXPECT_THAT(paths(in), ElementsAre("a.mp4", "b, c.mp4"));
  EXPECT_EQ(scored(in, {{"a.mp4", 3}, {"b, c.mp4", 4}}),
            "id, Path ,ocr\n1, a.mp4,3\n2, \"b, c.mp4\",4\n");
  EXPECT_EQ(scored(file("{\"PATH\": \"a\", \"Ocr\": 1}\n", "in.jsonl"), {{"a", 5}}),
            "{\"PATH\": \"a\", \"Ocr\": 5}\n");
}

TEST_F(ScoreTable, OfATextInMemory) {
  TableReader table = TableReader::of_text("path\n\" a.png\"\n", "pictures", TableForm::csv);
  TableRow row;
  ASSERT_TRUE(table.next(row));
  EXPECT_EQ(row.path, " a.png");
  EXPECT_EQ(table.where(row), "pictures, line 2");
  EXPECT_FALSE(table.next(row));
}

TEST_F(ScoreTable, RefusesOtherEncodings) {
  EXPECT_THAT(refused(file("path,text\na,\"x\ny\xe9\"\n")),
              HasSubstr("in.csv, line 3, column text: the byte 0xe9 is not UTF-8"));
  EXPECT_THAT(refused(file(std::string("\xff\xfep\0", 4))), HasSubstr("UTF-16"));
  EXPECT_THAT(refused(file(std::string("path,text\na name,x\na\0b,y\n", 25))),
              HasSubstr("zero byte"));
  EXPECT_THAT(refused(file("PAR1....")), HasSubstr("Parquet"));
}

TEST_F(ScoreTable, RefusesOtherCsvs) {
  EXPECT_THAT(refused(file("")), HasSubstr("is empty"));
  EXPECT_THAT(refused(file("id,file\n1,a\n")), HasSubstr("no column `path`, but: id, file"));
  EXPECT_THAT(refused(file("path\na\n\"b\nc\n")), HasSubstr("line 3: a quote is not closed"));
  EXPECT_THAT(refused(file("path,n\na,1\nb,2,3\n")), HasSubstr("line 3 has 3 values"));
  EXPECT_THAT(refused(dir_), HasSubstr("is a directory"));
  EXPECT_THAT(refused(dir_ / "none.csv"), HasSubstr("cannot open"));
  // What a terminal would obey is not printed.
  EXPECT_EQ(refused(file("a\x1b[2J\n")).find('\x1b'), std::string::npos);
}

TEST_F(ScoreTable, KeepsEveryByteOfJsonLines) {
  const fs::path in = file(
      "{\"path\": \"a.mp4\", \"n\": 1.500, \"big\": 123456789012345678901234567890}\n\n"
      "{ \"x\": {\"ocr\": 1, \"path\": \"no\"}, \"path\":\"b\\\"}.mp4\" }",
      "in.JSONL");
  EXPECT_THAT(paths(in), ElementsAre("a.mp4", "b\"}.mp4"));
  EXPECT_EQ(scored(in, {{"a.mp4", 3}, {"b\"}.mp4", Json()}}),
            "{\"path\": \"a.mp4\", \"n\": 1.500, \"big\": 123456789012345678901234567890, "
            "\"ocr\": 3}\n"
            "{ \"x\": {\"ocr\": 1, \"path\": \"no\"}, \"path\":\"b\\\"}.mp4\", \"ocr\": null }\n");
}

TEST_F(ScoreTable, ReplacesMembersOfJsonLines) {
  EXPECT_EQ(scored(file("{\"ocr\":[1,{\"a\":2}],\"path\":\"a\",\"ocr_area\" : 7 }\n", "in.jsonl"),
                   {{"a", 5}}, {"ocr", "ocr_area", "ocr_scores"}),
            "{\"ocr\":5,\"path\":\"a\",\"ocr_area\" : 5, \"ocr_scores\": 5 }\n");
}

TEST_F(ScoreTable, RefusesOtherJsonLines) {
  EXPECT_THAT(refused(file("{\"path\": \"a\"}\n[1]\n", "in.jsonl")),
              HasSubstr("line 2 is no JSON"));
  EXPECT_THAT(refused(file("{\"path\": 3}\n", "in.jsonl")), HasSubstr("no text `path`"));
  EXPECT_THAT(refused(file("{\"file\": \"a\"}\n", "in.jsonl")), HasSubstr("but: file"));
  EXPECT_THAT(refused(file(std::string(5000, '['), "in.jsonl")), HasSubstr("line 1 is no JSON"));
}

}  // namespace
}  // namespace weft
