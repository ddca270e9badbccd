#include "report/gallery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "core/hash.h"
#include "report/html.h"
#include "report/report.h"

namespace weft::report_page {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;
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
  std::string page(std::vector<std::string> folders = {"out"}) {
    std::vector<Gallery> galleries;
    for (const std::string& f : folders) galleries.push_back(load_gallery(dir_ / f));
    return gallery_page(galleries);
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
  EXPECT_THAT(g.clips[1].facts,
              ElementsAre(Pair("clip 3 of seed", "7"), Pair("", "64 x 48"), Pair("", "9 frames"),
                          Pair("", "1.25 s"), Pair("rank", "1")));
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("data:video/mp4;base64,dmlkZW8="));
  EXPECT_THAT(html, HasSubstr("data:image/png;base64,cGljdHVyZQ=="));
  EXPECT_THAT(html,
              HasSubstr("<b>a &lt;dog&gt;</b>b-3 · clip 3 of seed 7 · 64 x 48 · 9 frames · "));
  EXPECT_THAT(html, HasSubstr("<b>a cat</b>a · seed 6 · 64 x 48 · "));
  EXPECT_THAT(html, HasSubstr("d: &lt;no&gt;"));
  EXPECT_THAT(html, HasSubstr("1 clip, busy 25 %"));
  EXPECT_THAT(html, HasSubstr("2 clips, busy 75 %"));
  EXPECT_THAT(html, Not(HasSubstr("other.png")));
  EXPECT_THAT(html, Not(HasSubstr("href=")));
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme: dark"));
}

TEST_F(Galleries, LinkWhatIsTooLarge) {
  write("out/generated.jsonl", sealed(R"({"name":"a","file":"a b#1.mp4","prompt":"x","key":"k"})"));
  write("out/a b#1.mp4", "x");
  fs::resize_file(dir_ / "out/a b#1.mp4", 17 << 20);
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("17.8 MB, not in this page"));
  EXPECT_THAT(html, HasSubstr("<a href=\"./a%20b%231.mp4\">a b#1.mp4</a>"));
  EXPECT_LT(html.size(), 1u << 16);
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
  const std::string html = page();
  EXPECT_THAT(html, Not(HasSubstr("c2VjcmV0")));
  EXPECT_THAT(html, HasSubstr("link.png cannot be read"));
  EXPECT_THAT(html, HasSubstr("missing.png cannot be read"));
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
  EXPECT_EQ(g.clips[0].seconds, 4);
  const std::string html = page();
  EXPECT_THAT(html,
              HasSubstr("picture in/face.png · speech in/a.wav · 10 frames · 4.00 s · rank 0"));
  EXPECT_THAT(html, Not(HasSubstr("loop muted"))) << "a clip with sound waits to be started";
}

TEST_F(Galleries, SeveralFoldersStandBesideEachOther) {
  for (const char* folder : {"out", "later"}) {
    const std::string f = folder;
    write(f + "/generated.jsonl", sealed(R"({"name":"a","file":"a.png","prompt":"a cat","key":"k",)"
                                         R"("references":["references/a-0.png"]})"));
    write(f + "/a.png", f);
    write(f + "/references/a-0.png", "shown");
  }
  const std::string html = page({"out", "later"});
  EXPECT_THAT(html, HasSubstr("<h3>a: a cat</h3>"));
  EXPECT_LT(html.find("<b>out</b>"), html.find("<b>later</b>"));
  EXPECT_LT(html.find("<b>later</b>"), html.find("<b>reference 0</b>of out"));
  EXPECT_THAT(html, HasSubstr("<b>reference 0</b>of later"));
}

TEST_F(Galleries, ClipsOfOneNameKeepTheirOwnPrompts) {
  for (const char* prompt : {"a cat", "a dog"}) {
    const std::string f = prompt;
    write(f + "/generated.jsonl",
          sealed("{\"name\":\"s\",\"file\":\"s.png\",\"prompt\":\"" + f + "\",\"key\":\"k\"}"));
    write(f + "/s.png", f);
  }
  const std::string html = page({"a cat", "a dog"});
  EXPECT_THAT(html, HasSubstr("<h3>s</h3>"));
  EXPECT_THAT(html, HasSubstr("<b>a cat: a cat</b>"));
  EXPECT_THAT(html, HasSubstr("<b>a dog: a dog</b>"));
}

TEST_F(Galleries, ReferencesStandBeforeTheirClip) {
  write("secret.png", "secret");
  write("out/generated.jsonl", sealed(R"({"name":"a","file":"a.mp4","prompt":"x","key":"k",)"
                                      R"("references":["references/a-0.png","../secret.png",7]})"));
  write("out/references/a-0.png", "shown");
  write("out/a.mp4", "video");
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("<b>reference 0</b>of a"));
  EXPECT_LT(html.find("data:image/png;base64,c2hvd24="), html.find("data:video/mp4"));
  EXPECT_THAT(html, Not(HasSubstr("c2VjcmV0")));
}

TEST_F(Galleries, WhatAnAnimationIsMadeFromStandsBeforeIt) {
  write(
      "out/animate.jsonl",
      sealed(R"({"name":"face","key":"k","file":"face.mp4","seconds":0.5,"frames":10,"references":)"
             R"(["references/face-picture.png","references/face-ref_pose.png"]})"));
  write("out/face.mp4", "video");
  write("out/references/face-picture.png", "shown");
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("<div class=\"sources\"><figure><img alt=\"picture\""));
  EXPECT_THAT(html, HasSubstr("<b>picture</b>of face"));
  EXPECT_THAT(html, HasSubstr("<b>head motion</b>of face"));
  EXPECT_THAT(html, HasSubstr("references/face-ref_pose.png cannot be read"));
}

TEST_F(Galleries, SegmentationsHaveALegend) {
  write("out/segment.jsonl",
        sealed(R"({"name":"a","key":"k","file":"a.png","shares":[)"
               R"({"class":0,"name":"sky <1>","share":0.5,"colour":"#0a0b0c"},)"
               R"({"class":1,"name":"sea","share":0.5,"colour":"red;}"}]})"));
  write("out/a.png", "x");
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("style=\"background:#0a0b0c\"></i>sky &lt;1&gt;</span>"));
  EXPECT_THAT(html, Not(HasSubstr("red;}")));
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
  const std::string html = make_page({&run, 1});
  EXPECT_THAT(html, HasSubstr("Samples through time"));
  EXPECT_LT(html.find("<b>step 200</b>"), html.find("<b>step 1000</b>")) << "by number, not name";
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
  const std::string style = open_page("", "");
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
