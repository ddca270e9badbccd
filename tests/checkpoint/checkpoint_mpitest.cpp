// Saving and restarting as it should go: round trips, other rank counts, keep, locks, memory.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "core/host.h"
#include "fixture.h"

namespace weft {
namespace {

using Names = std::vector<std::string>;

TEST_F(CheckpointTest, RoundTrip) {
  EXPECT_EQ(newest(), -1) << "a run directory that does not exist";
  save_steps({20});
  const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
  ASSERT_TRUE(c.has_value());
  expect_state(*c, 20);
  EXPECT_EQ(c->info().deck, info(20).deck);
  EXPECT_EQ(c->info().build, "weft test");
  EXPECT_EQ(c->info().notes.data, "squares=12");
  ASSERT_EQ(c->info().tensors.size(), 2u);
  EXPECT_EQ(c->info().tensors[1].name, "blocks.0.bias");
  EXPECT_EQ(c->info().tensors[1].offset, 100'000);
  EXPECT_EQ(c->info().tensors[0].shape, (std::vector<std::int64_t>{100, 1000}));
  EXPECT_EQ(c->arrays().at("average"), length);
  const std::string text = c->describe();
  for (const char* part : {"step   20", "blocks.0.weight", "shard_0000.bin", "dir = \"x\""})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  on_root([&] {
    EXPECT_EQ(names(), (Names{"latest", "step_20"})) << "no lock, probe or temporary stays";
    EXPECT_EQ(fs::read_symlink(run / "latest"), "step_20") << "relative, so that a run can move";
    EXPECT_EQ(refusal(run / "latest"), "");
  });
}

TEST_F(CheckpointTest, AnyRankCountReadsWhatItNeeds) {
  save_steps({5});
  const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
  ASSERT_TRUE(c.has_value());
  // Ranges as 1 to 7 ranks would take them, read one after another.
  for (std::int64_t parts = 1; parts <= 7; ++parts) {
    std::int64_t wrong = 0, count = 0;
    for (std::int64_t p = 0; p < parts; ++p) {
      const std::int64_t begin = length * p / parts, end = length * (p + 1) / parts;
      std::vector<float> piece(end - begin);
      c->read("average", begin, piece);
      for (const float v : piece) wrong += v != value(5, 1, count++);
    }
    EXPECT_EQ(wrong, 0) << parts;
    EXPECT_EQ(count, length);
  }
  std::vector<float> three(3);
  EXPECT_THROW(c->read("average", length - 2, three), Error);
  EXPECT_THROW(c->read("average", -1, three), Error);
  EXPECT_THROW(c->read("momentum", 0, three), Error);
}

TEST_F(CheckpointTest, FewElementsLeaveSomeRanksEmpty) {
  std::vector<float> one = {1.5f}, none;
  const std::vector<FlatArray> arrays = {flat("one", one), flat("none", none)};
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    writer.save(info(1), arrays);
    EXPECT_TRUE(writer.wait());
  }
  const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
  ASSERT_TRUE(c.has_value());
  float back = 0;
  c->read("one", 0, {&back, 1});
  EXPECT_EQ(back, 1.5f);
  c->read("none", 0, {});
}

TEST_F(CheckpointTest, ManyBlocksAShard) {
  // 36 MB an array: blocks that begin in one array and end in the next, and a short last one.
  std::vector<float> a(9'000'001), b(9'000'001);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = float(i % 10007);
    b[i] = -float(i % 10009);
  }
  const std::vector<FlatArray> arrays = {flat("a", a), flat("b", b)};
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    writer.save(info(1), arrays);
    EXPECT_TRUE(writer.wait());
  }
  const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
  ASSERT_TRUE(c.has_value());
  std::vector<float> back(a.size());
  c->read("a", 0, back);
  EXPECT_TRUE(back == a);
  c->read("b", 0, back);
  EXPECT_TRUE(back == b);
  on_root([&] {
    // A flip in the last block of the last shard, where an off-by-one would not look.
    std::vector<fs::path> shards;
    for (const auto& e : fs::directory_iterator(run / "step_1"))
      if (e.path().filename().string().starts_with("shard_")) shards.push_back(e.path());
    std::sort(shards.begin(), shards.end());
    flip_bit(shards.back(), fs::file_size(shards.back()) * 8 - 1);
    const std::string message = refusal(run / "step_1");
    EXPECT_NE(message.find("is damaged; it holds b "), std::string::npos) << message;
    EXPECT_TRUE(message.ends_with("..9000001")) << message;
  });
}

TEST_F(CheckpointTest, KeepsTheNewestAndDeletesTheRest) {
  save_steps({1, 2, 3, 4, 5}, 3);
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "step_3", "step_4", "step_5"})); });
  EXPECT_EQ(newest(), 5);
}

TEST_F(CheckpointTest, TheBestStaysUntilThereIsABetterOne) {
  save_steps({1, 2, 3, 4, 5}, 2, 2);
  on_root([&] {
    EXPECT_EQ(names(), (Names{"best", "latest", "step_2", "step_4", "step_5"}));
    EXPECT_EQ(fs::read_symlink(run / "best"), "step_2");
  });
  save_steps({6, 7, 8}, 2, 6);
  on_root([&] {
    EXPECT_EQ(names(), (Names{"best", "latest", "step_6", "step_7", "step_8"}));
    EXPECT_EQ(fs::read_symlink(run / "best"), "step_6");
  });
  EXPECT_EQ(newest(), 8);
}

TEST_F(CheckpointTest, UnverifiedOnesDoNotCountAsKept) {
  save_steps({1, 2});
  on_root([&] { fs::remove(run / "step_2" / "verified"); });
  save_steps({3});
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "step_1", "step_2", "step_3"})); });
}

TEST_F(CheckpointTest, LaterStepsOfAnAbandonedRunDoNotPushOutNewOnes) {
  save_steps({10, 20});
  on_root([&] { flip_bit(run / "step_20" / "shard_0000.bin", 77); });
  EXPECT_EQ(newest(), 10);
  save_steps({15});
  on_root([&] {
    EXPECT_EQ(names(), (Names{"latest", "step_10", "step_15", "step_20"}));
    EXPECT_EQ(fs::read_symlink(run / "latest"), "step_15");
  });
  // Having come to the same step again, the damaged one is replaced.
  save_steps({20});
  EXPECT_EQ(newest(), 20);
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "step_15", "step_20"})); });
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save_steps({7});
  save_steps({7, 7});
  EXPECT_EQ(newest(), 7);
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "step_7"})); });
}

TEST_F(CheckpointTest, OneSaveAtATimeAndEachSeesItsOwnCut) {
  // No save is written before the next is called for, and half a second more.
  static std::atomic<int> called, written;
  static std::atomic<bool> waited;
  called = written = 0;
  waited = false;
  checkpoint::at_site = [](const char* site) {
    if (std::string_view(site) != "shard") return;
    const int next = std::min(++written + 1, 3);
    for (int i = 0; i < 6000 && called < next; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    waited = waited || called < next;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  };
  const auto start = std::chrono::steady_clock::now();
  double stalled = 0;
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 4);
    State s;
    for (const std::int64_t step : {1, 2, 3}) {
      fill(s, step);
      ++called;
      stalled += writer.save(info(step), s.arrays());
      fill(s, 1000 + step);
    }
    EXPECT_TRUE(writer.wait());
  }
  EXPECT_FALSE(waited) << "the first save waits for nothing but the copy";
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1500));
  EXPECT_GE(stalled, 0.1) << "the waiting is reported: a second where the host does nothing else";
  checkpoint::at_site = nullptr;
  on_root([&] {
    for (const std::int64_t step : {1, 2, 3})
      expect_state(Checkpoint::open(run / checkpoint::step_name(step)), step);
  });
}

TEST_F(CheckpointTest, TrainingTalksWhileSavesAreInFlight) {
  // The writer's thread and the step loop use MPI at the same time, on communicators of their own.
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  State s;
  std::int64_t wrong = 0;
  for (std::int64_t step = 1; step <= 10; ++step) {
    fill(s, step);
    writer.save(info(step), s.arrays());
    for (int i = 0; i < 200; ++i) {
      double mine = rank + i, sum = 0;
      MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
      wrong += sum != ranks * i + ranks * (ranks - 1) / 2;
    }
  }
  EXPECT_TRUE(writer.wait());
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(newest(), 10);
}

TEST_F(CheckpointTest, DestructorWaitsForTheSaveInFlight) {
  State s;
  fill(s, 3);
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    writer.save(info(3), s.arrays());
  }
  EXPECT_EQ(newest(), 3);
}

TEST_F(CheckpointTest, RunDirectoryInUseIsRefused) {
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  std::string message;
  try {
    CheckpointWriter second(run, MPI_COMM_WORLD, 2);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::checkpoint);
    message = e.what();
  }
  EXPECT_NE(message.find("in use by another job: host "), std::string::npos) << message;
}

TEST_F(CheckpointTest, StaleLockIsTakenOver) {
  on_root([&] {
    fs::create_directories(run);
    std::ofstream(run / "lock") << "host elsewhere process 4711\n";
  });
  save_steps({1});
  EXPECT_EQ(newest(), 1);
}

TEST_F(CheckpointTest, DirectoryThatCannotBeWrittenIsRefusedAtOnce) {
  on_root([&] { std::ofstream(base / "file") << "x"; });
  try {
    CheckpointWriter writer(base / "file" / "run", MPI_COMM_WORLD, 2);
    FAIL() << "a directory below a file";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::checkpoint);
    EXPECT_NE(std::string(e.what()).find("cannot make the folder"), std::string::npos);
  }
}

TEST_F(CheckpointTest, FilesOfTheUsersAreNotReplaced) {
  for (const char* name : {"latest", "best", "step_2"}) {
    on_root([&] {
      fs::create_directories(run);
      std::ofstream(run / name) << "precious";
    });
    try {
      CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      EXPECT_NE(std::string(e.what()).find(std::string(name) + " is a file"), std::string::npos)
          << e.what();
    }
    on_root([&] {
      std::ifstream in(run / name);
      EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "precious");
      fs::remove(run / name);
    });
  }
}

TEST_F(CheckpointTest, FiftySavesDoNotGrow) {
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  // 8 MiB a rank, so that a leaked copy could not hide.
  std::vector<float> state(std::size_t(2) << 20 << (ranks / 2), 1.0f);
  const std::vector<FlatArray> arrays = {flat("state", state)};
  const auto files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  std::size_t before = 0;
  std::ptrdiff_t files_before = 0;
  for (int i = 0; i < 50; ++i) {
    state[0] = float(i);
    writer.save(info(i), arrays);
    if (i == 10) {
      ASSERT_TRUE(writer.wait());
      before = resident_bytes();
      files_before = files();
    }
  }
  ASSERT_TRUE(writer.wait());
  EXPECT_LT(resident_bytes(), before + before / 100);
  EXPECT_EQ(files(), files_before);
}

}  // namespace
}  // namespace weft
