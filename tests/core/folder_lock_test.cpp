#include "core/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace weft {
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
}  // namespace weft
