// Requests: files in the run directory, the end of the Slurm job, signals. One process, which
// speaks as rank 0.
#include "train/stop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class RequestsTest : public testing::Test {
 protected:
  void SetUp() override {
    unsetenv("SLURM_JOB_END_TIME"), unsetenv("PBS_WALLTIME");
    std::string name = (fs::temp_directory_path() / "weft_stop_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override {
    unsetenv("SLURM_JOB_END_TIME"), unsetenv("PBS_WALLTIME");
    log::set_rank(0, 1);
    fs::remove_all(dir_);
  }
  void touch(const char* name) { std::ofstream(dir_ / name); }
  static void ends_in(double seconds) {
    const auto end = std::chrono::system_clock::now() + std::chrono::duration<double>(seconds);
    const double since = std::chrono::duration<double>(end.time_since_epoch()).count();
    setenv("SLURM_JOB_END_TIME", std::to_string(static_cast<long>(since)).c_str(), 1);
  }
  static void next_look() { std::this_thread::sleep_for(std::chrono::milliseconds(520)); }

  fs::path dir_;
};

int times(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST_F(RequestsTest, NothingIsAskedWithoutAReason) {
  Requests requests(dir_, 120);
  EXPECT_EQ(requests.look(1e6, 1e6), 0u);
}

TEST_F(RequestsTest, AFileIsARequestOnceAndIsTakenAway) {
  touch("save");
  touch("dump_trace");
  Requests requests(dir_, 120);
  testing::internal::CaptureStderr();
  EXPECT_EQ(requests.look(0, 0), request::save | request::dump_trace);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("asked to save by " + (dir_ / "save").string()));
  EXPECT_THAT(said, HasSubstr("asked to write its trace by " + (dir_ / "dump_trace").string()));
  EXPECT_FALSE(fs::exists(dir_ / "save"));
  EXPECT_FALSE(fs::exists(dir_ / "dump_trace"));
  next_look();
  EXPECT_EQ(requests.look(0, 0), 0u);
  touch("save");
  next_look();
  EXPECT_EQ(requests.look(0, 0), request::save);
}

TEST_F(RequestsTest, StopStaysAndIsToldOnce) {
  touch("stopped");  // of the run before
  Requests requests(dir_, 120);
  EXPECT_FALSE(fs::exists(dir_ / "stopped"));
  touch("stop");
  testing::internal::CaptureStderr();
  EXPECT_EQ(requests.look(0, 0), request::stop);
  EXPECT_TRUE(fs::exists(dir_ / "stopped"));
  touch("stop");
  next_look();
  EXPECT_EQ(requests.look(0, 0), request::stop);
  EXPECT_FALSE(fs::exists(dir_ / "stop"));
  touch("save");
  next_look();
  EXPECT_EQ(requests.look(0, 0), request::stop | request::save);
  EXPECT_EQ(times(testing::internal::GetCapturedStderr(), "asked to stop by"), 1);
}

TEST_F(RequestsTest, FilesAreLookedAtTwiceASecondAtMost) {
  // Between two looks the host may do something else for half a second, but not each time.
  bool early = true;
  for (int k = 0; k < 10 && early; ++k) {
    Requests requests(dir_, 120);
    EXPECT_EQ(requests.look(0, 0), 0u);
    touch("save");
    early = requests.look(0, 0) != 0;
    next_look();
    EXPECT_EQ(requests.look(0, 0), early ? 0u : request::save);
  }
  EXPECT_FALSE(early);
}

TEST_F(RequestsTest, OtherRanksLeaveFilesAndClockAlone) {
  log::set_rank(1, 2);
  touch("stop");
  touch("stopped");
  ends_in(10);
  Requests requests(dir_, 120);
  EXPECT_EQ(requests.look(0, 0), 0u);
  EXPECT_TRUE(fs::exists(dir_ / "stop"));
  EXPECT_TRUE(fs::exists(dir_ / "stopped"));
}

TEST_F(RequestsTest, AFolderOfThatNameIsNoRequest) {
  fs::create_directory(dir_ / "save");
  Requests requests(dir_, 120);
  EXPECT_EQ(requests.look(0, 0), 0u);
}

TEST_F(RequestsTest, AFileThatCannotBeTakenAwayIsARequestOnce) {
  touch("stop");
  fs::create_directory(dir_ / "stopped");  // so that the rename fails, for root too
  touch("stopped/inside");
  Requests requests(dir_, 120);
  testing::internal::CaptureStderr();
  EXPECT_EQ(requests.look(0, 0), request::stop);
  next_look();
  EXPECT_EQ(requests.look(0, 0), request::stop);
  EXPECT_EQ(times(testing::internal::GetCapturedStderr(), "WARN"), 1);
}

TEST_F(RequestsTest, TheEndOfTheJobStopsARunInTime) {
  ends_in(1000);
  Requests requests(dir_, 120);
  EXPECT_EQ(requests.look(0, 0), 0u);
  EXPECT_EQ(requests.look(500, 370), 0u);  // 990 s are needed, more than 998 are left
  testing::internal::CaptureStderr();
  EXPECT_EQ(requests.look(500, 385), request::stop);  // 1005 s
  EXPECT_EQ(requests.look(0, 0), request::stop);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("asked to stop by the end of the Slurm job"));
  EXPECT_EQ(times(said, "asked to stop by"), 1);
}

// As it is for Slurm; and the earliest of several counts.
TEST_F(RequestsTest, OtherTimeLimitsStopARunInTime) {
  const auto said = [&](double max_hours, double longest_step) {
    Requests requests(dir_, 120, max_hours);
    testing::internal::CaptureStderr();
    const bool stops = requests.look(longest_step, 0) == request::stop;
    const std::string text = testing::internal::GetCapturedStderr();
    return stops ? text : "";
  };
  EXPECT_EQ(said(1, 0), "");
  EXPECT_THAT(said(1, 3600), HasSubstr("(run.max_hours; a step"));
  setenv("PBS_WALLTIME", "1800", 1);
  EXPECT_EQ(said(1, 0), "");
  EXPECT_THAT(said(1, 1790), HasSubstr("(PBS_WALLTIME; a step"));
  EXPECT_THAT(said(0.25, 1790), HasSubstr("(run.max_hours; a step"));
  ends_in(600);
  EXPECT_THAT(said(0.25, 590), HasSubstr("(SLURM_JOB_END_TIME; a step"));
  unsetenv("SLURM_JOB_END_TIME");
  setenv("PBS_WALLTIME", "01:00:00", 1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(Requests(dir_, 120).look(1e6, 0), 0u);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("PBS_WALLTIME = \"01:00:00\" is"));
}

TEST_F(RequestsTest, NoLimitIsNoEnd) {
  for (const char* unlimited : {"", "0", "4294967294", "4294967295"}) {
    setenv("SLURM_JOB_END_TIME", unlimited, 1);
    EXPECT_EQ(Requests(dir_, 1e6).look(0, 0), 0u) << unlimited;
  }
}

TEST_F(RequestsTest, AnEndThatHasPassedIsAnotherJobs) {
  ends_in(-3600);
  testing::internal::CaptureStderr();
  Requests requests(dir_, 120);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("WARN: SLURM_JOB_END_TIME"));
  EXPECT_EQ(requests.look(0, 0), 0u);
}

TEST_F(RequestsTest, WhatIsNoTimeIsRefused) {
  for (const char* wrong : {"tomorrow", "12x", "nan", "2026-11-20T12:00:00"}) {
    setenv("SLURM_JOB_END_TIME", wrong, 1);
    try {
      Requests requests(dir_, 120);
      FAIL() << wrong;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_THAT(e.what(), HasSubstr(wrong));
      EXPECT_NE(e.hint(), "");
    }
  }
}

TEST_F(RequestsTest, AStopOfAnotherRankIsToldOnce) {
  Requests requests(dir_, 120);
  testing::internal::CaptureStderr();
  requests.heard(2, request::save);
  EXPECT_EQ(requests.look(0, 0), 0u);
  requests.heard(3, request::stop);
  requests.heard(5, request::stop);
  EXPECT_EQ(requests.look(0, 0), request::stop);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "asked to stop by a signal to rank 3\n");
}

// In a process of its own: the handlers and the thread that takes the signals stay for good.
// Returns what it says; "" if `signal` is no request.
std::string answer_to(int signal, int times, const fs::path& dir) {
  int lines[2];
  if (pipe(lines) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(lines[1], STDERR_FILENO);
    watch_stop_signals();
    Requests requests(dir, 120);
    if (requests.look(0, 0) != 0) _exit(1);
    for (int i = 0; i < times; ++i) {
      kill(getpid(), signal);
      for (int wait = 0; wait < 100 && (stop_signal() == 0 || i > 0); ++wait) usleep(1000);
    }
    const unsigned asked = stop_signal() == 0 ? 0 : request::stop;
    _exit(requests.look(0, 0) == asked && requests.look(0, 0) == asked ? 0 : 2);
  }
  close(lines[1]);
  std::string said;
  char piece[256];
  for (ssize_t n; (n = read(lines[0], piece, sizeof piece)) > 0;) said.append(piece, n);
  close(lines[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return said;
}

TEST_F(RequestsTest, ASignalIsARequestToStop) {
  for (const auto& [signal, name] : {std::pair{SIGTERM, "SIGTERM"},
                                     {SIGINT, "SIGINT"},
                                     {SIGUSR1, "SIGUSR1"},
                                     {SIGUSR2, "SIGUSR2"},
                                     {SIGXCPU, "SIGXCPU"},
                                     {SIGHUP, "SIGHUP"}})
    EXPECT_EQ(answer_to(signal, 1, dir_), "asked to stop by " + std::string(name) + "\n");
}

TEST_F(RequestsTest, SomeSignalsComeAgainAndAgain) {
  for (const int signal : {SIGUSR1, SIGUSR2, SIGXCPU, SIGHUP})
    EXPECT_EQ(times(answer_to(signal, 3, dir_), "asked to stop"), 1) << signal;
}

TEST_F(RequestsTest, NohupsIsNone) {
  std::signal(SIGHUP, SIG_IGN);
  EXPECT_EQ(answer_to(SIGHUP, 1, dir_), "");
  std::signal(SIGHUP, SIG_DFL);
}

}  // namespace
}  // namespace weft
