// A run directory and a state for the checkpoint tests, the same on every rank.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/parts.h"
#include "core/philox.h"

namespace weft {

namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    std::string name = testing::TempDir() + "weft_checkpoint_XXXXXX";
    if (rank == 0) {
      ASSERT_NE(mkdtemp(name.data()), nullptr);
    }
    MPI_Bcast(name.data(), static_cast<int>(name.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    base = name;
    run = base / "run";
  }
  void TearDown() override {
    checkpoint::at_site = nullptr;
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) fs::remove_all(base);
    MPI_Barrier(MPI_COMM_WORLD);
  }

  // Two arrays of a length that no rank count divides, one of them in uneven stretches; the values
  // tell step, array and place.
  static constexpr std::int64_t length = 100'003;
  static float value(std::int64_t step, int array, std::int64_t i) {
    return static_cast<float>((step * 7 + array * 3 + i) % 16'777'213);
  }
  struct State {
    std::vector<float> master = std::vector<float>(length), average = std::vector<float>(length);
    std::vector<FlatArray> arrays() {
      return {flat("master", master), flat("average", average, {5, 20, 50'000, 50'000, length})};
    }
  };
  // An array that every rank holds whole, and of it this rank's parts: what the ranks of `comm`
  // save.
  static FlatArray flat(const char* name, std::vector<float>& whole,
                        const std::vector<std::int64_t>& cuts = {},
                        MPI_Comm comm = MPI_COMM_WORLD) {
    int rank = 0, ranks = 1;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    FlatArray a{name, static_cast<std::int64_t>(whole.size()), cuts, {}, DeviceKind::cpu};
    std::int64_t begin = 0;
    for (const std::int64_t end : cuts.empty() ? std::vector{a.length} : cuts) {
      const Part p = part_of(begin, end, rank, ranks);
      a.parts.push_back({whole.data() + p.begin, static_cast<std::size_t>(p.size())});
      begin = end;
    }
    return a;
  }
  static void fill(State& s, std::int64_t step) {
    for (std::int64_t i = 0; i < length; ++i) {
      s.master[std::size_t(i)] = value(step, 0, i);
      s.average[std::size_t(i)] = value(step, 1, i);
    }
  }
  static CheckpointInfo info(std::int64_t step) {
    CheckpointInfo c;
    c.step = step;
    c.deck = "[run]\ndir = \"x\"\n";
    c.build = "weft test";
    c.tensors = {{"blocks.0.weight", {100, 1000}, 0}, {"blocks.0.bias", {3}, 100'000}};
    c.notes.data = "squares=12";
    return c;
  }

  // Saves the given steps and waits; every save must succeed.
  // `best`: the step that is saved as the best.
  void save_steps(const std::vector<std::int64_t>& steps, int keep = 2, std::int64_t best = -1) {
    CheckpointWriter writer(run, MPI_COMM_WORLD, keep);
    State s;
    for (const std::int64_t step : steps) {
      fill(s, step);
      const auto arrays = s.arrays();
      writer.save(info(step), arrays, step == best);
      fill(s, -1);  // the save must not see what happens after the cut
    }
    EXPECT_TRUE(writer.wait());
  }

  // Rank 0 does `work` on the files, all wait for it.
  void on_root(const std::function<void()>& work) const {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) work();
    MPI_Barrier(MPI_COMM_WORLD);
  }

  // Whether a checkpoint holds exactly the state of `step`.
  static void expect_state(const Checkpoint& c, std::int64_t step) {
    EXPECT_EQ(c.info().step, step);
    std::vector<float> all(length);
    for (int a = 0; a < 2; ++a) {
      c.read(a == 0 ? "master" : "average", 0, all);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < length; ++i) wrong += all[std::size_t(i)] != value(step, a, i);
      EXPECT_EQ(wrong, 0) << "array " << a << " of step " << step;
    }
  }

  // The step that a restart goes on from; -1 for a run without checkpoints, -4 for exit code 4.
  std::int64_t newest(std::string* message = nullptr) const {
    try {
      const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
      if (!c) return -1;
      expect_state(*c, c->info().step);
      return c->info().step;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      if (message != nullptr) *message = e.what();
      return -4;
    }
  }

  // The message with which rank 0 refuses to open a checkpoint; "" if it opens.
  static std::string refusal(const fs::path& dir) {
    try {
      Checkpoint::open(dir);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint) << e.what();
      return e.what();
    }
    return "";
  }

  static void flip_bit(const fs::path& file, std::uint64_t bit) {
    std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
    f.seekg(static_cast<std::streamoff>(bit / 8));
    const char c = static_cast<char>(f.get() ^ (1 << (bit % 8)));
    f.seekp(static_cast<std::streamoff>(bit / 8));
    f.put(c);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& e : fs::directory_iterator(run)) found.push_back(e.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  int rank = 0, ranks = 1;
  fs::path base, run;
};

}  // namespace weft
