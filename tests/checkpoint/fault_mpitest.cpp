// Saves that fail or are cut off: the run goes on, what was good stays good, nothing is left over.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <mutex>

#include "fixture.h"

namespace weft {
namespace {

using Names = std::vector<std::string>;

// Every site of a save in order; an error is raised or a snapshot taken there.
const char* const sites[] = {"block",  "shard",  "manifest", "synced", "renamed",
                             "verify", "marked", "linked",   "latest", "deleting"};

// What the hooks need to know; they are plain functions.
std::string failing_site;
fs::path snapshot_source, snapshot_target;
int snapshots = 0;
std::vector<std::string> snapshot_sites;

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit tight{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &tight);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

// What is written to stderr, through a pipe: a file would obey the limit on file sizes too.
class Stderr {
 public:
  Stderr() {
    if (pipe(pipe_) != 0) return;
    before_ = dup(STDERR_FILENO);
    dup2(pipe_[1], STDERR_FILENO);
  }
  std::string stop() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(pipe_[1]);
    std::string text;
    for (char c = 0; read(pipe_[0], &c, 1) == 1;) text += c;
    close(pipe_[0]);
    return text;
  }

 private:
  int pipe_[2] = {-1, -1}, before_ = -1;
};

class CheckpointFault : public CheckpointTest {
 protected:
  bool save(CheckpointWriter& writer, std::int64_t step) {
    State s;
    fill(s, step);
    writer.save(info(step), s.arrays());
    return writer.wait();
  }
  // Saves with a limit on file sizes, on the last rank alone or on all.
  bool save_limited(CheckpointWriter& writer, std::int64_t step, rlim_t bytes, bool all) {
    const FileSizeLimit limit(all || rank == ranks - 1 ? bytes : RLIM_INFINITY);
    return save(writer, step);
  }
};

TEST_F(CheckpointFault, FullDiskIsOneErrorAndTheRunGoesOn) {
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  EXPECT_TRUE(save(writer, 10));
  for (const bool all : {false, true}) {
    SCOPED_TRACE(all);
    // Nothing at all, the middle of a shard.
    for (const rlim_t bytes : {rlim_t{0}, rlim_t{65536}}) {
      Stderr capture;
      EXPECT_FALSE(save_limited(writer, 20, bytes, all));
      EXPECT_TRUE(save(writer, 10)) << "the next save counts failures from zero again";
      const std::string log = capture.stop();
      if (rank == 0) {
        EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
        for (const char* part : {"ERROR: checkpoint ", "step_20 (800024 bytes)", "cannot write",
                                 "File too large", "failure 1 of"})
          EXPECT_NE(log.find(part), std::string::npos) << part << " in " << log;
      }
    }
  }
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "lock", "step_10"})); });
  EXPECT_EQ(newest(), 10);
}

TEST_F(CheckpointFault, ThreeFailuresInARowEndTheJobAtTheNextSave) {
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  EXPECT_TRUE(save(writer, 10));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(save_limited(writer, 20 + i, 4096, false));
  try {
    save(writer, 30);
    ADD_FAILURE() << "a fourth save after three failures";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::checkpoint);
    EXPECT_NE(std::string(e.what()).find("3 saves in a row"), std::string::npos) << e.what();
    EXPECT_FALSE(e.hint().empty());
  }
  EXPECT_EQ(newest(), 10);
}

TEST_F(CheckpointFault, StartFailsWhereNothingCanBeWritten) {
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  bool refused = false;
  {
    const FileSizeLimit limit(rank == ranks - 1 ? 0 : RLIM_INFINITY);
    try {
      CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    } catch (const Error& e) {
      refused = e.code() == Exit::checkpoint;
    }
  }
  EXPECT_TRUE(refused) << "on every rank, whichever cannot write";
  std::signal(SIGXFSZ, before);
}

TEST_F(CheckpointFault, AnErrorAtAnySiteLeavesAGoodCheckpoint) {
  for (const char* site : sites) {
    SCOPED_TRACE(site);
    on_root([&] { fs::remove_all(run); });
    {
      CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
      EXPECT_TRUE(save(writer, 10));
      EXPECT_TRUE(save(writer, 20));
      failing_site = site;
      checkpoint::at_site = [](const char* at) {
        if (at == failing_site) throw Error(Exit::checkpoint, "storage says no");
      };
      // Deleting comes after the save is safe: it must not fail it.
      EXPECT_EQ(save(writer, 30), failing_site == "deleting");
      checkpoint::at_site = nullptr;
      const std::int64_t step = newest();
      EXPECT_TRUE(step == 20 || step == 30) << step;
      EXPECT_TRUE(save(writer, 40));
      EXPECT_EQ(newest(), 40);
    }
    on_root([&] {
      for (const std::string& name : names())
        EXPECT_FALSE(name.ends_with(".tmp") && name != "step_10.tmp") << name;
    });
  }
}

TEST_F(CheckpointFault, AnErrorWhileReplacingAStepKeepsTheOldOne) {
  for (const char* site : sites) {
    if (std::string_view(site) == "deleting") continue;
    SCOPED_TRACE(site);
    on_root([&] { fs::remove_all(run); });
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    EXPECT_TRUE(save(writer, 10));
    failing_site = site;
    checkpoint::at_site = [](const char* at) {
      if (at == failing_site) throw Error(Exit::checkpoint, "storage says no");
    };
    EXPECT_FALSE(save(writer, 10));
    checkpoint::at_site = nullptr;
    EXPECT_EQ(newest(), 10);
  }
}

TEST_F(CheckpointFault, ACopyOfTheDirectoryAtAnyInstantRestarts) {
  // What a kill at a site would leave on the disk is what a copy at that site shows.
  std::error_code ec;
  snapshots = 0;
  snapshot_sites.clear();
  snapshot_source = run;
  snapshot_target = base / "snapshots";
  on_root([&] { fs::create_directories(snapshot_target); });
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    EXPECT_TRUE(save(writer, 10));
    EXPECT_TRUE(save(writer, 20));
    if (rank == 0)
      checkpoint::at_site = [](const char* at) {
        std::error_code ignored;  // files of other ranks may vanish under the copy
        fs::copy(snapshot_source, snapshot_target / std::to_string(snapshots++),
                 fs::copy_options::recursive | fs::copy_options::copy_symlinks, ignored);
        snapshot_sites.push_back(at);
      };
    EXPECT_TRUE(save(writer, 30));
    EXPECT_TRUE(save(writer, 30)) << "the same step again: the exchange";
    checkpoint::at_site = nullptr;
  }
  int count = snapshots;
  MPI_Bcast(&count, 1, MPI_INT, 0, MPI_COMM_WORLD);
  EXPECT_GE(count, 18);
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE(rank == 0 ? snapshot_sites[std::size_t(i)] : "");
    run = snapshot_target / std::to_string(i);
    const std::int64_t step = newest();
    EXPECT_TRUE(step == 20 || step == 30) << step;
    {
      CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
      EXPECT_EQ(newest(), step) << "clearing up does not lose it";
      EXPECT_TRUE(save(writer, 40));
    }
    EXPECT_EQ(newest(), 40);
    on_root([&] {
      for (const std::string& name : names()) EXPECT_FALSE(name.ends_with(".tmp")) << name;
    });
  }
}

TEST_F(CheckpointFault, StorageThatChangesDataIsFoundBeforeTheOlderOneGoes) {
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  EXPECT_TRUE(save(writer, 10));
  EXPECT_TRUE(save(writer, 20));
  snapshot_source = run;
  if (rank == 0)
    checkpoint::at_site = [](const char* at) {
      if (std::string_view(at) == "verify")
        flip_bit(snapshot_source / "step_30" / "shard_0000.bin", 12345);
    };
  Stderr capture;
  EXPECT_FALSE(save(writer, 30));
  checkpoint::at_site = nullptr;
  const std::string log = capture.stop();
  if (rank == 0) {
    EXPECT_NE(log.find("read back is not what the model held"), std::string::npos) << log;
  }
  on_root([&] { EXPECT_EQ(names(), (Names{"latest", "lock", "step_10", "step_20"})); });
  EXPECT_EQ(newest(), 20);
}

TEST_F(CheckpointFault, RemainsAreClearedAndOtherFilesLeftAlone) {
  on_root([&] {
    fs::create_directories(run / "step_30.tmp");
    std::ofstream(run / "step_30.tmp" / "shard_0000.bin") << "half";
    fs::create_symlink("step_30", run / "latest.tmp");
    std::ofstream(run / "metrics.jsonl") << "{}\n";
    fs::create_directories(run / "my_step_3.tmp");
  });
  EXPECT_EQ(newest(), -1) << "a save that never finished is none";
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  on_root([&] { EXPECT_EQ(names(), (Names{"lock", "metrics.jsonl", "my_step_3.tmp"})); });
}

}  // namespace
}  // namespace weft
