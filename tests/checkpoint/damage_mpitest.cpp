// What a restart makes of damaged checkpoints: each kind has its message, all are found, and the
// one before is used.
#include <sys/stat.h>

#include "core/hash.h"
#include "fixture.h"

namespace weft {
namespace {

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// Gives a changed manifest the hash that fits it again: a forgery that the hash cannot show.
std::string sealed(std::string text) {
  const std::string member = ",\n \"manifest_hash\": \"";
  const std::size_t body = text.rfind(member);
  text.resize(body);
  return text + member + to_hex(hash128(text)) + "\"\n}\n";
}
void forge(const fs::path& dir, const std::string& from, const std::string& to) {
  std::string text = read_file(dir / "manifest.json");
  const std::size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  write_file(dir / "manifest.json", sealed(text));
  fs::remove(dir / "verified");
}

TEST_F(CheckpointTest, EveryDamageHasItsMessageAndTheOlderOneIsUsed) {
  save_steps({10, 20});
  const fs::path good = base / "good", dir = run / "step_20";
  const fs::path shard = dir / "shard_0000.bin", manifest = dir / "manifest.json";
  on_root(
      [&] { fs::copy(run, good, fs::copy_options::recursive | fs::copy_options::copy_symlinks); });

  struct Damage {
    const char* name;
    std::function<void()> work;
    std::string message;  // a part of it
  };
  std::vector<Damage> damages = {
      {"flipped bit", [&] { flip_bit(shard, 1001); }, "shard_0000.bin block 0 (bytes 0 to"},
      {"flipped bit names the tensor", [&] { flip_bit(shard, 5); }, "master: blocks.0.weight"},
      {"truncated shard", [&] { fs::resize_file(shard, 1000); }, "has 1000 bytes, "},
      {"empty shard", [&] { fs::resize_file(shard, 0); }, "has 0 bytes, "},
      {"longer shard", [&] { fs::resize_file(shard, fs::file_size(shard) + 1); }, " were saved"},
      {"zeroed shard", [&] { write_file(shard, std::string(fs::file_size(shard), '\0')); },
       "block 0"},
      {"missing shard", [&] { fs::remove(shard); }, "shard_0000.bin is missing"},
      {"extra shard", [&] { fs::copy_file(shard, dir / "shard_0099.bin"); },
       "shard_0099.bin is one shard too many"},
      {"linked shard",
       [&] {
         fs::rename(shard, base / "outside.bin");
         fs::create_symlink(base / "outside.bin", shard);
       },
       "Too many levels of symbolic links"},
      {"pipe for a shard",
       [&] {
         fs::remove(shard);
         ASSERT_EQ(mkfifo(shard.c_str(), 0600), 0);
       },
       "is a pipe or device"},
      {"missing manifest", [&] { fs::remove(manifest); }, "has no manifest.json"},
      {"short manifest", [&] { fs::resize_file(manifest, fs::file_size(manifest) - 40); },
       "its end is missing"},
      {"empty manifest", [&] { fs::resize_file(manifest, 0); }, "cut off at 0 bytes"},
      {"flipped manifest", [&] { flip_bit(manifest, 8 * 30); }, "does not match its own hash"},
      {"manifest of another step",
       [&] {
         fs::copy_file(run / "step_10/manifest.json", manifest,
                       fs::copy_options::overwrite_existing);
       },
       "manifest of step 10: of another checkpoint"},
      {"manifest of another run",
       [&] { write_file(manifest, sealed(read_file(manifest).replace(60, 4, "else"))); },
       "either is damaged or of another run"},
      {"other format", [&] { forge(dir, "weft-checkpoint-2", "weft-checkpoint-9"); },
       "written in format weft-checkpoint-9, this weft reads weft-checkpoint-2"},
      {"shard out of its directory", [&] { forge(dir, "shard_0000.bin", "../../x000.bin"); },
       "contradicts the arrays"},
      {"shard of another size", [&] { forge(dir, "\"bytes\": ", "\"bytes\": 1"); },
       "contradicts the arrays"},
      {"cuts that end elsewhere", [&] { forge(dir, "\"100003\"", "\"100002\""); },
       "the cuts of array master do not end where it ends"},
      {"cuts that nobody can hold", [&] { forge(dir, "\"100003\"", "\"0*99999999 100003\""); },
       "a list of cuts is not one"},
      {"cuts that go back", [&] { forge(dir, "\"100003\"", "\"200000 -99997\""); },
       "a list of cuts is not one"},
      {"cuts that are no numbers", [&] { forge(dir, "\"100003\"", "\"100003,\""); },
       "a list of cuts is not one"},
      {"cuts beyond counting",
       [&] { forge(dir, "\"100003\"", "\"9223372036854775807*2 100003\""); },
       "a list of cuts is not one"},
      {"no such list of cuts", [&] { forge(dir, "\"cuts\": 0", "\"cuts\": 7"); },
       "the cuts of array master do not end where it ends"},
      {"absurd length", [&] { forge(dir, "\"elements\": 100003", "\"elements\": -5"); },
       "no believable length"},
      {"tensor beyond counting",
       [&] { forge(dir, "\"offset\": 100000", "\"offset\": 9223372036854775807"); },
       "blocks.0.bias has no believable shape"},
      {"field of another type", [&] { forge(dir, "\"step\": 20", "\"step\": \"a\""); },
       "not a manifest"},
      {"block hash forged",
       [&] {
         const std::string text = read_file(manifest);
         const std::size_t at = text.find("\"blocks\": [");
         const std::string hash = text.substr(text.find('"', at + 11) + 1, 32);
         forge(dir, hash, std::string(32, '0'));
       },
       "the state's hash is wrong"},
      {"nested manifest",
       [&] {
         write_file(manifest, sealed(std::string(200'000, '[') + ",\n \"manifest_hash\": \""));
         fs::remove(dir / "verified");
       },
       "not a manifest"},
      {"damaged mark", [&] { flip_bit(dir / "verified", 9); }, "does not fit manifest.json"},
      {"directory gone", [&] { fs::remove_all(dir); }, "No such file"},
  };
  if (ranks > 1) {
    damages.push_back({"swapped shards",
                       [&] {
                         fs::rename(shard, dir / "x");
                         fs::rename(dir / "shard_0001.bin", shard);
                         fs::rename(dir / "x", dir / "shard_0001.bin");
                       },
                       ""});
    damages.push_back({"shard of another step",
                       [&] {
                         fs::copy_file(run / "step_10/shard_0001.bin", dir / "shard_0001.bin",
                                       fs::copy_options::overwrite_existing);
                       },
                       "shard_0001.bin block 0"});
  }
  for (const Damage& d : damages) {
    SCOPED_TRACE(d.name);
    on_root([&] {
      fs::remove_all(run);
      fs::copy(good, run, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
      d.work();
      const std::string message = refusal(dir);
      EXPECT_FALSE(message.empty());
      EXPECT_NE(message.find(d.message), std::string::npos) << message;
    });
    EXPECT_EQ(newest(), 10);
  }
}

TEST_F(CheckpointTest, SwappedShardsOfEqualSizeAreNamed) {
  if (ranks == 1) GTEST_SKIP() << "needs two shards";
  std::vector<float> state(std::size_t(ranks) * 1024);
  for (std::size_t i = 0; i < state.size(); ++i) state[i] = float(i);
  const std::vector<FlatArray> arrays = {flat("state", state)};
  {
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    writer.save(info(1), arrays);
  }
  on_root([&] {
    const fs::path dir = run / "step_1";
    fs::rename(dir / "shard_0000.bin", dir / "x");
    fs::rename(dir / "shard_0001.bin", dir / "shard_0000.bin");
    fs::rename(dir / "x", dir / "shard_0001.bin");
    EXPECT_NE(refusal(dir).find("shard_0000.bin holds what belongs into shard_0001.bin"),
              std::string::npos)
        << refusal(dir);
  });
}

TEST_F(CheckpointTest, EveryFlippedBitIsFound) {
  save_steps({10, 20});
  on_root([&] {
    const fs::path dir = run / "step_20";
    const Philox random(1, Purpose::crop, 0, 0);
    std::uint32_t draw = 0;
    int flips = 0, missed = 0;
    for (const auto& e : fs::directory_iterator(dir)) {
      const auto bits = static_cast<std::uint32_t>(fs::file_size(e.path()) * 8);
      for (int i = 0; i < 60; ++i, ++flips) {
        const std::uint32_t bit = random.below(draw++, bits);
        flip_bit(e.path(), bit);
        missed += refusal(dir).empty();
        flip_bit(e.path(), bit);
      }
    }
    EXPECT_GE(flips, 180);
    EXPECT_EQ(missed, 0);
    EXPECT_EQ(refusal(dir), "") << "all flips are undone";
  });
}

TEST_F(CheckpointTest, EveryTruncationIsFound) {
  save_steps({10, 20});
  on_root([&] {
    const fs::path dir = run / "step_20";
    const Philox random(2, Purpose::crop, 0, 0);
    std::uint32_t draw = 0;
    for (const auto& e : fs::directory_iterator(dir)) {
      const std::string whole = read_file(e.path());
      for (int i = 0; i < 20; ++i) {
        fs::resize_file(e.path(), random.below(draw++, static_cast<std::uint32_t>(whole.size())));
        EXPECT_NE(refusal(dir), "") << e.path();
        write_file(e.path(), whole);
      }
    }
    EXPECT_EQ(refusal(dir), "");
  });
}

TEST_F(CheckpointTest, LinkLatestMayBeAnything) {
  save_steps({10, 20});
  const fs::path latest = run / "latest";
  const auto point_to = [&](const char* target) {
    on_root([&] {
      fs::remove_all(latest);
      fs::create_symlink(target, latest);
    });
  };
  on_root([&] { fs::remove(latest); });
  EXPECT_EQ(newest(), 20) << "no link";
  point_to("step_10");
  EXPECT_EQ(newest(), 10) << "the link decides while it is good";
  for (const char* target :
       {"step_30", "step_2\xb0", "/", "../run/step_10", "latest", "step_020"}) {
    point_to(target);
    EXPECT_EQ(newest(), 20) << target;
  }
  on_root([&] {
    fs::remove(latest);
    write_file(latest, "step_10");
  });
  EXPECT_EQ(newest(), 20) << "a file in its place";
  on_root([&] {
    fs::remove(latest);
    fs::create_symlink("step_10", latest);
    flip_bit(run / "step_10/shard_0000.bin", 3);
  });
  EXPECT_EQ(newest(), -4) << "a later step may be of an abandoned run: no fall-back to that";
  on_root([&] {
    flip_bit(run / "step_10/shard_0000.bin", 3);
    fs::remove(latest);
  });
  // A checkpoint directory that is a link leads out of the run and is not considered.
  on_root([&] {
    fs::rename(run / "step_20", base / "elsewhere");
    fs::create_directory_symlink(base / "elsewhere", run / "step_20");
  });
  EXPECT_EQ(newest(), 10);
}

// scp -r copies what a link names in its place.
TEST_F(CheckpointTest, LinksThatACopyMadeFoldersOfAreLinksAgain) {
  save_steps({10, 20});
  const auto copy_as = [&](const char* step, const char* link) {
    on_root([&] {
      fs::remove_all(run / link);
      fs::copy(run / step, run / link, fs::copy_options::recursive);
    });
  };
  copy_as("step_10", "latest");
  copy_as("step_10", "best");
  EXPECT_EQ(newest(), 10) << "as the link did";
  save_steps({30}, 2, 30);
  EXPECT_EQ(newest(), 30);
  on_root([&] {
    EXPECT_EQ(fs::read_symlink(run / "best"), "step_30");
    for (const char* copy : {"latest.copy", "best.copy"})
      EXPECT_TRUE(fs::exists(run / copy / "manifest.json")) << "nothing is removed";
  });
  copy_as("step_30", "latest");  // a copy of the copy
  save_steps({40}, 2, 30);
  EXPECT_EQ(newest(), 40);
}

TEST_F(CheckpointTest, NoneUsableIsNeverAFreshStart) {
  save_steps({10, 20});
  on_root([&] {
    flip_bit(run / "step_20/shard_0000.bin", 3);
    fs::remove(run / "step_10/manifest.json");
  });
  std::string message;
  EXPECT_EQ(newest(&message), -4);
  EXPECT_NE(message.find("step_20/shard_0000.bin block 0"), std::string::npos) << message;
  EXPECT_NE(message.find("step_10 has no manifest.json"), std::string::npos) << message;
  on_root([&] {
    fs::remove_all(run / "step_10");
    fs::remove_all(run / "step_20");
  });
  EXPECT_EQ(newest(&message), -4) << "a link that dangles tells that there was one";
  EXPECT_NE(message.find("names step_20"), std::string::npos) << message;
  on_root([&] { fs::remove(run / "latest"); });
  EXPECT_EQ(newest(), -1);
}

}  // namespace
}  // namespace weft
