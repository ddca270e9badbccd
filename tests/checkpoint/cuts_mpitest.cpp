// Arrays in stretches: who writes what, restarts at other rank counts and other cuts, thousands of
// stretches.
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "core/hash.h"
#include "core/json.h"
#include "fixture.h"

namespace weft {
namespace {

using Cuts = std::vector<std::int64_t>;

class CheckpointCuts : public CheckpointTest {
 protected:
  // Empty, shorter than a unit of 16, shorter than a unit a rank, a little more than even.
  const Cuts uneven = {3, 3, 18, 50, 114, 179, 1000, 70'000, 70'016, length};
  const Cuts other = {64, 30'000, 99'990, length};

  // The first `count` ranks; MPI_COMM_NULL on the others.
  MPI_Comm first_ranks(int count) const {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < count ? 0 : MPI_UNDEFINED, rank, &comm);
    return comm;
  }
  // Collective over `comm`. "master" in these cuts, "average" whole.
  void save_cut(MPI_Comm comm, const fs::path& dir, State& s, const Cuts& cuts, std::int64_t step) {
    CheckpointWriter writer(dir, comm, 2);
    const std::vector<FlatArray> arrays = {flat("master", s.master, cuts, comm),
                                           flat("average", s.average, {}, comm)};
    writer.save(info(step), arrays);
    EXPECT_TRUE(writer.wait());
  }
  static std::string read_text(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_F(CheckpointCuts, EachRankWritesItsPartOfEveryStretch) {
  for (int count = 1; count <= ranks; ++count) {
    SCOPED_TRACE(count);
    const fs::path dir = base / std::to_string(count);
    MPI_Comm comm = first_ranks(count);
    if (comm != MPI_COMM_NULL) {
      State s;
      fill(s, 7);
      save_cut(comm, dir, s, uneven, 7);
      // The file itself, by the rule of core/parts.h and nothing else.
      std::vector<float> expected;
      std::int64_t begin = 0;
      for (const std::int64_t end : uneven) {
        const Part p = part_of(begin, end, rank, count);
        for (std::int64_t i = p.begin; i < p.end; ++i) expected.push_back(value(7, 0, i));
        begin = end;
      }
      const Part whole = part_of(0, length, rank, count);
      for (std::int64_t i = whole.begin; i < whole.end; ++i) expected.push_back(value(7, 1, i));
      char name[32];
      std::snprintf(name, sizeof name, "step_7/shard_%04d.bin", rank);
      const std::string bytes = read_text(dir / name);
      ASSERT_EQ(bytes.size(), expected.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
      MPI_Comm_free(&comm);
    }
    on_root([&] {
      const Checkpoint c = Checkpoint::open(dir / "step_7");
      expect_state(c, 7);
      EXPECT_NE(c.describe().find("master in 10 stretches"), std::string::npos) << c.describe();
      // Any range, whatever cuts and ranks it crosses.
      const Philox random(3, Purpose::crop, 0, 0);
      for (std::uint32_t draw = 0; draw < 200; draw += 2) {
        const std::int64_t from = random.below(draw, draw % 4 == 0 ? 200 : length);
        const std::int64_t size = std::min<std::int64_t>(
            random.below(draw + 1, draw % 8 == 0 ? 40 : length), length - from);
        std::vector<float> piece(size);
        c.read("master", from, piece);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < size; ++i) wrong += piece[i] != value(7, 0, from + i);
        EXPECT_EQ(wrong, 0) << from << " and " << size;
      }
    });
  }
}

TEST_F(CheckpointCuts, RanksAndCutsMayChangeAtEveryRestart) {
  State s;
  fill(s, 3);
  MPI_Comm all = MPI_COMM_WORLD;
  save_cut(all, run, s, uneven, 3);
  std::int64_t step = 3;
  // Each restart takes what its own ranks own in its own cuts, and saves that.
  for (int count = 1; count <= ranks; ++count)
    for (const Cuts& cuts : {other, uneven, Cuts{length}}) {
      SCOPED_TRACE(count);
      MPI_Comm comm = first_ranks(count);
      if (comm != MPI_COMM_NULL) {
        const auto c = Checkpoint::newest(run, comm);
        ASSERT_TRUE(c.has_value());
        EXPECT_EQ(c->info().step, step);
        State next;  // zeros but for this rank's parts
        const auto load = [&](const char* name, std::vector<float>& into, const Cuts& ends) {
          FlatArray a = flat(name, into, ends, comm);
          for (const std::span<float> part : a.parts)
            c->read(name, part.data() - into.data(), part);
        };
        load("master", next.master, cuts);
        load("average", next.average, {});
        save_cut(comm, run, next, cuts, step + 1);
        MPI_Comm_free(&comm);
      }
      ++step;
      on_root([&] {
        const Checkpoint c = Checkpoint::open(run / checkpoint::step_name(step));
        std::vector<float> back(length);
        c.read("master", 0, back);
        EXPECT_TRUE(back == s.master);
        c.read("average", 0, back);
        EXPECT_TRUE(back == s.average);
      });
    }
}

TEST_F(CheckpointCuts, DamageInAStretchNamesItsTensor) {
  // Four stretches, a tensor each.
  const Cuts cuts = {20'000, 40'000, 60'000, 80'000};
  std::vector<float> state(80'000, 1.0f);
  CheckpointInfo i = info(1);
  i.tensors = {{"a", {20'000}, 0},
               {"b", {20'000}, 20'000},
               {"c", {20'000}, 40'000},
               {"d", {20'000}, 60'000}};
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    const std::vector<FlatArray> arrays = {flat("state", state, cuts)};
    writer.save(i, arrays);
    EXPECT_TRUE(writer.wait());
  }
  on_root([&] {
    // A rank's part of a stretch is 20,000 elements over the ranks, and parts follow each other in
    // the shard.
    const fs::path manifest = run / "step_1" / "manifest.json";
    const checkpoint::Manifest m =
        checkpoint::manifest_from_text(read_text(manifest), manifest.string());
    std::uint64_t part[5] = {};
    for (int s = 0; s < 4; ++s)
      part[s + 1] =
          part[s] + 4 * static_cast<std::uint64_t>(
                            part_of(s * 20'000, (s + 1) * 20'000, ranks - 1, ranks).size());
    EXPECT_EQ(checkpoint::tensors_in(m, ranks - 1, part[2], part[3]), "state: c");
    EXPECT_EQ(checkpoint::tensors_in(m, ranks - 1, part[1] + 8, part[2] + 4), "state: b, c");
    EXPECT_EQ(checkpoint::tensors_in(m, ranks - 1, 0, part[4]), "state: a, b, c, 1 more");
    flip_bit(run / "step_1" / m.shards.back().file, 64);
    const std::string message = refusal(run / "step_1");
    EXPECT_NE(message.find("it holds state: a, b, c, 1 more"), std::string::npos) << message;
  });
}

TEST_F(CheckpointCuts, ThousandsOfStretchesStayCheap) {
  // Five arrays in the same 6,000 stretches of five lengths, as buckets of parameters have them;
  // every part lies in memory of its own.
  Cuts cuts;
  for (std::int64_t i = 0, end = 0; i < 6000; ++i)
    cuts.push_back(end += std::array{64, 64, 192, 4096, 100}[std::size_t(i % 600 / 120)]);
  const std::int64_t n = cuts.back();
  const char* names[] = {"master", "exp_avg", "exp_avg_sq", "ema", "fixed"};
  std::vector<std::vector<float>> memory;
  std::vector<FlatArray> arrays;
  for (int a = 0; a < 5; ++a) {
    FlatArray array{names[a], n, cuts, {}, DeviceKind::cpu};
    std::int64_t begin = 0;
    for (const std::int64_t end : cuts) {
      const Part p = part_of(begin, end, rank, ranks);
      memory.emplace_back(static_cast<std::size_t>(p.size()));
      for (std::int64_t i = p.begin; i < p.end; ++i) memory.back()[i - p.begin] = value(0, a, i);
      array.parts.push_back(memory.back());
      begin = end;
    }
    arrays.push_back(std::move(array));
  }
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    writer.save(info(1), arrays);
    EXPECT_TRUE(writer.wait());
  }
  const auto c = Checkpoint::newest(run, MPI_COMM_WORLD);
  ASSERT_TRUE(c.has_value());
  // As a restart reads: range by range, here 2,000 of them an array.
  std::int64_t wrong = 0;
  std::vector<float> piece;
  for (int a = 0; a < 5; ++a)
    for (std::int64_t p = 0; p < 2000; ++p) {
      const std::int64_t begin = n * p / 2000, end = n * (p + 1) / 2000;
      piece.resize(end - begin);
      c->read(names[a], begin, piece);
      for (std::int64_t i = begin; i < end; ++i) wrong += piece[i - begin] != value(0, a, i);
    }
  EXPECT_EQ(wrong, 0);
  on_root([&] { EXPECT_LT(fs::file_size(run / "step_1" / "manifest.json"), 8000u); });
}

}  // namespace
}  // namespace weft
