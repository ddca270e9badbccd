// Clips that arrive piece by piece: the files and lines that they become, what fails, what is in
// memory, and the picture laid over them.
#include "jobs/generate/clip_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "jobs/engine/manifest.h"
#include "media/writers.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t side = 16;
constexpr std::size_t frame = side * side * 3;

class ClipWriterTest : public ::testing::Test {
 protected:
  void SetUp() override { Manifest::gather(dir_, "generated"); }
  void TearDown() override { fs::remove_all(dir_); }

  static ClipToWrite clip(const std::string& name, std::int64_t frames) {
    ClipToWrite c;
    c.line = {{"name", name}, {"key", "k"}, {"seed", 1}};
    c.frames = frames;
    c.height = c.width = side;
    return c;
  }
  // Frames of noise, three at a time.
  static void add(ClipWriter& writer, std::int64_t frames,
                  std::vector<std::uint8_t>* all = nullptr) {
    for (std::int64_t t = 0; t < frames; t += 3)
      writer.add(std::min<std::int64_t>(3, frames - t), [&](std::span<std::uint8_t> pixels) {
        for (std::size_t i = 0; i < pixels.size(); ++i)
          pixels[i] =
              static_cast<std::uint8_t>((i + static_cast<std::size_t>(t) * 77) * 2654435761u >> 9);
        if (all != nullptr) all->insert(all->end(), pixels.begin(), pixels.end());
      });
  }
  static void write(ClipWriter& writer, const std::string& name, std::int64_t frames) {
    writer.begin(clip(name, frames), 24);
    add(writer, frames);
    writer.end(1);
  }
  static std::function<void(const nlohmann::ordered_json&)> into(Manifest& manifest) {
    return [&](const nlohmann::ordered_json& line) { manifest.add(line); };
  }
  static std::vector<std::string> failed(ClipWriter& writer) {
    std::vector<std::string> failures;
    for (const auto& f : writer.finish()) failures.push_back(f.name + ": " + f.why);
    return failures;
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path dir_ = fs::temp_directory_path() / ("weft_clip_writer_" + std::to_string(::getpid()));
};

TEST_F(ClipWriterTest, FinishedClipsHaveALineAndAFile) {
  {
    Manifest manifest(dir_, "generated", 3);
    ClipWriter writer(dir_, nullptr, 3, 3 * frame, into(manifest));
    for (const char* name : {"a", "b", "c"}) write(writer, name, 2);
    write(writer, "picture", 1);
    write(writer, "not/there", 1);
    EXPECT_THAT(failed(writer), ElementsAre(HasSubstr("not/there: ")));
  }
  // As a job that was killed leaves it: a line cut off.
  std::ofstream(dir_ / "generated.rank3.jsonl", std::ios::app) << R"({"name":"d","fi)";
  const auto finished = Manifest::gather(dir_, "generated");
  EXPECT_EQ(finished.size(), 4u);
  EXPECT_TRUE(is_finished(finished, "picture", "k", dir_));
  EXPECT_EQ(finished.at("picture").parsed().at("file"), "picture.png");
  EXPECT_EQ(finished.at("picture").parsed().at("rank"), 3);
  EXPECT_FALSE(is_finished(finished, "a", "another", dir_));
  EXPECT_FALSE(is_finished(finished, "d", "k", dir_));
  fs::resize_file(dir_ / "b.mp4", 10);
  EXPECT_FALSE(is_finished(finished, "b", "k", dir_));
  EXPECT_FALSE(fs::exists(dir_ / "generated.rank3.jsonl"));
  EXPECT_EQ(Manifest::gather(dir_, "generated").size(), 4u);
}

TEST_F(ClipWriterTest, PicturesOfReferencesLieBesideTheClips) {
  Manifest manifest(dir_, "generated", 0);
  ClipWriter writer(dir_, nullptr, 0, 3 * frame, into(manifest));
  ClipToWrite with = clip("a", 1);
  with.pictures.push_back({2, 3, std::vector<std::uint8_t>(18, 200)});
  writer.begin(with, 8);
  add(writer, 1);
  writer.end(0.1);
  EXPECT_THAT(failed(writer), ElementsAre());
  EXPECT_TRUE(fs::is_regular_file(dir_ / "references/a-0.png"));
  EXPECT_EQ(Manifest::all(dir_, "generated").at("a").parsed().at("references"),
            nlohmann::json({"references/a-0.png"}));
}

// Each bit of a finished clip's file, of its copy with the watermark and of its line.
// WEFT_FLIPS=1000 for more flips than the usual number.
TEST_F(ClipWriterTest, FlippedBitsAreSeenAndTheClipIsMadeAgain) {
  {
    Manifest manifest(dir_, "generated", 0);
    ClipWriter writer(dir_, nullptr, 0, 3 * frame, into(manifest));
    write(writer, "a", 5);
    write(writer, "b", 5);
    EXPECT_THAT(failed(writer), ElementsAre());
  }
  const auto content = [](const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  Manifest::gather(dir_, "generated");
  const auto untouched = Manifest::gather(dir_, "generated");
  const char* asked = std::getenv("WEFT_FLIPS");
  const int flips = asked != nullptr ? std::atoi(asked) : 60;
  std::mt19937 random(5);
  int remade = 0;
  for (int i = 0; i < flips; ++i) {
    const fs::path path = dir_ / (i % 2 == 0 ? "a.mp4" : "generated.jsonl");
    const std::string good = content(path);
    std::string bad = good;
    const std::size_t at = random() % bad.size();
    const int bit = static_cast<int>(random() % 8);
    bad[at] = static_cast<char>(bad[at] ^ 1 << bit);
    std::ofstream(path, std::ios::binary) << bad;
    log::sum_up_warnings();  // or most of so many alike would not be shown
    testing::internal::CaptureStderr();
    const auto found = Manifest::gather(dir_, "generated");
    const bool a = is_finished(found, "a", "k", dir_), b = is_finished(found, "b", "k", dir_);
    const std::string said = testing::internal::GetCapturedStderr();
    std::ofstream(path, std::ios::binary) << good;
    if (a && b) {  // of the letters of "xxh3" alone
      EXPECT_EQ(i % 2, 1) << "byte " << at;
      for (const char* name : {"a", "b"}) {
        const auto is = found.at(name).parsed(), was = untouched.at(name).parsed();
        for (const char* member : {"file_xxh3", "seed", "pixels"})
          EXPECT_EQ(is.at(member), was.at(member)) << "byte " << at;
      }
      continue;
    }
    ++remade;
    EXPECT_THAT(said, HasSubstr(path.string())) << "byte " << at << " bit " << bit;
  }
  EXPECT_GE(remade, flips * 9 / 10);
  std::printf("%d flips of clips and manifests: %d named, %d without effect\n", flips, remade,
              flips - remade);
}

// Pieces are one clip: its pixels' hash is that of all of them.
TEST_F(ClipWriterTest, MorePiecesThanThereIsMemoryForAreOneClip) {
  std::vector<std::uint8_t> all;
  {
    Manifest manifest(dir_, "generated", 0);
    ClipWriter writer(dir_, nullptr, 0, 3 * frame, into(manifest));
    writer.begin(clip("long", 200), 24);
    add(writer, 200, &all);
    writer.end(1);
    EXPECT_TRUE(writer.finish().empty());
  }
  EXPECT_EQ(Manifest::gather(dir_, "generated").at("long").parsed().at("pixels"),
            to_hex(hash128(std::as_bytes(std::span(all)))));
}

TEST_F(ClipWriterTest, WhatIsDroppedLeavesNothing) {
  {
    Manifest manifest(dir_, "generated", 0);
    ClipWriter writer(dir_, nullptr, 0, 3 * frame, into(manifest));
    writer.begin(clip("dropped", 9), 24);
    add(writer, 6);
    writer.drop();
    writer.begin(clip("thrown", 9), 24);
    EXPECT_THROW(writer.add(1, [](std::span<std::uint8_t>) { throw 1; }), int);
    writer.drop();
    write(writer, "whole", 7);
    EXPECT_TRUE(writer.finish().empty());
    EXPECT_THAT(files(), ElementsAre("generated.rank0.jsonl", "whole.mp4"));
    writer.begin(clip("cut off", 9), 24);
    add(writer, 6);
  }
  EXPECT_THAT(files(), ElementsAre("generated.rank0.jsonl", "whole.mp4"));
}

// A disk with no room, played by a limit on the size of files: the clip is named, the producer does
// not wait for ever, and what comes after is written.
TEST_F(ClipWriterTest, AFullDiskFailsTheClipInHand) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit little{20000, before.rlim_max};
  {
    Manifest manifest(dir_, "generated", 0);
    ClipWriter writer(dir_, nullptr, 0, 3 * frame, into(manifest));
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
    write(writer, "large", 300);
    write(writer, "small", 3);
    EXPECT_THAT(failed(writer), ElementsAre(HasSubstr("large: cannot write")));
    EXPECT_THAT(files(), ElementsAre("generated.rank0.jsonl", "small.mp4"));
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
}

// ---- Watermark

TEST(Watermark, CoversATenthOfTheHeight) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("weft_watermark_" + std::to_string(::getpid()) + ".png");
  std::vector<std::uint8_t> mark;
  for (int i = 0; i < 20 * 40; ++i) mark.insert(mark.end(), {200, 100, 50});
  write_png(path.string(), 20, 40, mark);
  const Watermark watermark(path.string());
  std::vector<std::uint8_t> rgb(2 * 40 * 32 * 3, 7);
  watermark.lay_over(rgb.data(), 2, 40, 32);
  for (std::int64_t t = 0; t < 2; ++t)
    for (std::int64_t y = 0; y < 40; ++y)
      for (std::int64_t x = 0; x < 32; ++x)
        ASSERT_EQ(rgb[((t * 40 + y) * 32 + x) * 3], y < 4 && x < 8 ? 200 : 7) << y << " " << x;
  std::filesystem::remove(path);
  EXPECT_THROW(Watermark(path.string()), Error);
}

}  // namespace
}  // namespace weft
