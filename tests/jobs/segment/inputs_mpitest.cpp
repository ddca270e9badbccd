#include "jobs/segment/segment.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

class Inputs : public ::testing::Test {
 protected:
  void SetUp() override {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    first_ = rank == 0;
    long pid = getpid();
    MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    folder_ = fs::temp_directory_path() / fmt::format("weft_inputs_{}", pid);
    for (const char* file :
         {"in/b.jpg", "in/a.PNG", "in/notes.txt", "in/sub/a.jpeg", "in/out/a.png", "in/a.jpg",
          "in/film.mpg", "clip.mp4", "only/notes.txt"})
      if (first_) {
        fs::create_directories((folder_ / file).parent_path());
        std::ofstream(folder_ / file) << "x";
      }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (first_) fs::remove_all(folder_);
  }
  std::string at(const char* name) const { return (folder_ / name).string(); }
  std::vector<SegmentInput> list(std::vector<std::string> inputs) const {
    SegmentDeck deck;
    deck.inputs = std::move(inputs);
    deck.output = at("in/out");
    return list_inputs(deck, MediaDeck(), MPI_COMM_WORLD);
  }
  static std::vector<std::string> names(const std::vector<SegmentInput>& inputs) {
    std::vector<std::string> all;
    for (const SegmentInput& i : inputs) all.push_back(i.name);
    return all;
  }

  bool first_ = true;
  fs::path folder_;
};

TEST_F(Inputs, OfAFolderOnAllRanks) {
  const auto inputs = list({at("in")});
  // Sorted by path; the results and what is no medium are left out; no two have one name.
  EXPECT_THAT(names(inputs), ElementsAre("a", "a-2", "b", "film", "sub/a"));
  EXPECT_EQ(inputs[0].media.path, at("in/a.PNG"));
  EXPECT_EQ(inputs[4].media.path, at("in/sub/a.jpeg"));
  for (const SegmentInput& i : inputs) {
    EXPECT_EQ(i.video, i.name == "film");
    EXPECT_EQ(i.media.trust, MediaTrust::untrusted);
  }
}

TEST_F(Inputs, FilesGlobsAndSources) {
  const auto inputs = list({at("clip.mp4"), at("in/*.jpg"), "lavfi:testsrc"});
  EXPECT_THAT(names(inputs), ElementsAre("clip", "a", "b", "lavfi"));
  EXPECT_TRUE(inputs[0].video);
  EXPECT_FALSE(inputs[1].video);
  EXPECT_TRUE(inputs[3].video);
  EXPECT_EQ(inputs[3].media.path, "lavfi:testsrc");
  EXPECT_EQ(inputs[3].media.trust, MediaTrust::deck);
}

// Results lie beside weft's own files, and beside each other.
TEST_F(Inputs, NamesThatAreTaken) {
  for (const char* file :
       {"taken/segment.jsonl/b.png", "taken/status.json/b.png", "taken/stop/b.png",
        "taken/segment.rank0.jsonl/b.png", "taken/x.jpg", "taken/x.png/y.png"})
    if (first_) {
      fs::create_directories((folder_ / file).parent_path());
      std::ofstream(folder_ / file) << "x";
    }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_THAT(names(list({at("taken")})),
              ElementsAre("_segment.jsonl/b", "_segment.rank0.jsonl/b", "_status.json/b", "_stop/b",
                          "x", "_x.png/y"));
}

TEST_F(Inputs, WhatIsNotThere) {
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks > 1) GTEST_SKIP() << "rank 0 alone throws, and ends the job";
  EXPECT_THROW(list({}), Error);
  EXPECT_THROW(list({at("none.png")}), Error);
  EXPECT_THROW(list({at("only")}), Error);
}

}  // namespace
}  // namespace weft
