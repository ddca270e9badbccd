#include "core/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace weft {
namespace {

namespace fs = std::filesystem;

// Features, latents and clips are made again when what they were made of has changed.
TEST(FileIdentity, TellsVersionsOfFilesAndFoldersApart) {
  const fs::path dir = fs::temp_directory_path() / ("weft_file_test_" + std::to_string(::getpid()));
  fs::create_directories(dir);
  const std::string index = dir / "model.safetensors.index.json", shard = dir / "1.safetensors";
  std::ofstream(index) << "{}";
  std::ofstream(shard) << "old";
  const std::string file = file_identity(shard), folder = folder_identity(dir.string());
  EXPECT_EQ(file_identity(shard), file);
  EXPECT_EQ(folder_identity(shard), file);
  EXPECT_EQ(folder_identity(index), folder) << "an index stands for its shards";

  const auto time = fs::last_write_time(shard);
  std::ofstream(shard) << "newer";
  fs::last_write_time(shard, time);  // of another size alone
  EXPECT_NE(file_identity(shard), file);
  EXPECT_NE(folder_identity(index), folder);
  std::ofstream(shard) << "new";
  fs::last_write_time(shard, time + std::chrono::seconds(1));  // of another time alone
  EXPECT_NE(file_identity(shard), file);
  fs::last_write_time(shard, time);
  EXPECT_EQ(file_identity(shard), file);
  EXPECT_EQ(file_identity("not there"), "not there");
  fs::remove_all(dir);
}

// What a crash left half written stands in nobody's way, and what cannot be written leaves the old
// file.
TEST(ReplaceFile, OldOrNew) {
  const fs::path dir =
      fs::temp_directory_path() / ("weft_replace_test_" + std::to_string(::getpid()));
  fs::create_directories(dir);
  const fs::path path = dir / "notes";
  std::ofstream(dir / "notes.tmp") << "half";
  for (const char* text : {"one", "another"}) {
    replace_file(path, text, Exit::data, Durable::yes);
    EXPECT_EQ(read_whole(path, 100, Exit::data, ""), text);
    EXPECT_FALSE(fs::exists(dir / "notes.tmp"));
  }
  EXPECT_THROW(replace_file(dir / "missing" / "notes", "x", Exit::data, Durable::no), Error);
  fs::create_directory(dir / "notes.d");
  std::ofstream(dir / "notes.d" / "full");
  EXPECT_THROW(replace_file(dir / "notes.d", "x", Exit::data, Durable::no), Error);
  EXPECT_FALSE(fs::exists(dir / "notes.d.tmp"));
  fs::remove_all(dir);
}

}  // namespace
}  // namespace weft
