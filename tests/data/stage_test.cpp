// Copies of stores on a node's disk (data/stage.h).
#include "data/stage.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "clip_store_fixture.h"
#include "core/hash.h"
#include "core/host.h"
#include "data/store_file.h"

namespace weft {
namespace {

class StageTest : public ClipStoreTest {
 protected:
  void SetUp() override {
    ClipStoreTest::SetUp();
    write("clips=6,frames=3,height=16,width=16");
    fs::create_directory(path("disk"));
  }
  void TearDown() override {
    read_copies_of_stores({});
    ClipStoreTest::TearDown();
  }

  Staged stage(const std::string& store) { return stage_stores({store}, path("disk")); }
  std::string bytes_of(const std::string& file) const {
    return read(fs::relative(file, dir_).string());
  }
  // Turns a bit of the middle of that file.
  void damage(const std::string& file) {
    std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(fs::file_size(file) / 2);
    f.seekg(middle);
    const char byte = static_cast<char>(f.get() ^ 1);
    f.seekp(middle);
    f.put(byte);
  }
  void expect_no_copies() const {
    for (const auto& entry : fs::recursive_directory_iterator(path("disk")))
      EXPECT_TRUE(entry.is_directory() || entry.path().filename() == "lock") << entry.path();
  }
  void expect_refused(Exit code, const std::string& stage, const std::string& what) {
    try {
      stage_stores({path_}, stage);
      FAIL() << "accepted; expected: " << what;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code);
      EXPECT_THAT(e.what(), testing::HasSubstr(what));
      EXPECT_FALSE(e.hint().empty());
    }
  }
};

TEST_F(StageTest, ACopyIsTakenAgainWhereverTheStoreLiesByThen) {
  const Staged first = stage(path_);
  const std::string copy = first.copies.at(path_);
  EXPECT_EQ(bytes_of(copy), bytes_of(path_));
  EXPECT_EQ(first.bytes_copied, fs::file_size(path_));
  EXPECT_EQ(first.bytes, first.bytes_copied);
  const std::string moved = path("moved.h5");
  fs::copy_file(path_, moved);
  const Staged again = stage_stores({moved, path_}, path("disk"));
  EXPECT_EQ(again.bytes_copied, 0u);
  EXPECT_EQ(again.copies.at(moved), copy);
  EXPECT_EQ(again.copies.at(path_), copy);
}

TEST_F(StageTest, ACopyOfAnotherSizeIsMadeAgain) {
  const std::string copy = stage(path_).copies.at(path_);
  fs::resize_file(copy, fs::file_size(copy) - 1);
  EXPECT_EQ(stage(path_).bytes_copied, fs::file_size(path_));
  EXPECT_EQ(bytes_of(copy), bytes_of(path_));
}

TEST_F(StageTest, AnotherStoreOfThatNameHasItsOwnCopy) {
  const std::string older = stage(path_).copies.at(path_), bytes = bytes_of(older);
  write("clips=6,frames=3,height=16,width=16,seed=2");
  const std::string newer = stage(path_).copies.at(path_);
  EXPECT_NE(newer, older);
  EXPECT_EQ(bytes_of(newer), bytes_of(path_));
  EXPECT_EQ(bytes_of(older), bytes);
}

TEST_F(StageTest, TheCopyIsReadAndNothingElseChanges) {
  const std::string id = open_clip_store(path_, true)->content_id();
  const Staged staged = stage(path_);
  read_copies_of_stores(staged.copies);
  damage(path_);
  const auto store = open_clip_store(path_, true);
  EXPECT_EQ(store->content_id(), id);
  std::vector<std::byte> clip(store->buckets().front().clip_bytes());
  for (std::int64_t i = 0; i < 6; ++i) store->read(0, i, clip);  // throws where it is damaged
  damage(staged.copies.at(path_));
  try {
    for (std::int64_t i = 0; i < 6; ++i) store->read(0, i, clip);
    FAIL() << "no clip was damaged";
  } catch (const DamagedClip& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr(staged.copies.at(path_) + " (this node's copy of " +
                                             path_ + ")"));
    EXPECT_THAT(e.hint(), testing::HasSubstr("remove this copy: " + staged.copies.at(path_)));
  }
}

TEST_F(StageTest, AFolderMayBeginWithAVariable) {
  setenv("WEFT_TEST_DISK", path("disk").c_str(), 1);
  fs::create_directory(path("disk") + "/below");
  EXPECT_EQ(stage_stores({path_}, "$WEFT_TEST_DISK").bytes_copied, fs::file_size(path_));
  EXPECT_EQ(stage_stores({path_}, "${WEFT_TEST_DISK}").bytes_copied, 0u);
  EXPECT_EQ(fs::path(stage_stores({path_}, "$WEFT_TEST_DISK/below").folder).parent_path(),
            path("disk") + "/below");
  unsetenv("WEFT_TEST_DISK");
  expect_refused(Exit::usage, "$WEFT_TEST_DISK", "WEFT_TEST_DISK is not set");
  expect_refused(Exit::usage, "$", "is not set");
}

TEST_F(StageTest, OnlyAFolderOfThisUserAloneIsTaken) {
  const fs::path folder = stage(path_).folder;
  chmod(folder.c_str(), 0777);
  expect_refused(Exit::data, path("disk"), "is not a folder that this user alone can write");
  fs::rename(folder, path("elsewhere"));
  chmod(path("elsewhere").c_str(), 0700);
  fs::create_directory_symlink(path("elsewhere"), folder);
  expect_refused(Exit::data, path("disk"), "is not a folder that this user alone can write");
  expect_refused(Exit::data, path("no such disk"), "cannot make the folder");
}

TEST_F(StageTest, WhatAKilledJobLeftIsRemoved) {
  const fs::path folder = stage(path_).folder;
  const fs::path own = folder / ("0123-5-tmp@" + host_name() + "@17"),
                 other = folder / ("0123-5-tmp@x-" + host_name() + "@17");
  std::ofstream(own) << "half";
  std::ofstream(other) << "half";
  stage(path_);
  EXPECT_FALSE(fs::exists(own));
  EXPECT_TRUE(fs::exists(other));  // of a host that may be writing it
}

// Asked to stop at the first, the second, ... block, until that is not reached any more.
TEST_F(StageTest, ARequestToStopEndsTheCopyAndLeavesNothing) {
  int at = 0;
  for (bool stopped = true; stopped; ++at) {
    std::atomic<int> asked = 0;
    try {
      stage_stores({path_}, path("disk"), [&] { return asked++ == at; });
      stopped = false;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::stopped);
      expect_no_copies();
    }
    ASSERT_LT(at, 100);
  }
  EXPECT_EQ(at, 3);  // the copy's one block, written and read back, and then the whole copy
}

// Some 64 blocks, which several threads copy.
class StageOfManyBlocks : public StageTest {
 protected:
  void SetUp() override {
    StageTest::SetUp();
    staging_block = fs::file_size(path_) / 64;
  }
  void TearDown() override {
    staging_block = before_;
    StageTest::TearDown();
  }

 private:
  const std::uint64_t before_ = staging_block;
};

TEST_F(StageOfManyBlocks, ACopyHasTheBytesAndIsNamedByTheHashesOfBlocksInTheirOrder) {
  const std::string copy = stage(path_).copies.at(path_), bytes = bytes_of(path_);
  EXPECT_EQ(bytes_of(copy), bytes);
  std::vector<Hash128> hashes;
  for (std::size_t at = 0; at < bytes.size(); at += staging_block)
    hashes.push_back(hash128(std::string_view(bytes).substr(at, staging_block)));
  EXPECT_GE(hashes.size(), 64u);
  EXPECT_THAT(copy,
              testing::EndsWith("-" + to_hex(hash128(std::as_bytes(std::span(hashes)))) + ".h5"));
}

TEST_F(StageOfManyBlocks, ARequestToStopAtAnyBlockLeavesNothing) {
  for (const int at : {0, 5, 63, 70, 120}) {  // the copy is read back from 64 or 65 on
    std::atomic<int> asked = 0;
    try {
      stage_stores({path_}, path("disk"), [&] { return asked++ == at; });
      ADD_FAILURE() << "went on after a request at block " << at;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::stopped);
    }
    expect_no_copies();
  }
}

TEST_F(StageOfManyBlocks, AnErrorOfOneBlockEndsAllThreads) {
  std::atomic<int> asked = 0;
  try {
    stage_stores({path_}, path("disk"), [&] {
      if (asked++ == 10) fs::resize_file(path_, fs::file_size(path_) / 2);
      return false;
    });
    ADD_FAILURE() << "the store has half of its blocks";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), testing::HasSubstr("cannot read bytes to copy in " + path_));
  }
  EXPECT_LT(asked, 40);  // each thread ends at its first block that is not there
  expect_no_copies();
}

TEST_F(StageTest, ARequestToStopEndsTheWaitForAnotherJob) {
  const std::string lock = stage(path_).folder + "/lock";
  const int held = open(lock.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  int asked = 0;
  try {
    stage_stores({path_}, path("disk"), [&] { return ++asked == 2; });
    ADD_FAILURE() << "did not wait";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::stopped);
  }
  EXPECT_EQ(asked, 2);
  close(held);
}

TEST_F(StageTest, NodesThatReadDifferentBytesAreNamed) {
  const std::string one = "/a/weft-stores-0/id-5-11.h5", other = "/b/weft-stores-0/id-5-22.h5";
  check_same_copies("s.h5", {{"n1", one}, {"n2", "/elsewhere/id-5-11.h5"}});
  try {
    check_same_copies("s.h5", {{"n1", one}, {"n2", other}, {"n3", one}});
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::hardware);
    EXPECT_THAT(e.what(), testing::HasSubstr("id-5-11.h5 on n1, n3; id-5-22.h5 on n2"));
  }
}

TEST_F(StageTest, WhatIsMadeInMemoryIsNoStore) {
  for (const char* made : {"synthetic:clips=4", "shapes:images=4", "text:images=4", "list.jsonl"})
    EXPECT_FALSE(is_store_path(made)) << made;
  EXPECT_TRUE(is_store_path("clips.h5"));
}

}  // namespace
}  // namespace weft
