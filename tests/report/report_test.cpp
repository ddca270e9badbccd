#include "report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "core/error.h"
#include "core/progress.h"
#include "media/writers.h"
#include "report/plot.h"
#include "train/metrics/metrics.h"

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
    fs::create_directories(run_ / "generated");
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
  const Series& s = run.steps;
  EXPECT_THAT(s.step, ElementsAre(1, 2, 4)) << "steps done, one after another";
  EXPECT_EQ(s["loss"][1], 1.5) << "the last line of a repeated step";
  EXPECT_TRUE(std::isnan(s["loss"][2]));
  EXPECT_EQ(run.repeated_steps, 1u);
  EXPECT_EQ(run.broken_lines, 1u) << "a torn last line is no fault";
  EXPECT_EQ(s["split/compute"][0], 0.3);
  EXPECT_NEAR(s["split/other"][0], 0.1, 1e-12) << "what the named parts leave";
  EXPECT_TRUE(std::isnan(s["split/compute"][1]));
  EXPECT_EQ(s["memory/resident_bytes"][0], 100);
  EXPECT_EQ(run.samples_seen, 3u);
  EXPECT_EQ(run.distinct_samples, 2u);
}

// The curve of what training does not see: the last whole line of each step.
TEST_F(Report, HeldOutLossStandsBesideTheTrainings) {
  write("metrics.jsonl",
        "{\"step\":0,\"loss\":2.0,\"seconds\":1}\n"
        "{\"step\":1,\"loss\":1.0,\"seconds\":1}\n");
  EXPECT_THAT(make_page(std::vector<report_page::Run>{load_run(run_)}), Not(HasSubstr("held")));
  const std::string before = event_file(load_run(run_));
  EXPECT_EQ(before.find("validation/"), std::string::npos);
  write("validation.jsonl", R"({"step":1,"loss":9.0,"buckets":{"a":9.0}})"
                            "\n"
                            R"({"step":1,"loss":2.5,"buckets":{"a":2.0,"b":3.0}})"
                            "\n"
                            "garbage\n"
                            R"({"step":2,"loss":null,"buckets":{"a":2.25},"terms":{"kl":0.5}})"
                            "\n"
                            R"({"step":3,"los)");
  const report_page::Run run = load_run(run_);
  const Series& h = run.held_out;
  EXPECT_THAT(h.step, ElementsAre(1, 2));
  EXPECT_EQ(h["loss"][0], 2.5);
  EXPECT_TRUE(std::isnan(h["loss"][1]));
  EXPECT_THAT(h["buckets/a"], ElementsAre(2.0, 2.25));
  EXPECT_EQ(h["terms/kl"].back(), 0.5);
  EXPECT_EQ(run.broken_lines, 1u);
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("held out"));
  EXPECT_THAT(page, HasSubstr("held-out loss, best 2.5000"));
  const std::string events = event_file(run);
  for (const char* tag : {"validation/loss", "validation/a", "validation/b", "validation/terms/kl"})
    EXPECT_NE(events.find(tag), std::string::npos) << tag;
}

// Losses of other samples are another curve: no line joins the two, and the best is the last one's.
TEST_F(Report, OtherHeldOutSamplesAreAnotherCurve) {
  write("metrics.jsonl",
        "{\"step\":0,\"loss\":2.0,\"seconds\":1}\n"
        "{\"step\":1,\"loss\":1.0,\"seconds\":1}\n");
  write("validation.jsonl",
        "{\"step\":1,\"loss\":1.5}\n{\"step\":2,\"loss\":1.25,\"set\":\"a\"}\n"
        "{\"step\":2,\"loss\":4.5,\"set\":\"b\"}\n{\"step\":3,\"loss\":4.25,\"set\":\"b\"}\n");
  const report_page::Run run = load_run(run_);
  EXPECT_THAT(run.held_out.step, ElementsAre(1, 2, 2, 3));
  EXPECT_THAT(run.held_out["loss"], ElementsAre(1.5, 1.25, 4.5, 4.25));
  EXPECT_THAT(run.held_out_sets, ElementsAre(0, 2)) << "older lines name no set";
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("held-out loss, best 4.2500"));
  EXPECT_THAT(page, HasSubstr(R"("y":[1.5,1.25,null,4.5,4.25])"));
}

// Samples and measurements beyond the last step of the metrics are there too, and the norms of a
// step are at that step alone.
TEST_F(Report, EventsAreAtTheirSteps) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":2.0}\n{\"step\":1,\"loss\":1.0}\n");
  write("layer_norms.jsonl", R"({"step":0,"norms":{"a":1.5}})"
                             "\n");
  write("validation.jsonl",
        "{\"step\":1,\"loss\":9}\n{\"step\":2,\"loss\":8}\n{\"step\":7,\"loss\":7}\n");
  for (const char* step : {"1", "9"}) {
    fs::create_directories(run_ / "samples" / step);
    write_png((run_ / "samples" / step / "clip.png").string(), 2, 3,
              std::vector<std::uint8_t>(18, 7));
  }
  const std::string events = event_file(load_run(run_));
  const auto times = [&](std::string_view tag) {
    int n = 0;
    for (std::size_t at = 0; (at = events.find(tag, at)) != std::string::npos; at += tag.size())
      ++n;
    return n;
  };
  EXPECT_EQ(times("layer_norms/a"), 1);
  EXPECT_EQ(times("validation/loss"), 3);
  EXPECT_EQ(times("samples/clip.png"), 2);
  EXPECT_EQ(times("\x89PNG"), 2);
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

TEST_F(Report, ReadsRegularFilesAlone) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1.25,\"seconds\":0.5}\n");
  write("secret", "a key");
  fs::create_symlink(run_ / "secret", run_ / "deck.toml");
  for (const char* name : {"validation.jsonl", "layer_norms.jsonl", "run.json"})
    ASSERT_EQ(mkfifo((run_ / name).c_str(), 0600), 0);  // reading one would wait for ever
  EXPECT_EQ(load_run(run_).deck, "");
  fs::remove(run_ / "metrics.jsonl");
  ASSERT_EQ(mkfifo((run_ / "metrics.jsonl").c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("cannot open"));
}

TEST_F(Report, PageIsSelfContainedAndEscapesWhatItShows) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1.25,\"seconds\":0.5}\n");
  write("run.json", R"({"build":"weft <b>1</b>","ranks":2})");
  write("deck.toml", "[run]\ndir = \"</pre><script>alert(1)</script>\"\n");
  write("generated/a&b.png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\2\0\0\0\0\x40", 24));
  write("generated/clip.mp4", "video");
  write("generated/notes.txt", "not shown");
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

TEST_F(Report, RestartsTermsAndWarnings) {
  StepMetrics m;
  m.loss = 5865.96812;
  m.terms = {{"constant", 0.0}, {"kl <", 5000.0}};
  {
    MetricsWriter first(run_, 0);
    for (m.step = 0; m.step < 3; ++m.step, m.loss -= 1, m.terms.back().second += 1) first.write(m);
  }
  {
    MetricsWriter again(run_, 2);  // goes on after step 2
    m.step = 2;
    again.write(m);
  }
  JobStatus status;
  status.warnings = {"the disk is <full>"};
  status.state = "failed";
  status.code = 5;
  status.error = "step 4: <loss>";
  write("status.json", to_text(status));
  const report_page::Run run = load_run(run_);
  EXPECT_THAT(run.restarts, ElementsAre(2));
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("<line class=\"restart\""));
  EXPECT_THAT(page, HasSubstr("Dotted: where the run was resumed."));
  EXPECT_THAT(page, HasSubstr("<th>resumed after step</th><td>2</td>"));
  EXPECT_THAT(page, HasSubstr("loss, from 5866</span>")) << "of the first step; five digits";
  EXPECT_THAT(page, HasSubstr("Constant: constant = 0"));
  EXPECT_THAT(page, HasSubstr("<h2>kl &lt;</h2>")) << "a plot of its own";
  EXPECT_THAT(page, HasSubstr("<td>the disk is &lt;full&gt;</td>"));
  EXPECT_THAT(page, HasSubstr("failed (exit code 5)"));
  EXPECT_THAT(page, HasSubstr("step 4: &lt;loss&gt;"));
}

// Wide charts come at a second width, with fewer numbers on their axis, for screens of phones.
TEST_F(Report, ChartsComeAtTwoWidths) {
  std::string lines;
  for (int i = 0; i <= 8000; i += 100)
    lines += "{\"step\":" + std::to_string(i) +
             ",\"loss\":1,\"start\":" + (i == 5000 ? "true" : "false") +
             ",\"seconds\":1,\"lr\":1}\n";
  write("metrics.jsonl", lines);
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  const auto numbers = [&](std::size_t from) {
    const std::string svg = page.substr(from, page.find("</svg>", from) - from);
    EXPECT_THAT(svg, HasSubstr("class=\"restart\""));
    int n = 0;
    for (std::size_t at = 0; (at = svg.find("text-anchor=\"middle\">", at)) != std::string::npos;
         ++at)
      ++n;
    return n - 2;  // the axes' labels
  };
  const std::size_t broad = page.find("<svg viewBox=\"0 0 1040 330\" class=\"broad\""),
                    narrow = page.find("<svg viewBox=\"0 0 370 240\" class=\"narrow\"");
  ASSERT_LT(broad, narrow);
  ASSERT_NE(narrow, std::string::npos);
  EXPECT_EQ(numbers(broad), 8) << "each thousand";
  EXPECT_EQ(numbers(narrow), 4);
}

TEST_F(Report, LossOfEachStore) {
  StepMetrics m;
  {
    MetricsWriter metrics(run_, 0);
    for (m.step = 0; m.step < 4; ++m.step) {
      m.stores = {{"a <.h5", 3, 2.0}, {"b.h5", m.step % 2, 5.0}};
      metrics.write(m);
    }
  }
  const report_page::Run run = load_run(run_);
  ASSERT_TRUE(run.steps.columns.contains("stores/a <.h5/loss"));
  EXPECT_THAT(run.steps["stores/b.h5/samples"], ElementsAre(0, 1, 0, 1));
  EXPECT_TRUE(std::isnan(run.steps["stores/b.h5/loss"][0])) << "no sample, no loss";
  EXPECT_EQ(run.steps["stores/b.h5/loss"][1], 5);
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("<h2>Loss of each store</h2>"));
  EXPECT_THAT(page, HasSubstr("a &lt;.h5 <em>86 % of the samples</em>"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  const std::string events = report_page::event_file(run);
  EXPECT_THAT(events, HasSubstr("stores/a <.h5/samples"));
  EXPECT_THAT(events, HasSubstr("stores/b.h5/loss"));
}

TEST_F(Report, LargeVideosAreNamedInsteadOfEmbedded) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1}\n");
  write("generated/long.mp4", "x");
  fs::resize_file(run_ / "generated/long.mp4", 17 << 20);
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  EXPECT_THAT(page, HasSubstr("<a href=\"./generated/long.mp4\">generated/long.mp4</a>"));
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

constexpr const char* two_ranks =
    R"({"step":0,"seconds":1.0,"split":{"compute":0.6,"wait_slowest":0.2,"comm_exposed":0.1,"data_wait":0.05},)"
    R"("slowest_rank":1,"spread":0.1,"rank_busy":[0.65,0.85],"rank_wait":[0.2,0.0],"rank_data_wait":[0.05,0.25]})"
    "\n"
    R"({"step":1,"seconds":1.0,"split":{"compute":0.8,"wait_slowest":0.0,"comm_exposed":0.1,"data_wait":0.05},)"
    R"("slowest_rank":0,"spread":0.1,"rank_busy":[0.85,0.75],"rank_wait":[0.0,0.1],"rank_data_wait":[0.05,0.05]})"
    "\n";

TEST_F(Report, KnowsWhatEveryRankDid) {
  write("metrics.jsonl", two_ranks);
  const report_page::Run run = load_run(run_);
  EXPECT_TRUE(run.ranks.each);
  EXPECT_THAT(run.ranks.busy, ElementsAre(testing::DoubleEq(0.75), testing::DoubleEq(0.8)));
  EXPECT_THAT(run.ranks.wait, ElementsAre(testing::DoubleEq(0.1), testing::DoubleEq(0.05)));
  EXPECT_THAT(run.ranks.data_wait, ElementsAre(testing::DoubleEq(0.05), testing::DoubleEq(0.15)));
  EXPECT_EQ(run.ranks.was_slowest.at(0), 1u);
  EXPECT_EQ(run.steps["split/wait_slowest"][0], 0.2);
  EXPECT_NEAR(run.steps["split/other"][0], 0.05, 1e-12);
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("<h2>Ranks</h2>"));
  EXPECT_THAT(page, HasSubstr("<span>rank 1</span>"));
  EXPECT_THAT(page, HasSubstr("title=\"compute: 650 ms\""))
      << "rank 1's busy time without its wait for clips";
  EXPECT_THAT(page, HasSubstr("busy 800 ms, slowest in 50 % of steps"));
  EXPECT_THAT(
      page, HasSubstr("7.5 %</b><span>waiting for the slowest, mean of the ranks (5.0 % to 10 %)"));
  EXPECT_THAT(page, HasSubstr("spread of ranks (%)"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
}

// A rank's bar is as long as its step: its own work and wait, and of the rest what rank 0 measured.
TEST_F(Report, BarsOfRanksFillTheStep) {
  write("metrics.jsonl", two_ranks);
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  std::size_t bars = 0;
  for (std::size_t at = page.find("<span>rank "); at != std::string::npos;
       at = page.find("<span>rank ", at + 1)) {
    EXPECT_THAT(page.substr(at, 120), HasSubstr("style=\"width:100.00%\""));
    ++bars;
  }
  EXPECT_EQ(bars, 2u);
}

TEST_F(Report, OfManyRanksTheRangeIsShown) {
  write(
      "metrics.jsonl",
      R"({"step":0,"seconds":1.0,"slowest_rank":77,"spread":0.2,"rank_busy":{"min":0.6,"median":0.7,"max":0.9},)"
      R"("rank_wait":{"min":0.0,"median":0.2,"max":0.3}})"
      "\n");
  const report_page::Run run = load_run(run_);
  EXPECT_FALSE(run.ranks.each);
  EXPECT_THAT(run.ranks.wait, ElementsAre(0.3, 0.2, 0.0)) << "the fastest waits longest";
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("<span>fastest</span>"));
  EXPECT_THAT(page, HasSubstr("<span>slowest</span>"));
  EXPECT_THAT(page, HasSubstr("rank 77 in 100 %"));
  EXPECT_THAT(page, HasSubstr("waiting for the slowest, median of the ranks (0.0 % to 30 %)"));
}

TEST_F(Report, ARestartOnOtherRanksBeginsTheirMeansAnew) {
  std::string lines = two_ranks;
  lines +=
      R"({"step":2,"seconds":1.0,"slowest_rank":2,"spread":0.1,"rank_busy":[0.1,0.2,0.3],"rank_wait":[0.2,0.1,0]})"
      "\n";
  write("metrics.jsonl", lines);
  const report_page::Run run = load_run(run_);
  EXPECT_THAT(run.ranks.busy, ElementsAre(0.1, 0.2, 0.3));
  EXPECT_TRUE(run.ranks.data_wait.empty());
  EXPECT_EQ(run.ranks.was_slowest.size(), 1u);
  EXPECT_THAT(make_page(std::vector<report_page::Run>{run}),
              HasSubstr("compute, with the wait for clips"));
}

TEST_F(Report, OlderMetricsHaveNoRanks) {
  write("metrics.jsonl", R"({"step":0,"seconds":0.5,"split":{"compute":0.3,"comm_exposed":0.1}})"
                         "\n");
  write("run.json", R"({"build":"weft 0","memory":"25 MiB of state"})");
  const std::string page = make_page(std::vector<report_page::Run>{load_run(run_)});
  EXPECT_THAT(page, Not(HasSubstr("<h2>Ranks")));
  EXPECT_THAT(page, Not(HasSubstr("wait for the slowest")));
  EXPECT_THAT(page, Not(HasSubstr("against its plan")));
  EXPECT_THAT(page, Not(HasSubstr("<h2>Scaling")));
  EXPECT_THAT(page, HasSubstr("exposed communication"));
}

TEST_F(Report, MetricsOfAnyVersionOfTheWriterAreRead) {
  for (const std::size_t ranks : {0u, 1u, 4u, 64u, 65u}) {
    fs::remove(run_ / "metrics.jsonl");
    StepMetrics m;
    m.seconds = 1;
    m.split.compute = 0.5;
    m.split.wait_slowest = 0.25;
    for (std::size_t r = 0; r < ranks; ++r) {
      m.rank_busy.push_back(0.5f + 0.001f * static_cast<float>(r));
      m.rank_wait.push_back(0.25f);
    }
    m.slowest_rank = static_cast<int>(ranks) - 1;
    m.spread = spread_of(m.rank_busy);
    { MetricsWriter(run_, 0).write(m); }
    const report_page::Run run = load_run(run_);
    EXPECT_EQ(run.steps["split/wait_slowest"][0], 0.25);
    EXPECT_EQ(run.ranks.busy.size(), ranks == 65 ? 3 : ranks);
    EXPECT_EQ(run.ranks.each, ranks <= 64);
    if (ranks == 0) {
      EXPECT_TRUE(std::isnan(run.steps["slowest_rank"][0])) << "nothing of ranks is written";
    } else {
      EXPECT_EQ(run.steps["slowest_rank"][0], static_cast<double>(ranks) - 1);
      EXPECT_NEAR(run.ranks.busy.back(), 0.5 + 0.001 * (static_cast<double>(ranks) - 1), 1e-6);
    }
  }
}

TEST(Spread, IsTheLeadOfTheSlowestOverTheMean) {
  EXPECT_EQ(spread_of({}), 0);
  EXPECT_EQ(spread_of(std::vector<float>{0, 0}), 0);
  EXPECT_EQ(spread_of(std::vector<float>{2}), 0);
  EXPECT_DOUBLE_EQ(spread_of(std::vector<float>{1, 2, 3}), 0.5);
}

TEST_F(Report, MemoryStandsAgainstItsPlan) {
  write("metrics.jsonl", R"({"step":0,"memory":{"resident_bytes":5e9,"arena_peak_bytes":1.1e9}})"
                         "\n");
  write("run.json", R"({"ranks":"2","memory_plan":{"weights":2e9,"<b>":3e8,"activations":1e9}})");
  const report_page::Run run = load_run(run_);
  ASSERT_EQ(run.memory_plan.size(), 3u);
  EXPECT_EQ(run.memory_plan[0].first, "weights");
  const std::string page = make_page(std::vector<report_page::Run>{run});
  EXPECT_THAT(page, HasSubstr("weights 2.00 GB"));
  EXPECT_THAT(page, HasSubstr("&lt;b&gt; 300 MB"));
  EXPECT_THAT(page, HasSubstr("1.10 GB (+10.0 %)"));
  EXPECT_THAT(page, HasSubstr("<span>3.30 GB</span>")) << "the sum of the plan";
  EXPECT_THAT(page, Not(HasSubstr("<th>memory_plan"))) << "not in the table of facts as well";
}

TEST_F(Report, ScalingResultsOfTheRunAndBesideIt) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":1}\n");
  write(
      "scaling.json",
      R"({"mode":"weak","mix":"uniform","points":[{"ranks":4,"seconds":1.1,"efficiency":0.91,"wait":0.011},)"
      R"({"ranks":1,"seconds":1.0,"efficiency":1.0}]})");
  write("other.json",
        R"({"mode":"weak","mix":"mixed \"<","points":[{"ranks":1,"seconds":2,"efficiency":1},)"
        R"({"ranks":2,"seconds":2.1,"efficiency":0.95,"exposed":0.1},{"ranks":"x"}]})");
  const report_page::Run run = load_run(run_);
  ASSERT_EQ(run.scaling.size(), 1u);
  EXPECT_EQ(run.scaling[0].points[0].ranks, 1) << "sorted by ranks";
  const Scaling other_result = load_scaling(run_ / "other.json");
  EXPECT_EQ(other_result.points.size(), 2u);
  const std::string page =
      make_page(std::vector<report_page::Run>{run}, std::vector<Scaling>{other_result});
  EXPECT_THAT(page, HasSubstr("<h2>Scaling</h2>"));
  EXPECT_THAT(page, HasSubstr("weak, mixed &quot;&lt;"));
  EXPECT_THAT(page, HasSubstr("\"labels\":[[0,\"1\"],[1,\"2\"],[2,\"4\"]]"))
      << "ranks double along the axis";
  EXPECT_THAT(page, HasSubstr("<td>91.0 %</td><td>-</td><td>1.0 %</td>"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
}

TEST_F(Report, RefusesWhatIsNoScalingResult) {
  const auto refused = [&](const std::string& text, const std::string& says) {
    write("scaling.json", text);
    try {
      load_scaling(run_ / "scaling.json");
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(says));
      EXPECT_THAT(e.hint(), HasSubstr("bench scaling"));
    }
  };
  refused("{", "no list of points");
  refused("[1]", "no list of points");
  refused(R"({"points":3})", "no list of points");
  refused(R"({"points":[1,{"ranks":2,"seconds":0,"efficiency":1}]})", "no point");
  EXPECT_THROW(load_scaling(run_ / "missing.json"), Error);
}

// A file of its own has no style that gives "var(--run0)" a colour.
TEST(ReportPlot, StandaloneDocumentsHaveColours) {
  const report_page::PlotFrame frame{"ranks", "efficiency (%)"};
  const std::string color = report_page::color_of(7);
  const std::vector<report_page::Curve> curves = {{"a", {1, 2}, {3, 4}, color}};
  const std::vector<std::pair<std::string, std::string>> legend = {{color, "a"}};
  const std::string svg = standalone_svg(frame, curves, legend, 20);
  EXPECT_THAT(svg, Not(HasSubstr("var(")));
  EXPECT_THAT(svg, HasSubstr("stroke:#6b6f76"));
  EXPECT_THAT(svg, HasSubstr("fill=\"#6b6f76\""));
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
  EXPECT_EQ(seconds_text(239.7), "4 min 00 s");
  EXPECT_EQ(seconds_text(7230), "2 h 01 min");
  EXPECT_EQ(seconds_text(10799), "3 h 00 min");
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
