#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "core/error.h"
#include "core/hash.h"
#include "media/writers.h"
#include "report/report.h"
#include "tests/folder.h"
#include "tests/report/page_data.h"

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
  Json rows() const { return data_of(make())["rows"]; }
};
const std::string of_weft = page_html({{"title", "kept"}}, "");

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
  EXPECT_LT(html.size(), 128u << 10) << "small pictures, not the files";
  for (const char* outside : {"src=\"http", "src=\"/", "<link", "@import", "url("})
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  const Json rows = data_of(html)["rows"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["name"], "a");
  EXPECT_EQ(rows[0]["page"], "a/report.html");
  EXPECT_EQ(rows[0]["loss"], 1.5);
  EXPECT_EQ(rows[0]["losses"], Json({2.5, 1.5}));
  EXPECT_EQ(rows[0]["held_out"], 2.25) << "the last";
  EXPECT_EQ(rows[0]["seconds"], 1);
  EXPECT_EQ(rows[0]["pictures"].size(), 1u) << "the newest samples alone";
  EXPECT_EQ(rows[0]["job"]["checkpoint"], "step_2");
  EXPECT_EQ(rows[1]["page"], "b/report.html");
  EXPECT_EQ(rows[1]["pictures"].size(), 1u);
  EXPECT_EQ(rows[1]["job"]["error"], "the <disk> is full");
  EXPECT_EQ(rows[1]["job"]["warnings"], Json({"slow <disk>", "hot"}));
  EXPECT_EQ(rows[2]["name"], "c/latents.h5");
  EXPECT_FALSE(rows[2].contains("page")) << "encode has no page";
  EXPECT_EQ(data_of(read("runs/a/report.html"))["kind"], "training");
  EXPECT_EQ(data_of(read("runs/b/report.html"))["kind"], "gallery");
  EXPECT_EQ(read("runs/.thumbnail.png"), "kept") << "no file is written for a thumbnail";
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_ / "runs"), {}), 5) << "and index.html";
}

TEST_F(FolderPage, PagesOfJobsThatHaveEndedAreKept) {
  training("runs/a", "finished");
  make();
  write("runs/a/report.html", of_weft);
  const auto changed = fs::last_write_time(dir_ / "runs/a/status.json");
  fs::last_write_time(dir_ / "runs/a/report.html", changed + std::chrono::seconds(1));
  EXPECT_EQ(rows()[0]["page"], "a/report.html");
  EXPECT_EQ(read("runs/a/report.html"), of_weft);
  // Clips were made from its checkpoint since then, or in the same second.
  write("runs/a/generated/status.json", "");
  fs::last_write_time(dir_ / "runs/a/generated/status.json", changed + std::chrono::seconds(1));
  make();
  EXPECT_NE(read("runs/a/report.html"), of_weft);
  write("runs/a/report.html", of_weft);
  fs::last_write_time(dir_ / "runs/a/report.html", changed - std::chrono::seconds(1));
  make();
  EXPECT_NE(read("runs/a/report.html"), of_weft);
}

TEST_F(FolderPage, PagesOfOthersAreLeftAsTheyAre) {
  for (const char* run : {"runs/a", "runs/b", "runs/c"}) training(run, "finished");
  // A comparison becomes the page of the run in whose folder it lies.
  EXPECT_EQ(report({path("runs/a"), path("runs/b")}), 0);
  EXPECT_EQ(owner_of(dir_ / "runs/a/report.html"), PageOwner::weft_for_several_jobs);
  write("runs/c/report.html", "<title>mine</title>");
  const Json c = rows()[2];
  EXPECT_EQ(owner_of(dir_ / "runs/a/report.html"), PageOwner::weft);
  EXPECT_EQ(read("runs/c/report.html"), "<title>mine</title>");
  EXPECT_FALSE(c.contains("page"));
  EXPECT_THAT(c["error"].get<std::string>(), HasSubstr("c/report.html is not a page of weft"));
  EXPECT_THROW(report({path("runs/c")}), Error);
  EXPECT_EQ(read("runs/c/report.html"), "<title>mine</title>");
  EXPECT_EQ(report({path("runs/c")}, "", path("mine.html")), 0);
  EXPECT_EQ(owner_of(dir_ / "mine.html"), PageOwner::weft);
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
  const Json of = rows();
  EXPECT_FALSE(of[0].contains("page"));
  EXPECT_THAT(of[0]["error"].get<std::string>(), HasSubstr("has no complete line yet"));
  EXPECT_EQ(of[1]["page"], "b/report.html");
}

TEST_F(FolderPage, NamesAndFilesAreNotTrusted) {
  training("runs/<b>x:y\" onclick=", "running");
  picture("secret.png");
  fs::create_directories(dir_ / "runs/<b>x:y\" onclick=/generated");
  fs::create_symlink(dir_ / "secret.png", dir_ / "runs/<b>x:y\" onclick=/generated/a.png");
  const std::string html = make();
  EXPECT_THAT(html, Not(HasSubstr("<b>x:y")));
  const Json row = data_of(html)["rows"][0];
  EXPECT_EQ(row["page"], "%3Cb%3Ex%3Ay%22%20onclick%3D/report.html");
  EXPECT_EQ(row["pictures"], Json::array());
}

TEST_F(FolderPage, WhichInputsAreFolders) {
  training("runs/a", "finished");
  picture("runs/plot.png");
  EXPECT_EQ(report({path("runs")}), 0);
  EXPECT_EQ(data_of(index())["rows"][0]["page"], "a/report.html")
      << "a loose picture beside runs is none";
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
