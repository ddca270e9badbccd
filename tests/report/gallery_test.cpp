#include "report/gallery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "core/hash.h"
#include "report/report.h"
#include "tests/report/page_data.h"

namespace weft::report_page {
namespace {

using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

class Galleries : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("weft_gallery_" + std::to_string(getpid()));
    fs::create_directories(dir_ / "out");
  }
  void TearDown() override { fs::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  // What the page has of the folder.
  Json page() const {
    const Gallery g = load_gallery(dir_ / "out");
    return data_of(gallery_page({&g, 1}))["galleries"][0];
  }
  fs::path dir_;
};

// A line of the manifest, with the members that every one has.
std::string sealed(std::string line) {
  line.pop_back();
  if (line.find("\"rank\"") == std::string::npos) line += ",\"rank\":0";
  return seal_json(line + ",\"bytes\":1,\"file_xxh3\":\"0\"}") + "\n";
}

TEST_F(Galleries, ShowTheClipsOfAGeneratingJob) {
  write("out/generated.jsonl",
        sealed(R"({"name":"b-3","file":"b.mp4","prompt":"a <dog>","seed":7,"sample":3,"frames":9,)"
               R"("height":48,"width":64,"seconds":1.25,"rank":1,"key":"k"})") +
            sealed(R"({"name":"a","file":"a.png","prompt":"a cat","seed":6,"frames":1,"height":48,)"
                   R"("width":64,"seconds":0.5,"rank":0,"key":"k"})"));
  write("out/generated.rank3.jsonl", sealed(R"({"name":"c","file":"c.png","key":"k","rank":3})"));
  write("out/a.png", "picture");
  write("out/b.mp4", "video");
  write("out/c.png", "new");
  write("out/other.png", "not of the job");
  write("out/generate_report.json",
        R"({"failures":["d: <no>"],"ranks":[{"clips":1,"busy":0.5,"last_end":2},)"
        R"({"clips":2,"busy":1.5,"last_end":1.9}]})");
  const Gallery g = load_gallery(dir_ / "out");
  EXPECT_EQ(g.command, "generate");
  ASSERT_EQ(g.clips.size(), 3u) << "the ranks' parts of the manifest count too";
  const Json shown = page(), clip = shown["clips"][1];
  EXPECT_EQ(clip["line"]["prompt"], "a <dog>");
  EXPECT_EQ(clip["line"]["seed"], 7);
  EXPECT_EQ(clip["media"]["data"], "data:video/mp4;base64,dmlkZW8=");
  EXPECT_EQ(shown["clips"][0]["media"]["data"], "data:image/png;base64,cGljdHVyZQ==");
  EXPECT_EQ(shown["failures"], Json({"d: <no>"}));
  EXPECT_EQ(shown["ranks"][1], (Json{{"clips", 2}, {"busy", 1.5}, {"last_end", 1.9}}));
  EXPECT_EQ(shown["seconds"], 1.25) << "the median";
  EXPECT_THAT(dump_json(shown), Not(HasSubstr("other.png")));
}

TEST_F(Galleries, LinkWhatIsTooLarge) {
  write("out/generated.jsonl", sealed(R"({"name":"a","file":"a b#1.mp4","prompt":"x","key":"k"})"));
  write("out/a b#1.mp4", "x");
  fs::resize_file(dir_ / "out/a b#1.mp4", 17 << 20);
  EXPECT_EQ(page()["clips"][0]["media"],
            (Json{{"name", "a b#1.mp4"}, {"link", "a%20b%231.mp4"}, {"bytes", 17 << 20}}));
}

TEST_F(Galleries, TakeNoFilesFromElsewhere) {
  write("secret.png", "secret");
  fs::create_symlink(dir_ / "secret.png", dir_ / "out/link.png");
  write("out/generated.jsonl", sealed(R"({"name":"a","file":"../secret.png","key":"k"})") +
                                   sealed("{\"name\":\"b\",\"file\":\"" +
                                          (dir_ / "secret.png").string() + "\",\"key\":\"k\"}") +
                                   sealed(R"({"name":"c","file":"link.png","key":"k"})") +
                                   sealed(R"({"name":"d","file":[],"key":"k"})") +
                                   sealed(R"({"name":"e","file":"missing.png","key":"k"})"));
  const Json clips = page()["clips"];
  ASSERT_EQ(clips.size(), 2u);
  EXPECT_EQ(clips[0]["media"], (Json{{"lost", "link.png"}}));
  EXPECT_EQ(clips[1]["media"], (Json{{"lost", "missing.png"}}));
}

TEST_F(Galleries, AnAnimationsSecondsAreThoseOfItsParts) {
  write("out/animate.jsonl",
        sealed(R"({"name":"face/prepared","key":"k","file":"p","seconds":1})") +
            sealed(R"({"name":"face/0-9","key":"k","file":"s","seconds":2.5})") +
            sealed(R"({"name":"face","key":"k","file":"face.mp4","seconds":0.5,"frames":10,)"
                   R"("picture":"in/face.png","speech":"in/a.wav"})"));
  write("out/face.mp4", "video");
  const Gallery g = load_gallery(dir_ / "out");
  ASSERT_EQ(g.clips.size(), 1u);
  EXPECT_EQ(g.clips[0].line["seconds"], 4);
  EXPECT_EQ(g.clips[0].line["rank"], "0");
  EXPECT_EQ(g.clips[0].line["speech"], "in/a.wav");
}

TEST_F(Galleries, SeveralFoldersShareAPage) {
  for (const std::string f : {"out", "later"}) {
    write(f + "/generated.jsonl",
          sealed(R"({"name":"a","file":"a.png","prompt":"a cat","key":"k"})"));
    write(f + "/a.png", f);
  }
  const std::vector<Gallery> both = {load_gallery(dir_ / "out"), load_gallery(dir_ / "later")};
  const Json shown = data_of(gallery_page(both));
  EXPECT_EQ(shown["title"], "out, later");
  EXPECT_EQ(shown["several"], true);
  EXPECT_EQ(shown["galleries"][1]["clips"][0]["media"]["data"], "data:image/png;base64,bGF0ZXI=");
}

TEST_F(Galleries, ReferencesAreOfTheirClip) {
  write("secret.png", "secret");
  write("out/generated.jsonl", sealed(R"({"name":"a","file":"a.mp4","prompt":"x","key":"k",)"
                                      R"("references":["references/a-0.png","../secret.png",7]})"));
  write("out/references/a-0.png", "shown");
  write("out/a.mp4", "video");
  const Json references = page()["clips"][0]["references"];
  ASSERT_EQ(references.size(), 1u);
  EXPECT_EQ(references[0]["file"], "references/a-0.png");
  EXPECT_EQ(references[0]["media"]["data"], "data:image/png;base64,c2hvd24=");
}

TEST_F(Galleries, ATrainingsSamplesGoThroughTime) {
  write("run/metrics.jsonl", "{\"step\":0,\"loss\":1}\n");
  for (const int step : {200, 1000}) {
    const std::string folder = "run/samples/step_" + std::to_string(step);
    write(folder + "/generated.jsonl",
          sealed(R"({"name":"a","file":"a.png","prompt":"a cat","key":"k"})"));
    write(folder + "/a.png", std::to_string(step));
  }
  write("run/samples/notes/a.png", "x");
  const report_page::Run run = load_run(dir_ / "run");
  ASSERT_EQ(run.through_time.size(), 2u) << "a folder without a number is none";
  const Json shown = data_of(make_page({&run, 1}))["runs"][0]["through_time"];
  EXPECT_EQ(shown[0]["name"], "step 200") << "by number, not name";
  EXPECT_EQ(shown[1]["name"], "step 1000");
}

TEST(Embedding, KnowsPathsThatLeaveTheFolder) {
  for (const char* inside : {"a.mp4", "pictures/a.png", "a..b/c"})
    EXPECT_TRUE(stays_inside(inside));
  for (const char* outside : {"", "/a", "../a", "a/../../b", "a/.."})
    EXPECT_FALSE(stays_inside(outside)) << outside;
}

// Contrast as WCAG 2 defines it, of every colour that page.css sets, in light and in dark.
class Contrast : public testing::Test {
 protected:
  static double luminance(const std::string& hex) {
    double sum = 0;
    const double weights[] = {0.2126, 0.7152, 0.0722};
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string digits =
          hex.size() == 4 ? std::string(2, hex[1 + i]) : hex.substr(1 + 2 * i, 2);
      const double v = std::stoi(digits, nullptr, 16) / 255.0;
      sum += weights[i] * (v <= 0.03928 ? v / 12.92 : std::pow((v + 0.055) / 1.055, 2.4));
    }
    return sum;
  }
  static double contrast(const std::string& a, const std::string& b) {
    const double x = luminance(a), y = luminance(b);
    return (std::max(x, y) + 0.05) / (std::min(x, y) + 0.05);
  }
  // The value of a variable in the part of the style that begins at `from`.
  static std::string color(const std::string& style, std::size_t from, const std::string& name) {
    const std::size_t at = style.find("--" + name + ":", from) + name.size() + 3;
    return style.substr(at, style.find(';', at) - at);
  }
};

TEST_F(Contrast, TextAndCurvesStandOutInLightAndDark) {
  const std::string style = page_style();
  for (const std::size_t from : {style.find(":root"), style.find("prefers-color-scheme: dark")}) {
    ASSERT_NE(from, std::string::npos);
    for (const char* ground : {"paper", "ground"})
      for (const char* text : {"ink", "text", "soft", "link"})
        EXPECT_GE(contrast(color(style, from, text), color(style, from, ground)), 4.5)
            << text << " on " << ground;
    for (int i = 0; i < 8; ++i)
      EXPECT_GE(
          contrast(color(style, from, "run" + std::to_string(i)), color(style, from, "paper")), 3)
          << i;
    for (int i = 0; i < 7; ++i)
      EXPECT_GE(
          contrast(color(style, from, "part" + std::to_string(i)), color(style, from, "paper")), 3)
          << i;
  }
}

}  // namespace
}  // namespace weft::report_page
