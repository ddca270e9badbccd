#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "core/error.h"
#include "core/hash.h"
#include "media/writers.h"
#include "report/html.h"
#include "report/report.h"
#include "tests/folder.h"

namespace weft::report_page {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr double now = 1.8e9;

class FolderPage : public FolderTest {
 protected:
  void status(const std::string& file, const std::string& command, const std::string& state,
              std::vector<std::string> warnings = {}) const {
    JobStatus s;
    s.command = command;
    s.noun = command == "train" ? "step" : "clip";
    s.state = state;
    s.done = 2;
    s.total = 4;
    s.rate = 0.5;
    s.ranks = 3;
    s.updated = now;
    s.warnings = std::move(warnings);
    if (state == "failed") s.error = "the <disk> is full";
    write(file, to_text(s));
  }
  void training(const std::string& run, const std::string& state) const {
    write(run + "/metrics.jsonl",
          "{\"step\":0,\"loss\":2.5,\"seconds\":1}\n{\"step\":1,\"loss\":1.5,\"seconds\":1}\n");
    status(run + "/status.json", "train", state);
  }
  void picture(const std::string& name) const {
    fs::create_directories((dir_ / name).parent_path());
    write_png(path(name), 100, 400, std::vector<std::uint8_t>(3 * 100 * 400, 90));
  }
  std::string index() const { return read("runs/index.html"); }
  std::string make() const {
    const fs::path folder = dir_ / "runs";
    write_folder_page(folder, find_jobs(folder, now), now);
    return index();
  }
};

TEST_F(FolderPage, HasARowForEachJobWithItsPage) {
  training("runs/a", "running");
  write("runs/a/validation.jsonl", "{\"step\":1,\"loss\":3.5}\n{\"step\":2,\"loss\":2.25}\n");
  fs::create_directories(dir_ / "runs/a/step_2");
  fs::create_directory_symlink("step_2", dir_ / "runs/a/latest");
  picture("runs/a/samples/1/s.png");
  picture("runs/a/samples/2/t.png");
  picture("runs/b/clip.png");
  status("runs/b/status.json", "generate", "failed", {"slow <disk>", "hot"});
  write("runs/b/generated.jsonl",
        seal_json(
            R"({"name":"clip","file":"clip.png","key":"k","rank":0,"bytes":1,"file_xxh3":"0"})") +
            "\n");
  status("runs/c/latents.h5.status.json", "encode", "finished");
  write("secret", "kept");
  fs::create_symlink(dir_ / "secret", dir_ / "runs/.thumbnail.png");
  const std::string html = make();
  EXPECT_THAT(html,
              HasSubstr("<a href=\"./a/report.html\">a</a><span class=\"note\">train</span>"));
  EXPECT_THAT(html, HasSubstr("<td data-v=\"1.5\">1.5000</td>"));
  EXPECT_THAT(html, HasSubstr("<td data-v=\"2.25\">2.2500</td>")) << "held out, the last";
  EXPECT_THAT(html, HasSubstr("<td data-v=\"1\">1.00 s</td>"));
  EXPECT_THAT(html, HasSubstr("<td data-v=\"step_2\">step_2</td>"));
  EXPECT_THAT(html, HasSubstr("class=\"spark\""));
  EXPECT_THAT(html, HasSubstr("2 of 4 steps"));
  EXPECT_THAT(html, HasSubstr("<a href=\"./b/report.html\">b</a>"));
  EXPECT_THAT(html, HasSubstr("failed (exit code 0)"));
  EXPECT_THAT(html, HasSubstr("the &lt;disk&gt; is full"));
  EXPECT_THAT(html,
              HasSubstr("<summary>2</summary><ul><li>slow &lt;disk&gt;</li><li>hot</li></ul>"));
  EXPECT_THAT(html, HasSubstr("<b>c/<wbr>latents.h5</b>")) << "encode has no page";
  EXPECT_THAT(html, HasSubstr("<b>3</b><span>jobs</span>"));
  std::size_t pictures = 0;
  for (std::size_t at = 0; (at = html.find("data:image/png;base64,", at)) != std::string::npos;
       ++at)
    ++pictures;
  EXPECT_EQ(pictures, 2u) << "of a the newest samples alone, and b's";
  EXPECT_LT(html.size(), 32u << 10) << "small pictures, not the files";
  EXPECT_THAT(read("runs/a/report.html"), HasSubstr("<h2>Loss</h2>"));
  EXPECT_THAT(read("runs/b/report.html"), HasSubstr("<img alt=\"clip\""));
  for (const char* outside : {"src=\"http", "src=\"/", "<link", "@import", "url("})
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  EXPECT_EQ(read("runs/.thumbnail.png"), "kept") << "no file is written for a thumbnail";
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_ / "runs"), {}), 5) << "and index.html";
}

TEST_F(FolderPage, PagesOfJobsThatHaveEndedAreKept) {
  training("runs/a", "finished");
  make();
  const std::string kept = open_page("kept", "");
  write("runs/a/report.html", kept);
  const auto changed = fs::last_write_time(dir_ / "runs/a/status.json");
  fs::last_write_time(dir_ / "runs/a/report.html", changed + std::chrono::seconds(1));
  EXPECT_THAT(make(), HasSubstr("href=\"./a/report.html\""));
  EXPECT_EQ(read("runs/a/report.html"), kept);
  // Clips were made from its checkpoint since then, or in the same second.
  write("runs/a/generated/status.json", "");
  fs::last_write_time(dir_ / "runs/a/generated/status.json", changed + std::chrono::seconds(1));
  make();
  EXPECT_THAT(read("runs/a/report.html"), HasSubstr("<h2>Loss</h2>"));
  write("runs/a/report.html", open_page("old", ""));
  fs::last_write_time(dir_ / "runs/a/report.html", changed - std::chrono::seconds(1));
  make();
  EXPECT_THAT(read("runs/a/report.html"), HasSubstr("<h2>Loss</h2>"));
}

TEST_F(FolderPage, PagesOfOthersAreLeftAsTheyAre) {
  for (const char* run : {"runs/a", "runs/b", "runs/c"}) training(run, "finished");
  // A comparison becomes the page of the run in whose folder it lies; so does a page from before
  // pages were marked.
  EXPECT_EQ(report({path("runs/a"), path("runs/b")}), 0);
  EXPECT_EQ(owner_of(dir_ / "runs/a/report.html"), PageOwner::weft_for_several_jobs);
  write("runs/b/report.html",
        "<!DOCTYPE html>\n<html><head><title>b - weft</title><style>:root {}</style></head>");
  fs::last_write_time(dir_ / "runs/b/report.html",
                      fs::last_write_time(dir_ / "runs/b/status.json") - std::chrono::seconds(1));
  write("runs/c/report.html", "<title>mine</title>");
  const std::string html = make();
  EXPECT_EQ(owner_of(dir_ / "runs/a/report.html"), PageOwner::weft);
  EXPECT_THAT(read("runs/b/report.html"), HasSubstr("<h2>Loss</h2>"));
  EXPECT_EQ(read("runs/c/report.html"), "<title>mine</title>");
  EXPECT_THAT(html, HasSubstr("<b>c</b>"));
  EXPECT_THAT(html, HasSubstr("c/report.html is not a page of weft"));
  EXPECT_THROW(report({path("runs/c")}), Error);
  EXPECT_EQ(read("runs/c/report.html"), "<title>mine</title>");
  EXPECT_EQ(report({path("runs/c")}, "", path("mine.html")), 0);
  EXPECT_THAT(read("mine.html"), HasSubstr("<h2>Loss</h2>"));
  EXPECT_THROW(report({path("runs")}, "", path("index.html")), Error) << "it links to its jobs";
  // Nor is an index replaced, and then no job's page is written either.
  write("runs/index.html", "");
  fs::remove(dir_ / "runs/a/report.html");
  EXPECT_THROW(report({path("runs")}), Error);
  EXPECT_EQ(index(), "");
  EXPECT_EQ(owner_of(dir_ / "runs/a/report.html"), PageOwner::nobody);
}

TEST_F(FolderPage, AJobThatCannotBeReadHasARowThatSaysWhy) {
  training("runs/a", "running");
  write("runs/a/metrics.jsonl", "");
  training("runs/b", "running");
  const std::string html = make();
  EXPECT_THAT(html, HasSubstr("<b>a</b>"));
  EXPECT_THAT(html, HasSubstr("has no complete line yet"));
  EXPECT_THAT(html, HasSubstr("href=\"./b/report.html\""));
}

TEST_F(FolderPage, NamesAndFilesAreNotTrusted) {
  training("runs/<b>x:y\" onclick=", "running");
  picture("secret.png");
  fs::create_directories(dir_ / "runs/<b>x:y\" onclick=/generated");
  fs::create_symlink(dir_ / "secret.png", dir_ / "runs/<b>x:y\" onclick=/generated/a.png");
  const std::string html = make();
  EXPECT_THAT(html,
              HasSubstr("<a href=\"./%3Cb%3Ex%3Ay%22%20onclick%3D/report.html\">&lt;b&gt;x:y&quot; "
                        "onclick=</a>"));
  EXPECT_THAT(html, Not(HasSubstr("<b>x:y")));
  EXPECT_THAT(html, Not(HasSubstr("data:image/png")));
}

TEST_F(FolderPage, HundredsOfRunsAreOnePage) {
  std::vector<JobRow> rows(500);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].name = "run_" + std::to_string(i);
    rows[i].page = rows[i].name + "/report.html";
    rows[i].losses.assign(60, 1.0 / static_cast<double>(i + 1));
  }
  const std::string html = folder_page(dir_, rows, now);
  EXPECT_THAT(html, HasSubstr("href=\"./run_499/report.html\""));
  EXPECT_LT(html.size(), 2u << 20);
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST_F(FolderPage, WhichInputsAreFolders) {
  training("runs/a", "finished");
  picture("runs/plot.png");
  EXPECT_EQ(report({path("runs")}), 0);
  EXPECT_THAT(index(), HasSubstr("./a/report.html")) << "a loose picture beside runs is none";
  EXPECT_FALSE(fs::exists(dir_ / "runs/report.html"));
  EXPECT_EQ(report({path("runs/a")}), 0);
  EXPECT_FALSE(fs::exists(dir_ / "runs/a/index.html"));
  // Event files of all trainings below, under their names there.
  training("runs/x/a", "finished");
  status("runs/x/b/status.json", "generate", "finished");
  EXPECT_EQ(report({path("runs")}, path("events")), 0);
  EXPECT_TRUE(fs::exists(dir_ / "events/a/events.out.tfevents.weft"));
  EXPECT_TRUE(fs::exists(dir_ / "events/x/a/events.out.tfevents.weft"));
  EXPECT_THROW(report({path("events")}), Error) << "no job below";
}

}  // namespace
}  // namespace weft::report_page
