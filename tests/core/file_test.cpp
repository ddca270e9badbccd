#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "core/file.h"
#include "core/hash.h"

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

TEST(WholeFile, AppearsWithCommitOrNotAtAll) {
  const fs::path dir =
      fs::temp_directory_path() / ("weft_whole_test_" + std::to_string(::getpid()));
  fs::create_directories(dir);
  const fs::path path = dir / "table.csv", draft = dir / ".table.csv.partial";
  // What a killed job has left, a link above all, is not written through.
  fs::create_symlink(dir / "elsewhere", draft);
  const std::string piece(700000, 'x');
  {
    WholeFile file(path, Exit::data);
    for (int i = 0; i < 3; ++i) file.add(piece);
    EXPECT_TRUE(fs::exists(draft));
    EXPECT_FALSE(fs::exists(path));
    file.commit(Durable::yes);
  }
  EXPECT_EQ(fs::file_size(path), 3 * piece.size());
  EXPECT_FALSE(fs::exists(draft));
  EXPECT_FALSE(fs::exists(dir / "elsewhere"));
  {
    WholeFile file(path, Exit::data);
    file.add("another");
  }
  EXPECT_EQ(fs::file_size(path), 3 * piece.size()) << "not committed";
  EXPECT_FALSE(fs::exists(draft));
  // A library writes the draft.
  {
    WholeFile file(path, Exit::data);
    std::ofstream(file.draft()) << "of a library";
    file.commit();
  }
  EXPECT_EQ(read_whole(path, 100, Exit::data, ""), "of a library");
  fs::remove_all(dir);
}

std::string reason_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::checkpoint);
    return std::string(e.what()) + " | " + e.hint();
  }
  return "";
}

// What cannot be looked at is not "not there".
TEST(IsThere, OrTheReasonWhyNobodyKnows) {
  const fs::path dir =
      fs::temp_directory_path() / ("weft_there_test_" + std::to_string(::getpid()));
  fs::create_directories(dir);
  std::ofstream(dir / "file") << "x";
  fs::create_symlink("nowhere", dir / "dangles");
  fs::create_symlink("circle", dir / "circle");
  EXPECT_TRUE(is_there(dir / "file", Exit::checkpoint));
  EXPECT_FALSE(is_there(dir / "none", Exit::checkpoint));
  EXPECT_FALSE(is_there(dir / "file/below", Exit::checkpoint));
  EXPECT_FALSE(is_there(dir / "dangles", Exit::checkpoint));
  const std::string circle = reason_of([&] { is_there(dir / "circle", Exit::checkpoint); });
  EXPECT_NE(circle.find("circle: Too many levels of symbolic links | "), circle.npos) << circle;
  const std::string name(300, 'x');
  const std::string longer = reason_of([&] { is_there(dir / name, Exit::checkpoint); });
  EXPECT_NE(longer.find(name + ": File name too long | a name may have 255 bytes"), longer.npos);
  const std::string list = reason_of([&] { entries_of(dir / "none", Exit::checkpoint); });
  EXPECT_NE(list.find("cannot list " + (dir / "none").string() + ": No such file"), list.npos);
  EXPECT_EQ(entries_of(dir, Exit::checkpoint).size(), 3);
  fs::remove_all(dir);
}

// Of std::filesystem, where nobody has asked for an error code.
TEST(ErrorOf, NamesPathAndReason) {
  const std::string name(300, 'x');
  const std::string what = reason_of([&] {
    try {
      fs::file_size("/tmp/" + name);
    } catch (const std::system_error& e) {
      throw error_of(e, Exit::checkpoint);
    }
  });
  EXPECT_EQ(what, "cannot use /tmp/" + name +
                      ": File name too long | a name may have 255 bytes, a path 4095");
}

}  // namespace

namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class FolderLockTest : public ::testing::Test {
 protected:
  void TearDown() override { fs::remove_all(folder_); }
  std::string refusal() const {
    try {
      const FolderLock lock(file_, "output folder o", "x.output", Exit::data);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      return std::string(e.what()) + " " + e.hint();
    }
    return "";
  }

  fs::path folder_ = fs::temp_directory_path() / ("weft_lock_" + std::to_string(::getpid()));
  fs::path file_ = folder_ / "below/.lock";
};

TEST_F(FolderLockTest, IsHeldByOne) {
  {
    const FolderLock lock(file_, "output folder o", "x.output", Exit::data);
    EXPECT_THAT(refusal(), HasSubstr("output folder o is in use by another job: host "));
    EXPECT_THAT(refusal(), HasSubstr(" process " + std::to_string(::getpid())));
    EXPECT_THAT(refusal(), HasSubstr("choose another x.output"));
  }
  EXPECT_FALSE(fs::exists(file_));
  EXPECT_EQ(refusal(), "");
}

TEST_F(FolderLockTest, OfADeadJobIsTakenOver) {
  fs::create_directories(file_.parent_path());
  std::ofstream(file_) << "host elsewhere process 1\n";
  EXPECT_EQ(refusal(), "");
}

TEST_F(FolderLockTest, IsNotMadeThroughALink) {
  fs::create_directories(file_.parent_path());
  fs::create_symlink(folder_ / "victim", file_);
  EXPECT_THROW(FolderLock(file_, "output folder o", "x.output", Exit::data), Error);
  EXPECT_FALSE(fs::exists(folder_ / "victim"));
}

}  // namespace

namespace {

TEST(Seal, HoldsUntilABitChanges) {
  for (const std::string& sealed :
       {seal_json(R"({"step":3,"loss":0.25})") + "\n", seal_text("[run]\ndir = \"run\"\n")}) {
    EXPECT_TRUE(seal_holds(sealed)) << sealed;
    EXPECT_TRUE(seal_holds(sealed.substr(0, sealed.size() - 1))) << sealed;
    const std::size_t data = sealed.find("xxh3") - 2;
    for (std::size_t bit = 0; bit < data * 8; ++bit) {
      std::string flipped = sealed;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
      EXPECT_FALSE(seal_holds(flipped)) << flipped;
    }
  }
}

TEST(Seal, TextsWithoutOneHold) {
  for (const char* text : {"", "\n", "{}", "{\"step\":3}", "# a comment\n", "\"}"})
    EXPECT_TRUE(seal_holds(text)) << text;
}

TEST(OwnFolder, IsNoLink) {
  const fs::path dir = fs::temp_directory_path() / ("weft_own_test_" + std::to_string(::getpid()));
  const auto refused = [&](const fs::path& path) -> std::string {
    try {
      make_own_folder(path, Exit::checkpoint);
      return "";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      return e.what();
    }
  };
  for (int times = 0; times < 2; ++times) EXPECT_EQ(refused(dir / "named" / "own"), "");
  EXPECT_EQ(refused(dir / "named/slash/"), "");
  fs::create_directory_symlink("named", dir / "link");
  fs::create_directory_symlink("nowhere", dir / "dangling");
  std::ofstream(dir / "file") << "precious";
  for (const char* name : {"link", "link/", "dangling"})
    EXPECT_THAT(refused(dir / name), testing::HasSubstr("a link stands in its place")) << name;
  EXPECT_FALSE(fs::exists(dir / "nowhere"));
  EXPECT_THAT(refused(dir / "file"), testing::HasSubstr("a file of that name exists"));
  EXPECT_THAT(refused(dir / "file" / "own"), testing::HasSubstr("cannot make the folder"));
  EXPECT_EQ(refused(dir / "link" / "below"), "") << "the user named the link";
  fs::remove_all(dir);
}

TEST(ErrorOf, AThreadThatCannotBeStarted) {
  const Error e = error_of(std::system_error(std::make_error_code(std::errc(EAGAIN))), Exit::data);
  EXPECT_THAT(e.what(), testing::HasSubstr("cannot start a thread"));
  EXPECT_THAT(e.hint(), testing::AllOf(testing::HasSubstr("ulimit -u"), testing::HasSubstr("-v")));
}

TEST(Seal, StaysJsonAndToml) {
  EXPECT_EQ(seal_json("{\"a\":1}").substr(0, 14), "{\"a\":1,\"xxh3\":");
  EXPECT_EQ(seal_text("a = 1\n").substr(0, 13), "a = 1\n# xxh3 ");
}

}  // namespace
}  // namespace weft
