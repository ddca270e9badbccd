// The list engine with a toy job, which also shows how a job is written: order and claims, batches,
// stop, restart, failed items.
#include "jobs/engine/list_job.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "core/hash.h"
#include "core/json.h"
#include "core/progress.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

// ---- A job: item i becomes a file that holds i squared ----
class Squares : public ListJob {
 public:
  explicit Squares(ListEngine& engine) : engine_(engine) {}

  void make(const ItemBatch& items) override {
    for (const std::int64_t i : items) {
      order.push_back(i);
      if (before) before(i);
      try {
        WEFT_CHECK(i != bad, Exit::data, "take another number", "{} is no good", i);
        const std::string file = engine_.items()[i].name + ".txt";
        std::ofstream(engine_.settings().directory / file) << i * i;
        nlohmann::ordered_json line = engine_.line_of(i);
        add_file(line, engine_.settings().directory, file);
        line["square"] = i * i;  // what else the job wants to say
        engine_.finished(line);
      } catch (const Error& e) {
        nlohmann::ordered_json line;
        if (says_of_bad) line = engine_.line_of(i), line["square"] = -1;
        engine_.failed(i, e, line);
      }
    }
  }

  bool says_of_bad = false;                  // leaves a line of an item that fails
  std::int64_t bad = -1;                     // an item that fails
  std::function<void(std::int64_t)> before;  // what a test does in the middle of a job
  std::vector<std::int64_t> order;           // of this rank's items

 private:
  ListEngine& engine_;
};

constexpr std::int64_t job_breaks_at = 2;

std::vector<ListItem> squares(std::int64_t count, const std::string& key) {
  std::vector<ListItem> items;
  for (std::int64_t i = 0; i < count; ++i)
    items.push_back({fmt::format("square{}", i), key, static_cast<double>(i % 7)});
  return items;
}

// What a command's main function does; the exit code.
int make_squares(const ListSettings& settings, const std::vector<ListItem>& items,
                 const std::function<void(Squares&)>& prepare, std::size_t batch = 1,
                 std::vector<std::int64_t>* order = nullptr) {
  ListEngine engine(settings, items, MPI_COMM_WORLD);
  ListEnd last;
  if (!engine.missing().empty()) {
    Squares job(engine);
    prepare(job);
    std::vector<ItemBatch> batches;
    for (const std::int64_t i : engine.missing()) {
      if (batches.empty() || batches.back().size() == batch) batches.emplace_back();
      batches.back().push_back(i);
    }
    engine.run(job, batches);
    last.share["squares_made"] = job.order.size();
    if (order != nullptr) *order = job.order;
  }
  return engine.end(last);
}
// ---- Its tests ----

class ListJobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    long pid = getpid();
    MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    settings_.directory = fs::temp_directory_path() / fmt::format("weft_list_job_{}", pid);
    settings_.command = "count";
    settings_.stem = "squares";
    settings_.report = "squares_report.json";
    settings_.item_name = "square";
    settings_.key = "the test's folder";
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) fs::remove_all(settings_.directory);
    MPI_Barrier(MPI_COMM_WORLD);
  }

  int run(
      std::int64_t count, const std::function<void(Squares&)>& prepare = [](Squares&) {},
      const std::string& key = "k", std::size_t batch = 1) {
    const int code = make_squares(settings_, squares(count, key), prepare, batch, &order_);
    MPI_Barrier(MPI_COMM_WORLD);  // the others may look at the files
    return code;
  }
  nlohmann::json report() const {
    std::ifstream in(settings_.directory / settings_.report);
    return nlohmann::json::parse(in);
  }
  JobStatus status() const {
    const auto s = read_status(settings_.directory / "status.json");
    EXPECT_TRUE(s);
    return s.value_or(JobStatus());
  }
  // How often each item was begun, by all ranks.
  std::vector<int> begun(std::int64_t count) const {
    std::vector<int> times(count, 0);
    for (const std::int64_t i : order_) ++times.at(static_cast<std::size_t>(i));
    MPI_Allreduce(MPI_IN_PLACE, times.data(), static_cast<int>(count), MPI_INT, MPI_SUM,
                  MPI_COMM_WORLD);
    return times;
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(settings_.directory))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  int rank_ = 0, ranks_ = 1;
  ListSettings settings_;
  std::vector<std::int64_t> order_;
};

TEST_F(ListJobTest, MakesEachItemOnceCostliestFirst) {
  EXPECT_EQ(run(200), 0);
  EXPECT_EQ(begun(200), std::vector<int>(200, 1));
  for (std::size_t i = 1; i < order_.size(); ++i) EXPECT_GE(order_[i - 1] % 7, order_[i] % 7) << i;
  EXPECT_EQ(report().at("made"), 200);
  EXPECT_EQ(report().at("ranks").size(), static_cast<std::size_t>(ranks_));
  const ManifestLines lines = Manifest::gathered(settings_.directory, settings_.stem);
  EXPECT_EQ(lines.size(), 200u);
  EXPECT_EQ(lines.at("square12").parsed().at("square"), 144);
  EXPECT_EQ(status().state, "finished");
  EXPECT_EQ(status().command, "count");
  EXPECT_EQ(status().done, 200);
  EXPECT_EQ(status().ranks, ranks_);
  EXPECT_FALSE(fs::exists(settings_.directory / ".ranks"));
}

TEST_F(ListJobTest, BatchesOfTinyItems) {
  constexpr std::int64_t count = 3000;
  EXPECT_EQ(run(
                count, [](Squares&) {}, "k", 10),
            0);
  EXPECT_EQ(begun(count), std::vector<int>(count, 1));
  std::int64_t batches = 0;
  const nlohmann::json said = report();
  for (const auto& rank : said.at("ranks"))
    for (const auto& [size, times] : rank.at("batches").items()) {
      EXPECT_EQ(size, "10");
      batches += times.get<std::int64_t>();
    }
  EXPECT_EQ(batches, count / 10);
}

TEST_F(ListJobTest, OneRankThatIsAskedStopsAll) {
  constexpr std::int64_t count = 100000;  // far more than are made before all have heard
  const auto ask = [&](Squares& job) {
    job.before = [&](std::int64_t) {
      // The file is rank 0's business; the others hear from it.
      if (rank_ == 0) std::ofstream(settings_.directory / "stop");
    };
  };
  EXPECT_EQ(run(count, ask), static_cast<int>(Exit::stopped));
  EXPECT_LT(report().at("made").get<std::int64_t>(), count);
  EXPECT_TRUE(fs::exists(settings_.directory / "stopped"));
  EXPECT_EQ(status().state, "stopped");
  EXPECT_EQ(status().done, report().at("made"));
  EXPECT_EQ(status().total, count);
  // Going on makes the rest, and no item twice.
  const std::vector<int> first = begun(count);
  EXPECT_EQ(std::count(first.begin(), first.end(), 1), report().at("made"));
  EXPECT_EQ(*std::max_element(first.begin(), first.end()), 1);
}

TEST_F(ListJobTest, OnlyItsOwnFilesAreRemoved) {
  const std::vector<std::string> others = {"squares.rank.jsonl",       "squares.rankings.txt",
                                           "squares.rank1x.jsonl",     ".notes.partial",
                                           ".square0.txt.partial.txt", ".square9.txt.partial"};
  if (rank_ == 0) {
    fs::create_directories(settings_.directory);
    for (const std::string& name : others) std::ofstream(settings_.directory / name) << "mine";
    std::ofstream(settings_.directory / ".square1.txt.partial") << "of a killed job";
    std::ofstream(settings_.directory / ".square2_watermark.txt.partial") << "another";
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(run(3), 0);
  for (const std::string& name : others)
    EXPECT_TRUE(fs::exists(settings_.directory / name)) << name;
  EXPECT_FALSE(fs::exists(settings_.directory / ".square1.txt.partial"));
  EXPECT_FALSE(fs::exists(settings_.directory / ".square2_watermark.txt.partial"));
  EXPECT_FALSE(fs::exists(settings_.directory / ".lock"));
}

TEST_F(ListJobTest, AFolderHasOneJob) {
  if (rank_ == 0) {
    const auto first = lock_output(settings_.directory, settings_.key);
    try {
      ListEngine engine(settings_, squares(1, "k"), MPI_COMM_SELF);
      ADD_FAILURE() << "taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      EXPECT_THAT(e.what(), testing::HasSubstr("is in use by another job: host "));
      EXPECT_THAT(e.hint(), testing::HasSubstr(settings_.key));
    }
    EXPECT_FALSE(fs::exists(settings_.directory / ".ranks"));
  }
  EXPECT_EQ(run(3), 0) << "the lock went with its owner";
}

// A full disk is no fault of the item at hand, although its code is that of one.
TEST_F(ListJobTest, AnErrorOfTheJobEndsIt) {
  if (rank_ != 0) return;
  ListEngine engine(settings_, squares(3, "k"), MPI_COMM_SELF);
  Squares job(engine);
  job.before = [](std::int64_t) {
    throw Error(Exit::data, "the disk is full", "free some").for_job();
  };
  try {
    engine.run(job, engine.one_by_one());
    ADD_FAILURE() << "went on";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_STREQ(e.what(), "the disk is full");
  }
  EXPECT_EQ(job.order.size(), 1);
}

TEST_F(ListJobTest, ARestartMakesWhatIsMissingChangedOrDamaged) {
  EXPECT_EQ(run(12), 0);
  EXPECT_EQ(run(12), 0);
  EXPECT_EQ(begun(12), std::vector<int>(12, 1)) << "the second start has nothing to do";
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) {
    fs::remove(settings_.directory / "square3.txt");
    std::ofstream(settings_.directory / "square5.txt") << "26";  // a flipped bit
    std::ofstream(settings_.directory / "squares.rank0.jsonl") << R"({"name":"square7","fi)";
    std::ofstream(settings_.directory / ".square7.partial") << "x";
  }
  MPI_Barrier(MPI_COMM_WORLD);
  order_.clear();
  EXPECT_EQ(run(13), 0);
  std::vector<int> expected(13, 0);
  expected[3] = expected[5] = expected[12] = 1;
  EXPECT_EQ(begun(13), expected);
  EXPECT_EQ(report().at("finished_before"), 10);
  EXPECT_FALSE(fs::exists(settings_.directory / ".square7.partial"));
  order_.clear();
  settings_.replace = true;
  EXPECT_EQ(run(
                13, [](Squares&) {}, "another key"),
            0);
  EXPECT_EQ(begun(13), std::vector<int>(13, 1));
}

TEST_F(ListJobTest, ResultsOfAnotherRequestAreReplacedOnRequestAlone) {
  const auto said = [&](std::int64_t count, const std::string& key) -> std::string {
    try {
      run(
          count, [](Squares&) {}, key);
      return "";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      EXPECT_THAT(e.hint(), ::testing::HasSubstr("--replace"));
      return e.what();
    }
  };
  if (ranks_ > 1) return;  // one rank throws, which ends the others
  EXPECT_EQ(run(4), 0);
  EXPECT_EQ(run(2), 0) << "a shorter list";
  EXPECT_EQ(run(5), 0) << "a longer one";
  EXPECT_EQ(order_.size(), 1);
  EXPECT_THAT(said(2, "other"),
              ::testing::HasSubstr("holds 2 finished results of another request"));
  EXPECT_THAT(said(4, "other"), ::testing::HasSubstr("square0, square1, square2, ..."));
  order_.clear();
  EXPECT_EQ(run(5), 0);
  EXPECT_EQ(order_.size(), 0) << "nothing was touched";
  // What is not there any more cannot be replaced.
  fs::remove(settings_.directory / "square0.txt");
  EXPECT_THAT(said(2, "other"), ::testing::HasSubstr("holds 1 finished result of"));
  settings_.replace = true;
  EXPECT_EQ(said(2, "other"), "");
  settings_.replace = false;
  EXPECT_EQ(said(2, "other"), "") << "the same request goes on";
}

TEST_F(ListJobTest, AFailedItemIsNamedAndTheOthersAreMade) {
  EXPECT_EQ(run(20, [](Squares& job) { job.bad = 6; }), static_cast<int>(Exit::data));
  EXPECT_EQ(begun(20), std::vector<int>(20, 1));
  EXPECT_EQ(report().at("made"), 19);
  EXPECT_THAT(report().at("failures").get<std::vector<std::string>>(),
              ElementsAre("square6: 6 is no good"));
  EXPECT_EQ(status().state, "failed");
  EXPECT_EQ(status().error, "1 of 20 squares failed");
  EXPECT_EQ(status().done, 19);
  MPI_Barrier(MPI_COMM_WORLD);
  order_.clear();
  EXPECT_EQ(run(20), 0);
  std::vector<int> expected(20, 0);
  expected[6] = 1;
  EXPECT_EQ(begun(20), expected);
}

TEST_F(ListJobTest, AFailedItemMayLeaveALineAndTheJobFinish) {
  const auto run_all = [&](bool good) {
    ListEngine engine(settings_, squares(20, "k"), MPI_COMM_WORLD);
    Squares job(engine);
    job.bad = good ? -1 : 6;
    job.says_of_bad = true;
    engine.run(job, engine.one_by_one());
    ListEnd last;
    last.finish_with_failures = true;
    last.finish = [&](const ListReport& report) {
      EXPECT_EQ(report.failures.size(), good ? 0u : 1u);
      std::ofstream(settings_.directory / "all")
          << dump_json(engine.lines().at("square6").parsed());
    };
    const int code = engine.end(last);
    EXPECT_EQ(code, good ? 0 : static_cast<int>(Exit::data));
    EXPECT_EQ(engine.missing().size(), fs::exists(settings_.directory / "again") ? 1u : 20u);
    MPI_Barrier(MPI_COMM_WORLD);
    std::ifstream in(settings_.directory / "all");
    return nlohmann::json::parse(in);
  };
  const nlohmann::json first = run_all(false);
  EXPECT_EQ(first.at("square"), -1);
  EXPECT_EQ(first.at("fault"), "6 is no good");
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) std::ofstream(settings_.directory / "again");
  MPI_Barrier(MPI_COMM_WORLD);
  // The line of a fault counts for no result: the item is made.
  const nlohmann::json second = run_all(true);
  EXPECT_EQ(second.at("square"), 36);
  EXPECT_FALSE(second.contains("fault"));
}

// One bad file must not keep a job that was stopped from being queued again.
TEST_F(ListJobTest, AStopComesBeforeFailures) {
  const auto ask = [&](Squares& job) {
    job.bad = 6;  // the first that is taken
    job.before = [&](std::int64_t) {
      if (rank_ == 0) std::ofstream(settings_.directory / "stop");
    };
  };
  EXPECT_EQ(run(100000, ask), static_cast<int>(Exit::stopped));
  EXPECT_EQ(report().at("failures").size(), 1u);
}

// What a rank leaves that is killed with `names` in hand, and one that ends in an orderly way.
void leave_part(const ListSettings& settings, const std::vector<std::string>& names, bool orderly) {
  fs::create_directories(settings.directory);
  std::ofstream part(settings.directory / (settings.stem + ".rank7.jsonl"));
  const auto line = [&](const nlohmann::ordered_json& j) {
    part << seal_json(dump_json(j)) << "\n";
  };
  for (const std::string& name : names) line({{"begun", name}, {"key", "k"}});
  if (orderly) line({{"ended", true}});
}

TEST_F(ListJobTest, AnItemThatTwoRanksDiedWithIsGivenUp) {
  const auto die = [&](bool orderly) {
    if (rank_ == 0) leave_part(settings_, {"square4"}, orderly);
    MPI_Barrier(MPI_COMM_WORLD);
  };
  const auto fail_at_4 = [&](Squares& job) { job.bad = 4; };
  // Ranks that were asked to end, or ended by an error, have not died of their items.
  for (int i = 0; i < 3; ++i) {
    die(true);
    EXPECT_EQ(run(6, fail_at_4), static_cast<int>(Exit::data));
  }
  die(false);
  EXPECT_EQ(run(6, fail_at_4), static_cast<int>(Exit::data)) << "once may be chance";
  EXPECT_EQ(begun(6)[4], 1);
  die(false);
  order_.clear();
  EXPECT_EQ(run(6), static_cast<int>(Exit::data));
  EXPECT_EQ(begun(6), std::vector<int>(6, 0));
  EXPECT_THAT(report().at("failures").get<std::vector<std::string>>(),
              ElementsAre(testing::StartsWith("square4: gave up after 2 ranks died")));
  EXPECT_EQ(status().error, "1 of 6 squares failed");
  // With another key it is another item.
  settings_.replace = true;
  EXPECT_EQ(run(
                6, [](Squares&) {}, "another"),
            0);
  EXPECT_EQ(begun(6), std::vector<int>(6, 1));
}

// Where the gathered lines find no room, the parts that tell of a death stay as they are.
TEST_F(ListJobTest, AFullDiskLosesNoDeaths) {
  if (rank_ != 0) return;
  leave_part(settings_, {"square4"}, false);
  std::ofstream(settings_.directory / "squares.rank1.jsonl") << [] {
    std::string lines;
    for (int i = 10; i < 90; ++i)
      lines += seal_json(dump_json(nlohmann::ordered_json{
                   {"name", fmt::format("square{}", i)}, {"key", "k"}, {"rank", 1}})) +
               "\n";
    return lines;
  }();
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{2000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_THROW(Manifest::gather(settings_.directory, settings_.stem), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  const ManifestLines lines = Manifest::gather(settings_.directory, settings_.stem);
  EXPECT_EQ(lines.size(), 81u);
  EXPECT_EQ(lines.at("square4").died, 1);
}

// A job that reports an item only with flush(), as those that read ahead do: a suspect must be in
// hand alone, and no other rank has one at the same time.
TEST_F(ListJobTest, SuspectsAreMadeAlone) {
  class Late : public Squares {
   public:
    using Squares::Squares;
    void make(const ItemBatch& items) override {
      held_.push_back(items.front());
      most = std::max(most, suspect(items.front()) ? held_.size() : 0);
    }
    void flush() override {
      for (const std::int64_t i : held_) Squares::make({i});
      if (std::ranges::any_of(held_, suspect)) most = std::max(most, held_.size());
      held_.clear();
    }
    static bool suspect(std::int64_t item) { return item == 1 || item == 4; }
    std::size_t most = 0;  // items in hand with a suspect

   private:
    std::vector<std::int64_t> held_;
  };
  if (rank_ == 0) leave_part(settings_, {"square1", "square4"}, false);
  MPI_Barrier(MPI_COMM_WORLD);
  ListEngine engine(settings_, squares(20, "k"), MPI_COMM_WORLD);
  Late job(engine);
  engine.run(job, {{0}, {1}, {4}});
  EXPECT_LE(job.most, 1u);
  int makers = job.most > 0 ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &makers, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(makers, 1);
  std::vector<ItemBatch> others = engine.one_by_one();
  std::erase_if(others, [](const ItemBatch& b) { return b[0] == 0 || Late::suspect(b[0]); });
  engine.run(job, others);
  EXPECT_EQ(engine.end({}), 0);
}

TEST_F(ListJobTest, SuspectsLeaveTheirBatches) {
  if (rank_ == 0) leave_part(settings_, {"square1", "square4"}, false);
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(run(
                6, [](Squares&) {}, "k", 3),
            0);
  EXPECT_EQ(begun(6), std::vector<int>(6, 1));
  std::map<std::string, std::int64_t> batches;
  const nlohmann::json said = report();
  for (const auto& rank : said.at("ranks"))
    for (const auto& [size, times] : rank.at("batches").items())
      batches[size] += times.get<std::int64_t>();
  EXPECT_EQ(batches, (std::map<std::string, std::int64_t>{{"1", 2}, {"2", 2}}));
}

TEST_F(ListJobTest, BatchesMayComeInRounds) {
  ListEngine engine(settings_, squares(10, "k"), MPI_COMM_WORLD);
  Squares job(engine);
  const auto all = engine.one_by_one();
  engine.run(job, {all.begin(), all.begin() + 7});
  const auto made = [&] {
    std::int64_t n = std::ssize(job.order);
    MPI_Allreduce(MPI_IN_PLACE, &n, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    return n;
  };
  EXPECT_EQ(made(), 7);
  engine.run(job, {all.begin() + 7, all.end()});
  EXPECT_EQ(made(), 10);
  EXPECT_EQ(engine.end({}), 0);
}

// Each rank has a job of its own here: one that throws does not wait for others.
TEST_F(ListJobTest, AnErrorOfTheJobIsNoItemsFailure) {
  settings_.directory /= fmt::format("rank{}", rank_);
  ListEngine engine(settings_, squares(5, "k"), MPI_COMM_SELF);
  Squares job(engine);
  job.before = [](std::int64_t i) {
    WEFT_CHECK(i != job_breaks_at, Exit::hardware, "", "the device is gone");
  };
  EXPECT_THROW(engine.run(job, engine.one_by_one()), Error);
  EXPECT_EQ(job.order.back(), job_breaks_at);
  settings_.directory = settings_.directory.parent_path();
}

}  // namespace
}  // namespace weft
