// Landmarks and coefficients from files.
#include "jobs/animate/sources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "jobs/animate/prepare.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

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
  EXPECT_THAT(said("a.json", "{}"), HasSubstr("no JSON list"));
  EXPECT_THAT(said("a.json", "[[1, 2], [3]]"), HasSubstr("row 1 is not as the others"));
  EXPECT_THAT(said("a.json", "[[1, \"b\"]]"), HasSubstr("is no number"));
  EXPECT_THAT(said("a.json", "[[1, 2, 3]]"), HasSubstr("rows of 3 numbers"));
  EXPECT_THAT(error_of([&] { read_landmarks((dir_ / "none.csv").string()); }),
              HasSubstr("not there"));
}

TEST_F(AnimateSources, MotionOfThreeWidths) {
  for (const std::int64_t width : {70, 73, 257}) {
    std::vector<float> values(static_cast<std::size_t>(2 * width));
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
