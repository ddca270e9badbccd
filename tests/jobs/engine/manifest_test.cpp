#include "jobs/engine/manifest.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/error.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

TEST(Names, ArePlain) {
  EXPECT_EQ(as_utf8("caf\xe9"), "caf\xef\xbf\xbd");
  EXPECT_EQ(as_utf8("caf\xc3\xa9"), "caf\xc3\xa9");
  EXPECT_EQ(plain_text("a\x1b/b\x7f", "/"), "a__b_");
  EXPECT_EQ(cut_text("caf\xc3\xa9", 4), "caf") << "no character is cut";
  EXPECT_EQ(cut_text("caf\xc3\xa9", 5), "caf\xc3\xa9");
}

TEST(Names, PlainStems) {
  EXPECT_EQ(plain_stem("images/ADE_val_00000001.jpg"), "ADE_val_00000001");
  EXPECT_EQ(plain_stem("../caf\xc3\xa9 <b>.png"), "caf____b_");
  EXPECT_EQ(plain_stem(std::string(300, 'x')).size(), 100);
}

TEST(Results, StayInTheirFolder) {
  const fs::path folder = fs::temp_directory_path() / ("weft_results_" + std::to_string(getpid()));
  fs::create_directory(folder);
  EXPECT_EQ(result_path(folder, "a/b/c.txt"), folder / "a/b/c.txt");
  EXPECT_TRUE(fs::is_directory(folder / "a/b"));
  // Not through a link, and not where the folder has gone.
  fs::create_directory_symlink(fs::temp_directory_path(), folder / "link");
  EXPECT_THROW(result_path(folder, "link/d.txt"), Error);
  fs::remove_all(folder);
  EXPECT_THROW(result_path(folder, "a/b.txt"), Error);
  EXPECT_FALSE(fs::exists(folder));
}

}  // namespace
}  // namespace weft
