#include "report/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/host.h"
#include "core/json.h"
#include "report/data.h"
#include "report/report.h"

namespace weft {
namespace {

using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

constexpr double now = 1.8e9;

class Status : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("weft_status_" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  static JobStatus running() {
    JobStatus s;
    s.command = "train";
    s.noun = "step";
    s.done = 30;
    s.total = 120;
    s.before = 10;
    s.rate = 0.5;
    s.left = 180;
    s.ranks = 4;
    s.host = "node7";
    s.started = now - 3700;
    s.updated = now - 5;
    s.advanced = now - 65;
    s.values = {{"loss", 0.125}};
    s.warnings = {"slow \x1b[31mdisk"};
    return s;
  }
  fs::path dir_;
};

TEST_F(Status, OfARunningJob) {
  JobStatus s = running();
  s.values.emplace_back("validation_loss", 0.25);
  write("run/status.json", to_text(s));
  fs::create_directories(dir_ / "run/step_20");
  fs::create_directory_symlink("step_20", dir_ / "run/latest");
  const auto job = find_job(dir_ / "run", now);
  ASSERT_TRUE(job);
  const std::string text = describe_job(*job, now);
  EXPECT_THAT(text, HasSubstr("run, train\n"));
  EXPECT_THAT(text,
              HasSubstr("state     running, last heard of 5 s ago, last step 1 min 05 s ago\n"));
  EXPECT_THAT(text,
              HasSubstr("done      30 of 120 steps (25.0 %), 10 of them by earlier starts\n"));
  EXPECT_THAT(text, HasSubstr("pace      0.5 steps/s, 3 min 00 s left\n"));
  EXPECT_THAT(text, HasSubstr("loss      0.125\nheld out  0.25\n"));
  EXPECT_THAT(text, HasSubstr("ranks     4, the first on node7\n"));
  EXPECT_THAT(text, HasSubstr("saved     step_20\n"));
  EXPECT_THAT(text, HasSubstr("for 1 h 01 min\n"));
  EXPECT_THAT(text, HasSubstr("warned    slow \\x1b[31mdisk\n")) << "no control characters";
}

TEST_F(Status, BeforeTheFirstStepThereIsNoLastOne) {
  JobStatus s = running();
  s.done = s.before = 0;
  write("run/status.json", to_text(s));
  auto job = find_job(dir_ / "run", now);
  ASSERT_TRUE(job);
  EXPECT_THAT(describe_job(*job, now),
              HasSubstr("state     running, last heard of 5 s ago, no step yet\n"));
  EXPECT_THAT(jobs_as_json({*job}, now), Not(HasSubstr("seconds_since_item")));
  s.done = s.before = 10;
  write("run/status.json", to_text(s));
  job = find_job(dir_ / "run", now);
  ASSERT_TRUE(job);
  EXPECT_THAT(describe_job(*job, now), HasSubstr("ago, no step yet by this start\n"));
}

TEST_F(Status, MetricsAndCheckpointsMayBeAheadOfIt) {
  const auto done = [&] { return find_job(dir_ / "run", now)->status.done; };
  JobStatus s = running();
  s.done = s.before = 0;
  write("run/status.json", to_text(s));
  fs::create_directories(dir_ / "run/step_80");
  fs::create_directory_symlink("step_80", dir_ / "run/latest");
  EXPECT_EQ(done(), 80);
  write("run/metrics.jsonl", "{\"step\":78,\"loss\":2}\n");
  EXPECT_EQ(done(), 80);
  // Of more than is read of it, whole lines count; the last one was cut off.
  write("run/metrics.jsonl", "{\"step\":83,\"loss\":\"" + std::string(300000, 'x') + "\"}\n" +
                                 "{\"step\":84,\"loss\":2}\n{\"step\":85,");
  EXPECT_EQ(done(), 85);
  const std::string text = describe_job(*find_job(dir_ / "run", now), now);
  EXPECT_THAT(text, HasSubstr("done      85 of 120 steps (70.8 %)\n"));
  EXPECT_THAT(text, HasSubstr("last step 5 s ago\n")) << "not when the job began";
  s.done = 90;
  write("run/status.json", to_text(s));
  EXPECT_EQ(done(), 90);
}

TEST_F(Status, AJobThatIsNoLongerHeardOfIsSilent) {
  JobStatus s = running();
  s.updated = now - 61;
  write("run/status.json", to_text(s));
  const auto job = find_job(dir_ / "run", now);
  ASSERT_TRUE(job);
  EXPECT_EQ(job->status.state, "silent");
  EXPECT_THAT(describe_job(*job, now), HasSubstr("state     no sign of life since 20"));
  EXPECT_THAT(describe_job(*job, now), Not(HasSubstr("left")));
  s.updated = now - 59;
  write("run/status.json", to_text(s));
  EXPECT_EQ(find_job(dir_ / "run", now)->status.state, "running");
  s.state = "failed";
  s.code = 3;
  s.error = "clips.h5 is damaged";
  s.updated = now - 1e6;
  write("run/status.json", to_text(s));
  const std::string text = describe_job(*find_job(dir_ / "run", now), now);
  EXPECT_THAT(text, HasSubstr("state     failed (exit code 3)\n"));
  EXPECT_THAT(text, HasSubstr("error     clips.h5 is damaged\n"));
}

TEST_F(Status, AProcessThatIsGoneIsSeenOnItsHost) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  JobStatus s = running();
  const auto state = [&](const std::string& host, std::int64_t pid, double quiet) {
    s.host = host;
    s.pid = pid;
    s.updated = now - quiet;
    write("run/status.json", to_text(s));
    return find_job(dir_ / "run", now)->status.state;
  };
  EXPECT_EQ(state(host_name(), child, 20), "silent");
  EXPECT_EQ(state(host_name(), child, 10), "running") << "its last words may be on their way";
  EXPECT_EQ(state(host_name(), getpid(), 20), "running");
  EXPECT_EQ(state("another", child, 20), "running");
}

TEST_F(Status, OfARunThatStoppedEarlyWithTheReason) {
  JobStatus s = running();
  s.state = "finished";
  s.error = "stopped early after step 30 of 120";
  s.earlier_warnings = {{"the disk is slow", 3}};
  write("run/status.json", to_text(s));
  const auto job = find_job(dir_ / "run", now);
  const std::string text = describe_job(*job, now);
  EXPECT_THAT(text, HasSubstr("state     finished\nreason    stopped early after step 30"));
  EXPECT_THAT(text, HasSubstr("earlier   the disk is slow (3 of this kind)\n"));
  EXPECT_THAT(jobs_as_json({*job}, now), HasSubstr("\"reason\": \"stopped early"));
}

TEST_F(Status, OfAllJobsBelowAFolder) {
  JobStatus s = running();
  write("runs/a/status.json", to_text(s));
  s.command = "generate";
  s.noun = "clip";
  s.state = "finished";
  s.done = s.total;
  write("runs/a/generated/status.json", to_text(s));
  s.command = "encode";
  write("runs/b/latents.h5.status.json", to_text(s));
  write("runs/e/status.json", "{}");
  const std::vector<KnownJob> jobs = find_jobs(dir_ / "runs", now);
  ASSERT_EQ(jobs.size(), 3u);
  EXPECT_EQ(jobs[0].path, dir_ / "runs/a");
  EXPECT_EQ(jobs[1].path, dir_ / "runs/a/generated");
  EXPECT_EQ(jobs[2].path, dir_ / "runs/b/latents.h5");
  const std::string table = table_of_jobs(jobs, now);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 3);
  EXPECT_THAT(table, HasSubstr("30 of 120 steps   0.5 steps/s, 3 min 00 s left, loss 0.125\n"));
  EXPECT_THAT(table, HasSubstr("encode       finished"));
  const auto j = parse_json(jobs_as_json(jobs, now));
  ASSERT_EQ(j.size(), 3u);
  EXPECT_EQ(j[0]["state"], "running");
  EXPECT_EQ(j[0]["seconds_left"], 180);
  EXPECT_EQ(j[0]["loss"], 0.125);
  EXPECT_EQ(j[1]["exit_code"], 0);
  EXPECT_FALSE(j[1].contains("seconds_left"));
  EXPECT_FALSE(j[0].contains("exit_code"));
  EXPECT_EQ(find_jobs(dir_ / "runs/b/latents.h5", now).size(), 1u) << "the file that a job makes";
  EXPECT_TRUE(find_jobs(dir_ / "nowhere", now).empty());
}

}  // namespace
}  // namespace weft

namespace weft::report_page {
namespace {

// Check values of RFC 3720, section B.4.
TEST(TensorBoard, ChecksumsAreCastagnolis) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

}  // namespace
}  // namespace weft::report_page
