// Clips as parts, and how ranks share them.
// Landmarks and coefficients from files.
#include "jobs/animate/clips.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "jobs/animate/prepare.h"

namespace weft {
namespace {

using Kind = ClipPart::Kind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Clips of so many frames, in pieces of 10, and what they cost.
struct Clips {
  std::vector<ClipPart> parts;
  std::vector<std::int64_t> all;
  std::vector<ClipCost> costs;

  explicit Clips(const std::vector<std::int64_t>& frames) {
    std::vector<AnimateSize> sizes;
    std::vector<ClipRequest> requests(frames.size());
    for (std::size_t i = 0; i < frames.size(); ++i) {
      sizes.push_back({frames[i], 64, 64});
      requests[i].animate.piece = 9;  // batches of 2 make it 10
      costs.push_back({5, 1, 0.5, frames[i]});
    }
    parts = parts_of(sizes, requests);
    all.resize(parts.size());
    std::iota(all.begin(), all.end(), 0);
  }
};

TEST(ClipParts, PiecesTileTheClipAndStandBeforeIt) {
  const Clips c({25, 0});
  ASSERT_EQ(c.parts.size(), 5u);
  EXPECT_EQ(c.parts[2].first, 20);
  EXPECT_EQ(c.parts[2].count, 5);
  EXPECT_EQ(c.parts[3].kind, Kind::clip);
  EXPECT_EQ(c.parts[3].count, 25);
  EXPECT_EQ(c.parts[4].count, 0);
  std::vector<ClipRequest> requests(2);
  requests[0].name = "a";
  requests[1].name = "b";
  const auto items = items_of(c.parts, requests, c.costs, {"k", "l"});
  EXPECT_EQ(items[2].name, "a/20-24");
  EXPECT_EQ(items[2].whole, 3);
  EXPECT_EQ(items[3].whole, -1);
  EXPECT_EQ(items[4].name, "b");
  EXPECT_EQ(items[4].key, "l");
}

TEST(ClipParts, OneRankTakesClipsWhole) {
  const Clips c({20, 30});
  // Parts: 0-1 pieces, 2 clip; 3-5 pieces, 6 clip. The longer clip comes first.
  const SharedParts shared = share_parts(c.parts, c.all, {}, c.costs, 1);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(3, 4, 5, 6), ElementsAre(0, 1, 2)));
  EXPECT_THAT(shared.joins, IsEmpty());
}

TEST(ClipParts, AClipOfMoreThanAnEvenShareIsSplit) {
  const Clips c({20, 30});
  const SharedParts shared = share_parts(c.parts, c.all, {}, c.costs, 2);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(3), ElementsAre(4), ElementsAre(5),
                                         ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(shared.joins, ElementsAre(ElementsAre(6), ElementsAre(2)));
}

TEST(ClipParts, OfManyClipsOnlyTheLastAreSplit) {
  const Clips c({20, 20, 20, 20, 20});
  const SharedParts shared = share_parts(c.parts, c.all, {}, c.costs, 2);
  EXPECT_EQ(shared.pieces.size(), 6u);
  EXPECT_THAT(shared.pieces.front(), ElementsAre(0, 1, 2));
  EXPECT_THAT(shared.joins, ElementsAre(ElementsAre(14)));
}

TEST(ClipParts, OnlyWhatIsMissingIsShared) {
  const Clips c({20, 30});
  // All pieces of the second clip are there, and it has yet to be joined; so has one of the first.
  const SharedParts shared = share_parts(c.parts, {1, 2, 6}, {}, c.costs, 2);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(1, 2), ElementsAre(6)));
  EXPECT_THAT(shared.joins, IsEmpty());
}

// The engine makes suspects before the others: a join must wait for both.
TEST(ClipParts, AClipWithASuspectIsJoinedAfterAllPieces) {
  const Clips c({20, 20, 20, 20});
  for (const int ranks : {1, 2}) {
    const SharedParts shared = share_parts(c.parts, c.all, {4, 11}, c.costs, ranks);
    EXPECT_EQ(shared.pieces.front(), ItemBatch({0, 1, 2})) << ranks;
    EXPECT_THAT(shared.joins, ElementsAre(ElementsAre(5), ElementsAre(11)));
    // A clip whose pieces are there, or all but one.
    EXPECT_THAT(share_parts(c.parts, {2}, {2}, c.costs, ranks).joins, ElementsAre(ElementsAre(2)));
    EXPECT_THAT(share_parts(c.parts, {1, 2}, {2}, c.costs, ranks).pieces,
                ElementsAre(ElementsAre(1)));
  }
}

class AnimateSources : public ::testing::Test {
 protected:
  AnimateSources()
      : dir_(fs::temp_directory_path() / ("weft_animate_" + std::to_string(getpid()))) {
    fs::create_directories(dir_);
  }
  ~AnimateSources() override { fs::remove_all(dir_); }

  std::string file(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name, std::ios::binary) << text;
    return (dir_ / name).string();
  }
  template <class F>
  std::string error_of(F&& f) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return e.what();
    }
    return "no error";
  }
  std::string points(int count) {
    std::string text;
    for (int i = 0; i < count; ++i)
      text += std::to_string(i) + ".5, " + std::to_string(2 * i) + "\n";
    return text;
  }

  fs::path dir_;
  MediaDeck limits_;
};

TEST_F(AnimateSources, Landmarks) {
  const auto csv = read_landmarks(file("a.csv", points(68)));
  ASSERT_EQ(csv.size(), 136u);
  EXPECT_EQ(csv[2], 1.5f);
  EXPECT_EQ(csv[135], 134.f);
  std::string json;
  for (int i = 0; i < 68; ++i)
    json += (i > 0 ? ", [" : "[") + std::to_string(i) + ".5, " + std::to_string(2 * i) + "]";
  EXPECT_EQ(read_landmarks(file("a.json", "[" + json + "]")), csv);
  EXPECT_EQ(read_landmarks(file("b.json", "{\"landmarks\": [" + json + "]}")), csv);
}

TEST_F(AnimateSources, WrongLandmarks) {
  const auto said = [&](const std::string& name, const std::string& text) {
    return error_of([&] { read_landmarks(file(name, text)); });
  };
  EXPECT_THAT(said("a.csv", points(67)), HasSubstr("134 numbers, not 136"));
  EXPECT_THAT(said("a.csv", points(67) + "nan 3"), HasSubstr("not finite"));
  EXPECT_THAT(said("a.csv", points(67) + "1e9 3"), HasSubstr("far out"));
  EXPECT_THAT(said("a.csv", "x,y\n" + points(68)), HasSubstr("is no number"));
  EXPECT_THAT(said("a.json", "{}"), HasSubstr("a.json is not"));
  EXPECT_THAT(said("a.json", "[[1, 2], [3]]"), HasSubstr("row 1 is not as the others"));
  EXPECT_THAT(said("a.json", "[[1, \"b\"]]"), HasSubstr("\"b\""));
  EXPECT_THAT(said("a.json", "[[1, 2, 3]]"), HasSubstr("rows of 3 numbers"));
  EXPECT_THAT(error_of([&] { read_landmarks((dir_ / "none.csv").string()); }),
              HasSubstr("not there"));
}

TEST_F(AnimateSources, MotionOfThreeWidths) {
  for (const std::int64_t width : {70, 73, 257}) {
    std::vector<float> values(2 * width);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const fs::path path = dir_ / "rows.safetensors";
    const SafetensorWrite tensor{"rows", DType::f32, {2, width}, std::as_bytes(std::span(values))};
    write_safetensors(path, std::span(&tensor, 1));
    const auto motion = read_motion(path.string(), limits_);
    ASSERT_EQ(motion.size(), 140u) << width;
    EXPECT_EQ(motion[0], width == 257 ? 80.f : 0.f);
    EXPECT_EQ(motion[64], width == 257 ? 224.f : 64.f);
    EXPECT_EQ(motion[139], static_cast<float>(width + (width == 257 ? 256 : 69)));
  }
}

TEST_F(AnimateSources, MotionOfAnotherKind) {
  const auto said = [&](const std::string& name, const std::string& text) {
    return error_of([&] { read_motion(file(name, text), limits_); });
  };
  EXPECT_THAT(said("a.mat", "MATLAB 5.0"), HasSubstr("MATLAB"));
  EXPECT_THAT(said("a.npy", "x"), HasSubstr("\".npy\""));
  EXPECT_THAT(said("a.json", "[[1, 2]]"), HasSubstr("2 coefficients a frame"));
  EXPECT_THAT(said("a.json", "[]"), HasSubstr("0 coefficients a frame"));
  EXPECT_NE(said("a.safetensors", "x"), "no error");
}

TEST(FrameSize, FollowsTheCropsAspect) {
  PreparedClip clip;
  clip.frame_height = 61;
  clip.frame_width = 47;
  EXPECT_EQ(frame_size(clip, SadtalkerDeck()), (std::array<std::int64_t, 2>{332, 256}));
}

}  // namespace
}  // namespace weft
