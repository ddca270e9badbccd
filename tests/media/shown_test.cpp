// Videos as ffmpeg 5.1 shows them: its counts of frames, and its corners of turned ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "tests/folder.h"

namespace weft {
namespace {

constexpr std::int64_t height = 48, width = 64;

// Grey quarters, brighter with the frame.
std::vector<std::uint8_t> quarters(std::int64_t frame) {
  std::vector<std::uint8_t> rgb;
  for (std::int64_t i = 0; i < height * width; ++i) {
    const bool low = i / width >= height / 2, right = i % width >= width / 2;
    rgb.insert(rgb.end(), 3,
               static_cast<std::uint8_t>(40 + (right ? 50 : 0) + (low ? 100 : 0) + frame % 8));
  }
  return rgb;
}

class ShownTest : public FolderTest {
 protected:
  void make(const std::string& name, std::int64_t frames, double fps) const {
    Mp4Writer writer(path(name), height, width, fps);
    for (std::int64_t i = 0; i < frames; ++i) writer.add({quarters(i).data(), 1, height, width});
    writer.finish();
  }
  std::int64_t count(const std::string& name, double fps = 0) const {
    VideoReader reader({path(name)}, {.fps = fps});
    std::int64_t frames = 0;
    while (reader.next() != nullptr) ++frames;
    return frames;
  }
};

std::string big_endian(std::int64_t value) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift);
  return out;
}

TEST_F(ShownTest, RatesAreConvertedUpToTheEndOfTheLastFrame) {
  make("clip.mp4", 51, 24);
  for (const auto& [fps, frames] : {std::pair(0.3, 1),
                                    {1, 2},
                                    {8, 17},
                                    {12, 26},
                                    {23.976, 51},
                                    {24, 51},
                                    {25, 53},
                                    {29.97, 64},
                                    {30, 64},
                                    {60, 128}})
    EXPECT_EQ(count("clip.mp4", fps), frames) << fps;
  make("slides.mp4", 3, 0.5);
  for (const auto& [fps, frames] : {std::pair(0.3, 2), {1, 6}, {8, 48}, {24, 144}, {29.97, 180}})
    EXPECT_EQ(count("slides.mp4", fps), frames) << fps;
}

TEST_F(ShownTest, VariableRatesKeepTheirTimes) {
  const std::vector<double> times = {0, 0.1, 0.5, 2, 2.25};
  {
    Mp4Writer writer(path("clip.mp4"), height, width, Mp4Options{.fps = 3, .ticks = 100});
    for (std::size_t i = 0; i < times.size(); ++i)
      writer.add({quarters(0).data(), 1, height, width}, times[i], 0.01);
    writer.finish();
  }
  VideoReader reader({path("clip.mp4")});
  for (std::size_t i = 0; i < times.size(); ++i) {
    const VideoFrame* frame = reader.next();
    ASSERT_NE(frame, nullptr);
    EXPECT_NEAR(frame->seconds, times[i], 1e-6);
  }
  EXPECT_NEAR(reader.ticks() * 0.01, std::round(reader.ticks() * 0.01), 1e-6);
  EXPECT_EQ(reader.next(), nullptr);
  for (const auto& [fps, frames] : {std::pair(1, 2), {8, 18}, {12, 27}, {24, 54}, {30, 68}})
    EXPECT_EQ(count("clip.mp4", fps), frames) << fps;
}

TEST_F(ShownTest, AllDisplayMatrices) {
  make("clip.mp4", 3, 24);
  std::string bytes = read("clip.mp4");
  const std::size_t matrix = bytes.find("tkhd") + 4 + 40;
  const auto corner = [](const VideoFrame& f, bool low, bool right) {
    const std::int64_t y = low ? f.height - 3 : 2, x = right ? f.width - 3 : 2;
    return static_cast<int>(f.rgb[y * f.stride + 3 * x]);
  };
  const struct {
    int a, b, c, d;
    bool sideways;
    std::array<int, 4> corners;  // above, then below
  } cases[] = {
      {1, 0, 0, 1, false, {40, 90, 140, 190}},  {-1, 0, 0, 1, false, {90, 40, 190, 140}},
      {1, 0, 0, -1, false, {140, 190, 40, 90}}, {-1, 0, 0, -1, false, {190, 140, 90, 40}},
      {0, 1, -1, 0, true, {140, 40, 190, 90}},  {0, -1, 1, 0, true, {90, 190, 40, 140}},
      {0, 1, 1, 0, true, {40, 140, 90, 190}},   {0, -1, -1, 0, true, {190, 90, 140, 40}},
  };
  for (const auto& c : cases) {
    const auto fixed = [](int v) { return big_endian(std::int64_t{v} << 16); };
    bytes.replace(matrix, 20, fixed(c.a) + fixed(c.b) + fixed(0) + fixed(c.c) + fixed(c.d));
    write("turned.mp4", bytes);
    VideoReader reader({path("turned.mp4")});
    const VideoFrame* f = reader.next();
    ASSERT_NE(f, nullptr);
    EXPECT_EQ(f->height, c.sideways ? width : height);
    EXPECT_EQ(reader.height(), f->height);
    EXPECT_EQ(reader.width(), f->width);
    const std::array<int, 4> seen = {corner(*f, false, false), corner(*f, false, true),
                                     corner(*f, true, false), corner(*f, true, true)};
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(seen[i], c.corners[i], 3) << c.a << c.b << c.c;
  }
}

// As a phone trims: the samples stay, an edit list shows a part of them.
TEST_F(ShownTest, AnEditListsFramesAreTheWholeVideo) {
  make("whole.mp4", 96, 24);
  std::string bytes = read("whole.mp4");
  const auto number = [&](std::size_t at) {
    std::int64_t value = 0;
    for (std::size_t i = 0; i < 4; ++i)
      value = value << 8 | static_cast<std::uint8_t>(bytes[at + i]);
    return value;
  };
  const std::int64_t movie = number(bytes.find("mvhd") + 16),
                     media = number(bytes.find("mdhd") + 16);
  const std::size_t list = bytes.find("elst");
  ASSERT_NE(list, std::string::npos);
  bytes.replace(list + 12, 8,
                big_endian(movie * 3 / 2) + big_endian(number(list + 16) + media * 5 / 2));
  write("trimmed.mp4", bytes);
  EXPECT_EQ(count("trimmed.mp4"), 36);
  EXPECT_EQ(VideoReader({path("trimmed.mp4")}).frames(), 36);
  EXPECT_EQ(count("trimmed.mp4", 12), 18);
  // A copy that was cut off has fewer.
  write("cut.mp4", bytes.substr(0, bytes.find("moov") - 4));
  EXPECT_THROW(count("cut.mp4"), Error);
}

}  // namespace
}  // namespace weft
