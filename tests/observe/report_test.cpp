#include "observe/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "core/error.h"
#include "observe/report_plot.h"

namespace weft::report_page {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

class Report : public testing::Test {
 protected:
  void SetUp() override {
    run_ = fs::path(testing::TempDir()) / ("weft_report_" + std::to_string(getpid()));
    fs::create_directories(run_ / "samples");
  }
  void TearDown() override { fs::remove_all(run_); }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(run_ / name, std::ios::binary) << text;
  }
  std::string refusal() {
    try {
      load_run(run_);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return e.what();
    }
    return "";
  }
  fs::path run_;
};

TEST_F(Report, ReadsMetricsWithRestartsGapsAndATornLine) {
  write("metrics.jsonl",
        R"({"step":0,"loss":2.0,"seconds":0.5,"split":{"compute":0.3,"data_wait":0.1},)"
        R"("memory":{"resident_bytes":100},"samples":[4,5]})"
        "\n"
        R"({"step":1,"loss":9.0})"
        "\n"
        R"({"step":1,"loss":1.5,"samples":[4]})"
        "\n"
        "garbage\n"
        R"({"step":3,"loss":null,"extra":[{}]})"
        "\n"
        R"({"step":4,"los)");
  const report_page::Run run = load_run(run_);
  const Steps& s = run.steps;
  EXPECT_THAT(s.step, ElementsAre(1, 2, 4)) << "steps done, one after another";
  EXPECT_EQ(s.loss[1], 1.5) << "the last line of a repeated step";
  EXPECT_TRUE(std::isnan(s.loss[2]));
  EXPECT_EQ(run.repeated_steps, 1u);
  EXPECT_EQ(run.broken_lines, 1u) << "a torn last line is no fault";
  EXPECT_EQ(s.part[0][0], 0.3);
  EXPECT_NEAR(s.part[parts - 1][0], 0.1, 1e-12) << "what the named parts leave";
  EXPECT_TRUE(std::isnan(s.part[0][1]));
  EXPECT_EQ(s.resident[0], 100);
  EXPECT_EQ(s.samples.size(), 3u);
  EXPECT_EQ(run.distinct_samples, 2u);
}

TEST_F(Report, RefusesWhatIsNoRun) {
  EXPECT_THAT(refusal(), HasSubstr("cannot open"));
  write("metrics.jsonl", "");
  EXPECT_THAT(refusal(), HasSubstr("no complete line"));
  write("metrics.jsonl", "[1]\n{\"step\":\"x\"}\n");
  EXPECT_THAT(refusal(), HasSubstr("no complete line"));
  fs::remove_all(run_);
  EXPECT_THAT(refusal(), HasSubstr("is not a directory"));
}

TEST_F(Report, PageIsSelfContainedAndEscapesWhatItShows) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1.25,\"seconds\":0.5}\n");
  write("run.json", R"({"build":"weft <b>1</b>","ranks":2})");
  write("deck.toml", "[run]\ndir = \"</pre><script>alert(1)</script>\"\n");
  write("samples/a&b.png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\2\0\0\0\0\x40", 24));
  write("samples/clip.mp4", "video");
  write("samples/notes.txt", "not shown");
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  EXPECT_THAT(page, HasSubstr("weft &lt;b&gt;1&lt;/b&gt;"));
  EXPECT_THAT(page, HasSubstr("&lt;/pre&gt;&lt;script&gt;alert(1)"));
  EXPECT_THAT(page, HasSubstr("a&amp;b.png"));
  EXPECT_THAT(page, HasSubstr("data:video/mp4;base64,dmlkZW8="));
  EXPECT_THAT(page, HasSubstr("figure class=\"wide\"")) << "512 by 64 pixels";
  EXPECT_THAT(page, Not(HasSubstr("notes.txt")));
  EXPECT_THAT(page, Not(HasSubstr("http-equiv")));
  EXPECT_THAT(page, Not(HasSubstr("src=\"http")));
  EXPECT_THAT(page, Not(HasSubstr("href=")));
  EXPECT_THAT(page, Not(HasSubstr("nan"))) << "no coordinate or number came out as NaN";
}

TEST_F(Report, LargeVideosAreNamedInsteadOfEmbedded) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1}\n");
  write("samples/long.mp4", "x");
  fs::resize_file(run_ / "samples/long.mp4", 17 << 20);
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  EXPECT_THAT(page, HasSubstr("see samples/long.mp4"));
  EXPECT_LT(page.size(), 1u << 20);
}

TEST_F(Report, SeveralRunsShareThePlots) {
  std::string lines;
  for (int i = 0; i < 5000; ++i)
    lines += "{\"step\":" + std::to_string(i) + ",\"loss\":" + std::to_string(1.0 / (i + 1)) +
             ",\"seconds\":0.1,\"split\":{\"compute\":0.08}}\n";
  write("metrics.jsonl", lines);
  report_page::Run a = load_run(run_), b = a;
  a.name = "first";
  b.name = "second 'quoted'";
  const std::string page = make_page(std::vector<report_page::Run>{a, b});
  EXPECT_THAT(page, HasSubstr("first, second 'quoted'"));
  EXPECT_THAT(page, HasSubstr("\"n\":\"first\""));
  EXPECT_THAT(page, HasSubstr("\"n\":\"second quoted\"")) << "an attribute cannot be left";
  EXPECT_THAT(page, HasSubstr("loss (log)")) << "values span more than a factor of 50";
  EXPECT_LT(page.size(), 1u << 20) << "the page does not grow with the steps";
}

TEST(ReportPlot, TicksAreRoundAndCover) {
  EXPECT_THAT(round_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(round_ticks(0.3, 1.2, 4), ElementsAre(0.5, 1.0));
  EXPECT_THAT(round_ticks(3, 3, 4), ElementsAre(3));
  for (const double high : {1e-9, 0.7, 13.0, 99.0, 1e12}) {
    const auto ticks = round_ticks(0, high, 5);
    EXPECT_GE(ticks.size(), 3u) << high;
    EXPECT_LE(ticks.size(), 8u) << high;
  }
}

TEST(ReportPlot, BinsKeepMeansAndExtremes) {
  const std::vector<double> x = {1, 2, 3, 4}, y = {1, 3, NAN, 8};
  const Binned b = bin(x, y, 2);
  EXPECT_THAT(b.x, ElementsAre(1.5, 3.5));
  EXPECT_THAT(b.mean, ElementsAre(2, 8));
  EXPECT_THAT(b.low, ElementsAre(1, 8));
  EXPECT_THAT(b.high, ElementsAre(3, 8));
  EXPECT_EQ(bin(x, y, 100).mean.size(), 4u);
}

TEST(ReportPlot, SmoothingKeepsConstantsAndSkipsGaps) {
  const std::vector<double> y = {2, 2, NAN, 2, 2};
  for (const double v : smooth(y, 1.5)) EXPECT_DOUBLE_EQ(v, 2);
  const auto step = smooth(std::vector<double>{0, 0, 0, 1, 1, 1}, 1);
  EXPECT_TRUE(std::is_sorted(step.begin(), step.end()));
  EXPECT_NEAR(step[2] + step[3], 1, 1e-12) << "symmetric about the step";
}

TEST(ReportPlot, NumbersReadWell) {
  EXPECT_EQ(short_number(1234), "1234");
  EXPECT_EQ(short_number(1234567), "1,234,567");
  EXPECT_EQ(short_number(-20000), "-20,000");
  EXPECT_EQ(short_number(0.012345), "0.01235");
  EXPECT_EQ(short_number(NAN), "-");
}

TEST(Base64, KnownAnswersOfRfc4648) {
  EXPECT_EQ(base64(""), "");
  EXPECT_EQ(base64("f"), "Zg==");
  EXPECT_EQ(base64("fo"), "Zm8=");
  EXPECT_EQ(base64("foo"), "Zm9v");
  EXPECT_EQ(base64("foobar"), "Zm9vYmFy");
  EXPECT_EQ(base64("\xff\xfe\xfd"), "//79");
}

}  // namespace
}  // namespace weft::report_page
