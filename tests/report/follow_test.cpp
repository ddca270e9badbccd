#include "report/follow.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/folder.h"

namespace weft {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

// Files as a job writes them, one poll after the other.
class Follow : public FolderTest {
 protected:
  static constexpr double now = 1.8e9;
  void status(const std::string& folder, JobStatus s) const {
    s.updated = s.advanced = now;
    write(folder + "/status.json", to_text(s));
  }
  static JobStatus training() {
    JobStatus s;
    s.command = "train";
    s.noun = "step";
    s.total = 40;
    s.started = now - 100;
    return s;
  }
  void append(const std::string& name, const std::string& text) const {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary | std::ios::app) << text;
  }
  // Lines of metrics, of these steps counted from 0.
  void steps(const std::string& run, int first, int last) const {
    for (int i = first; i <= last; ++i)
      append(
          run + "/metrics.jsonl",
          fmt::format("{{\"step\":{},\"loss\":{}.5,\"seconds\":2,\"split\":{{\"data_wait\":1}}}}\n",
                      i, i));
  }
  Follower of(const std::string& name) const { return Follower({dir_ / name}); }
};

TEST_F(Follow, StepsOfATrainingToItsEnd) {
  Follower follower = of("run");
  EXPECT_EQ(follower.poll(now), "");
  EXPECT_THAT(follower.waiting(), ElementsAre(dir_ / "run"));
  EXPECT_FALSE(follower.ended());
  JobStatus s = training();
  status("run", s);
  steps("run", 0, 19);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(follower.poll(now), "") << "it looks for jobs in the tenth";
  std::string text = follower.poll(now);
  EXPECT_THAT(text, StartsWith(path("run") + "  train        running  20 of 40 steps"));
  EXPECT_THAT(text,
              HasSubstr("step     11/40  loss 10.50000  grad nan  lr nan  2.000 s  (data 50.0 %"));
  EXPECT_THAT(text, Not(HasSubstr("step     10/40"))) << "the last ten alone";
  EXPECT_EQ(follower.poll(now), "");
  // A line that is not whole yet waits; what was measured stands at its step.
  steps("run", 20, 21);
  append("run/metrics.jsonl", "{\"step\":22,");
  append("run/validation.jsonl", "{\"step\":21,\"loss\":3.25}\n");
  text = follower.poll(now);
  EXPECT_THAT(text, StartsWith("step     21/40  loss 20.50000"));
  EXPECT_THAT(text, HasSubstr("\nheld out  step 21: loss 3.25000\nstep     22/40"));
  append("run/metrics.jsonl", "\"loss\":1}\n");
  s.warnings = {"slow \x1b[31mdisk"};
  status("run", s);
  fs::create_directories(dir_ / "run/step_20");
  fs::create_directory_symlink("step_20", dir_ / "run/latest");
  text = follower.poll(now);
  EXPECT_THAT(text, StartsWith("step     23/40  loss 1.00000"));
  EXPECT_THAT(text, EndsWith("\nsaved     step_20\nWARN: slow \\x1b[31mdisk\n"));
  EXPECT_FALSE(follower.ended());
  steps("run", 23, 23);
  s.state = "stopped";
  s.code = 75;
  s.done = 24;
  status("run", s);
  text = follower.poll(now);
  EXPECT_THAT(text, StartsWith("step     24/40"));
  EXPECT_THAT(text, HasSubstr("\n" + path("run") + "  train        stopped early  24 of 40 steps"));
  EXPECT_TRUE(follower.ended());
  EXPECT_EQ(follower.poll(now), "");
}

TEST_F(Follow, PrintsTheStepsThatTheLogHas) {
  JobStatus s = training();
  s.rate = 0.5;
  s.warnings = {"no LPIPS"};
  status("run", s);
  write("run/deck.toml", "[train]\nlog_every = 8\n");
  steps("run", 0, 17);
  Follower follower = of("run");
  std::string text = follower.poll(now);
  EXPECT_THAT(text, HasSubstr("running  18 of 40 steps"));
  EXPECT_THAT(text, HasSubstr("\nwarned    no LPIPS\nstep      8/40")) << "it was before";
  EXPECT_THAT(text, HasSubstr("\nstep     16/40"));
  EXPECT_THAT(text, EndsWith("%), 48 s left\n"));
  EXPECT_EQ(std::ranges::count(text, '\n'), 4);
  steps("run", 18, 19);
  EXPECT_EQ(follower.poll(now), "");
  s.state = "stopped";
  s.done = 20;
  s.warnings.push_back("asked to stop");
  status("run", s);
  text = follower.poll(now);
  EXPECT_THAT(text, StartsWith("step     20/40  loss 19.50000")) << "a log ends with the last";
  EXPECT_THAT(text, HasSubstr("\nWARN: asked to stop\n"));
  EXPECT_THAT(text, Not(HasSubstr("LPIPS")));
  EXPECT_EQ(follower.poll(now), "");
}

TEST_F(Follow, ARestartDropsStepsAndRepeatsThem) {
  JobStatus s = training();
  status("run", s);
  steps("run", 0, 30);
  Follower follower = of("run");
  EXPECT_THAT(follower.poll(now), HasSubstr("step     31/40"));
  // Killed: it is silent, which is no end.
  for (int i = 1; i < 10; ++i) EXPECT_EQ(follower.poll(now + 5), "");
  EXPECT_THAT(follower.poll(now + 90), HasSubstr("  no sign of life since "));
  EXPECT_FALSE(follower.ended());
  fs::remove(dir_ / "run/metrics.jsonl");
  steps("run", 0, 25);
  s.started = now + 100;
  s.before = s.done = 25;
  status("run", s);
  const std::string text = follower.poll(now);
  EXPECT_THAT(text, StartsWith(path("run") + "  train        running"));
  EXPECT_THAT(text, EndsWith("save 0.0 %)\n"));
  EXPECT_THAT(text, HasSubstr("\nstep     26/40"));
  EXPECT_THAT(text, Not(HasSubstr("step     25/40")));
}

TEST_F(Follow, OfSeveralJobsEachLineSaysOfWhich) {
  JobStatus s = training();
  status("runs/a", s);
  steps("runs/a", 0, 0);
  s.command = "generate";
  s.noun = "clip";
  s.done = 3;
  status("runs/b", s);
  s.state = "failed";
  s.code = 3;
  s.error = "no prompt";
  status("runs/c", s);
  Follower follower = of("runs");
  std::string text = follower.poll(now);
  EXPECT_THAT(text, HasSubstr(path("runs/a") + "  train "));
  EXPECT_THAT(text, HasSubstr(path("runs/a") + "  step      1/40"));
  EXPECT_THAT(text, HasSubstr(path("runs/b") + "  generate     running  3 of 40 clips"));
  EXPECT_THAT(text, HasSubstr("failed (exit code 3)  3 of 40 clips  0 s ago, no prompt"));
  EXPECT_EQ(follower.poll(now), "");
  s = training();
  s.command = "generate";
  s.noun = "clip";
  s.done = 4;
  s.warnings = {"one", "two"};
  status("runs/b", s);
  text = follower.poll(now);
  EXPECT_THAT(text, StartsWith(path("runs/b") + "  WARN: one\n" + path("runs/b") + "  WARN: two\n" +
                               path("runs/b") + "  generate     running  4 of 40 clips"));
  // The list of a status holds the newest warnings alone.
  s.warnings = {"two", "three"};
  s.state = "finished";
  status("runs/b", s);
  text = follower.poll(now);
  EXPECT_THAT(text, HasSubstr("WARN: three\n"));
  EXPECT_THAT(text, Not(HasSubstr("WARN: two")));
  EXPECT_FALSE(follower.ended()) << "a runs on";
}

TEST_F(Follow, AJobWhoseFolderIsGone) {
  JobStatus s = training();
  for (const char* run : {"runs/a", "runs/b"}) status(run, s);
  Follower follower = of("runs");
  follower.poll(now);
  fs::remove_all(dir_ / "runs/a");
  EXPECT_EQ(follower.poll(now), path("runs/a") + "  was removed; no longer followed\n");
  EXPECT_FALSE(follower.ended()) << "b runs on";
  s.state = "finished";
  status("runs/b", s);
  follower.poll(now);
  EXPECT_TRUE(follower.ended());
  EXPECT_TRUE(follower.failed()) << "nobody knows how a has ended";
  Follower last = of("runs/b");
  last.poll(now);
  EXPECT_FALSE(last.failed());
  fs::remove_all(dir_ / "runs/b");
  EXPECT_THAT(last.poll(now), HasSubstr("was removed"));
  EXPECT_TRUE(last.ended());
  EXPECT_FALSE(last.failed()) << "it had finished before";
  // The file that a job writes comes after its status.
  status("x", training());
  fs::rename(dir_ / "x/status.json", dir_ / "latents.h5.status.json");
  Follower file = of("latents.h5");
  EXPECT_THAT(file.poll(now), HasSubstr("running"));
  EXPECT_EQ(file.poll(now), "");
}

TEST_F(Follow, PathsOfOneJobAreOneJob) {
  JobStatus s = training();
  s.state = "failed";
  status("run", s);
  Follower follower({dir_ / "run", dir_ / "run/", dir_ / "./run"});
  const std::string text = follower.poll(now);
  EXPECT_EQ(std::ranges::count(text, '\n'), 1);
  EXPECT_THAT(text, StartsWith(path("run") + "  train "));
  EXPECT_TRUE(follower.failed());
}

TEST_F(Follow, EndsOnceEachPathHasHadAJob) {
  JobStatus s = training();
  s.state = "finished";
  status("a", s);
  Follower follower({dir_ / "a", dir_ / "b"});
  follower.poll(now);
  EXPECT_FALSE(follower.ended()) << "b has not begun";
  EXPECT_THAT(follower.waiting(), ElementsAre(dir_ / "b"));
  status("b", s);
  for (int poll = 0; poll < 10; ++poll) follower.poll(now);  // one of them searches
  EXPECT_TRUE(follower.ended());
}

TEST_F(Follow, LinesThatAreAddedToAFile) {
  FileTail lines(dir_ / "file");
  EXPECT_THAT(lines.take(), IsEmpty());
  append("file", "a\nb");
  EXPECT_THAT(lines.take(), ElementsAre("a"))
      << "a file that comes later is new from its beginning";
  append("file", "c\n\nd\n");
  EXPECT_THAT(lines.take(), ElementsAre("bc", "", "d"));
  write("file", "x\n");
  EXPECT_THAT(lines.take(), ElementsAre("x")) << "it has become shorter";
  // Of a long one the end, from the first whole line on.
  write("long", std::string(300 << 10, 'x') + "\nlast\n");
  EXPECT_THAT(FileTail(dir_ / "long").take(), ElementsAre("last"));
}

}  // namespace
}  // namespace weft
