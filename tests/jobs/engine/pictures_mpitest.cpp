// Items of several pictures through readers, network and writers: each once, faults by name, and
// what stays for the next start after a stop.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <utility>

#include "jobs/engine/pictures.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// Item i has i % 3 + 1 pictures; the item is made once all of them are finished.
class Counting : public PictureWork {
 public:
  explicit Counting(ListEngine& engine) : PictureWork(engine) {}
  std::unique_ptr<PictureUnit> next(std::int64_t item, std::int64_t number) override {
    if (number > item % 3) return nullptr;
    ++given;
    return std::make_unique<PictureUnit>();
  }
  FeedWork::Prepared read(PictureUnit& p) override {
    WEFT_CHECK(p.item != unreadable, Exit::data, "", "{} cannot be read", p.item);
    return {0, 0, true, 100};
  }
  void predict(std::span<PictureUnit* const> pictures) override {
    const PictureUnit& p = *pictures.front();
    WEFT_CHECK(p.item != too_large, Exit::data, "", "{} is too large", p.item);
    if (before) before();
  }
  void finish(PictureUnit& p) override {
    const std::lock_guard lock(mutex_);
    if (++finished_[p.item] == p.item % 3 + 1) engine_.finished(engine_.line_of(p.item));
  }
  void failed(PictureUnit& p, const Error& e) override {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(faulty_[p.item], true)) engine_.failed(p.item, e);
  }
  void done(PictureUnit&) override { ++done_with; }

  std::int64_t unreadable = -1, too_large = -1;
  std::function<void()> before;
  std::atomic<int> given = 0, done_with = 0;

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> finished_;
  std::map<std::int64_t, bool> faulty_;
};

class PictureJobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    long pid = getpid();
    MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    settings_ = list_settings(
        Deck(), "count", fs::temp_directory_path() / fmt::format("weft_pictures_{}", pid), "item");
    for (std::int64_t i = 0; i < 60; ++i) items_.push_back({fmt::format("item{}", i), "k", 1});
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) fs::remove_all(settings_.directory);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  static Deck small_deck() {
    Deck deck;
    deck.memory.arena_gib = 0.001;
    return deck;
  }
  int run(const std::function<void(Counting&)>& prepare) {
    ListEngine engine(settings_, items_, MPI_COMM_WORLD);
    Counting work(engine);
    prepare(work);
    ListEnd last;
    last.share = make_pictures(work, engine, small_deck(), {{}, 4}, engine.ahead_of_others());
    EXPECT_EQ(work.done_with, work.given);
    last.summarise = report_feed;
    const int code = engine.end(last);
    MPI_Barrier(MPI_COMM_WORLD);
    return code;
  }
  nlohmann::json report() const {
    std::ifstream in(settings_.directory / settings_.report);
    return nlohmann::json::parse(in);
  }

  int rank_ = 0;
  ListSettings settings_;
  std::vector<ListItem> items_;
};

TEST_F(PictureJobTest, MakesEachOnceAndNamesFaults) {
  EXPECT_EQ(run([](Counting& work) { work.unreadable = 7, work.too_large = 11; }),
            static_cast<int>(Exit::data));
  EXPECT_EQ(report().at("made"), 58);
  EXPECT_THAT(report().at("failures").get<std::vector<std::string>>(),
              testing::UnorderedElementsAre("item7: 7 cannot be read", "item11: 11 is too large"));
  EXPECT_GE(report().at("feed").at("frames"), 58 * 2 - 10);
  EXPECT_EQ(run([](Counting&) {}), 0);
  EXPECT_EQ(report().at("made"), 2);
}

// A stage may meet what is no picture's fault, such as a full disk.
TEST_F(PictureJobTest, AnErrorOfTheJobEndsIt) {
  settings_.directory /= fmt::format("rank{}", rank_);
  ListEngine engine(settings_, items_, MPI_COMM_SELF);
  class Full : public Counting {
   public:
    using Counting::Counting;
    void finish(PictureUnit&) override {
      throw Error(Exit::data, "the disk is full", "free some").for_job();
    }
  } work(engine);
  try {
    make_pictures(work, engine, small_deck(), {{}, 4}, 2);
    ADD_FAILURE() << "went on";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "the disk is full");
    EXPECT_FALSE(e.of_item());
  }
  settings_.directory = settings_.directory.parent_path();
}

TEST_F(PictureJobTest, AStopLeavesTheRest) {
  const auto ask = [&](Counting& work) {
    // Once: a second file, written when the job has taken the first, would stop the next run.
    work.before = [&, asked = false]() mutable {
      if (!std::exchange(asked, true)) {
        const fs::path told = settings_.directory / "told";
        if (rank_ == 0) std::ofstream(settings_.directory / "stop"), std::ofstream(told).flush();
        // The others have not made all by then, however late rank 0 comes to it.
        while (!fs::exists(told)) usleep(1000);
      }
      usleep(50000);
    };
  };
  EXPECT_EQ(run(ask), static_cast<int>(Exit::stopped));
  const std::int64_t first = report().at("made");
  EXPECT_LT(first, 60);
  EXPECT_EQ(run([](Counting&) {}), 0);
  EXPECT_EQ(report().at("made"), 60 - first);
}

}  // namespace
}  // namespace weft
