#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/resize.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::HasSubstr;

const std::string bars = "lavfi:testsrc2=duration=1:rate=12:size=64x48";

using MediaTest = FolderTest;

ClipView view(const Footage& clip) {
  return {clip.rgb.data(), clip.frames, clip.height, clip.width};
}

double psnr(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return 10 * std::log10(255.0 * 255.0 * static_cast<double>(a.size()) / std::max(sum, 1e-9));
}

void expect_broken(const std::string& path, const std::string& what) {
  try {
    VideoReader reader({path, MediaTrust::deck});
    while (reader.next() != nullptr) {
    }
    FAIL() << path << " was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr(path));
    EXPECT_THAT(e.what(), HasSubstr(what));
  }
}

TEST_F(MediaTest, ReadsAMadeSource) {
  VideoReader reader({bars, MediaTrust::deck});
  EXPECT_EQ(reader.height(), 48);
  EXPECT_EQ(reader.width(), 64);
  EXPECT_DOUBLE_EQ(reader.fps(), 12);
  EXPECT_FALSE(reader.is_image());
  std::int64_t n = 0;
  while (const VideoFrame* f = reader.next()) {
    EXPECT_EQ(f->index, n);
    EXPECT_NEAR(f->seconds, static_cast<double>(n) / 12, 1e-6);
    EXPECT_EQ(f->height, 48);
    ++n;
  }
  EXPECT_EQ(n, 12);
  EXPECT_EQ(reader.next(), nullptr);  // and stays at the end
}

TEST_F(MediaTest, ColoursAreRight) {
  const Footage red =
      read_frames({"lavfi:color=c=red:size=32x32:rate=5:duration=1", MediaTrust::deck}, 1);
  EXPECT_NEAR(red.rgb[0], 255, 3);
  EXPECT_NEAR(red.rgb[1], 0, 3);
  EXPECT_NEAR(red.rgb[2], 0, 3);
}

TEST_F(MediaTest, ResamplesToAFrameRate) {
  VideoReader reader({bars, MediaTrust::deck}, {.fps = 6});
  EXPECT_DOUBLE_EQ(reader.fps(), 6);
  std::int64_t n = 0;
  while (reader.next() != nullptr) ++n;
  EXPECT_EQ(n, 6);
}

// Flat chroma of 4:2:0 costs most at the colour edges of the test picture; a greyscale picture
// that moves shows the codec alone.
TEST_F(MediaTest, Mp4RoundTrip) {
  const Footage made = read_frames(
      {"lavfi:gradients=size=96x64:rate=10:duration=1.2:c0=0x202020:c1=0xE0E0E0:n=2:seed=3",
       MediaTrust::deck});
  ASSERT_EQ(made.frames, 12);
  write_mp4(path("clip.mp4"), view(made), 10);
  VideoReader reader({path("clip.mp4"), MediaTrust::untrusted});
  EXPECT_NEAR(reader.fps(), 10, 0.01);
  EXPECT_EQ(reader.frames(), 12);
  const Footage back = read_frames({path("clip.mp4"), MediaTrust::untrusted});
  ASSERT_EQ(back.frames, 12);
  ASSERT_EQ(back.rgb.size(), made.rgb.size());
  EXPECT_GT(psnr(made.rgb, back.rgb), 38);
}

// A container without a count may have a duration that is not that of the pictures, or none.
TEST_F(MediaTest, FramesAreCountedByPackets) {
  const auto make = [&](const std::string& name, const std::string& how) {
    const std::string command =
        "ffmpeg -v error -y -f lavfi -i testsrc2=duration=2:rate=24:size=64x48 " + how + " " +
        path(name) + " < /dev/null";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  };
  make("sound.mkv", "-f lavfi -i sine=duration=6 -c:v mpeg4");
  make("sparse.mkv", "-vf \"select='lt(n,10)+not(mod(n,4))'\" -fps_mode vfr -c:v mpeg4");
  make("live.webm", "-c:v libvpx -f webm -live 1");
  for (const auto& [name, frames] :
       {std::pair("sound.mkv", 48), {"sparse.mkv", 19}, {"live.webm", 48}}) {
    VideoReader reader({path(name), MediaTrust::untrusted});
    EXPECT_EQ(reader.counted(), frames) << name;
    std::int64_t read = 0;
    while (reader.next() != nullptr) ++read;
    EXPECT_EQ(read, frames) << name;
  }
  const MediaAccess access;
  const PickedFrame last = frame_at({path("sound.mkv"), MediaTrust::untrusted}, 100, access);
  EXPECT_EQ(last.fault, "") << "a shorter video's last frame";
  EXPECT_EQ(last.rgb, frame_at({path("sound.mkv"), MediaTrust::untrusted}, 47, access).rgb);
}

TEST_F(MediaTest, AnMp4GrowsPieceByPiece) {
  const Footage made = read_frames({bars, MediaTrust::deck}, 12);
  write_mp4(path("whole.mp4"), view(made), 10);
  {
    Mp4Writer writer(path("pieces.mp4"), made.height, made.width, 10);
    const std::int64_t frame = made.height * made.width * 3;
    for (const auto& [first, count] : {std::pair(0, 5), {5, 1}, {6, 6}})
      writer.add({made.rgb.data() + first * frame, count, made.height, made.width});
    writer.finish();
    Mp4Writer unfinished(path("unfinished.mp4"), made.height, made.width, 10);
    unfinished.add(view(made));
  }
  EXPECT_FALSE(fs::exists(path("unfinished.mp4")));
  EXPECT_EQ(read("pieces.mp4"), read("whole.mp4"));
}

TEST_F(MediaTest, Mp4KeepsColours) {
  const Footage made =
      read_frames({"lavfi:color=c=0xC04020:size=32x32:rate=5:duration=1", MediaTrust::deck});
  write_mp4(path("clip.mp4"), view(made), 5);
  const Footage back = read_frames({path("clip.mp4"), MediaTrust::untrusted}, 1);
  for (int c = 0; c < 3; ++c) EXPECT_NEAR(back.rgb[c], made.rgb[c], 4);
}

TEST_F(MediaTest, OddSizesGrowByOne) {
  const Footage made = read_frames({bars, MediaTrust::deck}, 3, 33, 45);
  write_mp4(path("odd.mp4"), view(made), 23.976);
  const Footage back = read_frames({path("odd.mp4"), MediaTrust::untrusted});
  EXPECT_EQ(back.frames, 3);
  EXPECT_EQ(back.height, 34);
  EXPECT_EQ(back.width, 46);
  EXPECT_NEAR(back.fps, 23.976, 0.01);
}

TEST_F(MediaTest, OneFrame) {
  const Footage made = read_frames({bars, MediaTrust::deck}, 1);
  write_mp4(path("one.mp4"), view(made), 24);
  EXPECT_EQ(read_frames({path("one.mp4"), MediaTrust::untrusted}).frames, 1);
}

TEST_F(MediaTest, PngRoundTripIsExact) {
  const Footage made = read_frames({bars, MediaTrust::deck}, 1);
  write_png(path("a.png"), made.height, made.width, made.rgb);
  VideoReader reader({path("a.png"), MediaTrust::untrusted});
  EXPECT_TRUE(reader.is_image());
  EXPECT_EQ(reader.frames(), 1);
  const Footage back = read_frames({path("a.png"), MediaTrust::untrusted});
  EXPECT_EQ(back.frames, 1);
  EXPECT_EQ(back.rgb, made.rgb);
  std::ifstream file(path("a.png"), std::ios::binary);
  EXPECT_EQ(png_bytes(made.height, made.width, made.rgb),
            std::string(std::istreambuf_iterator<char>(file), {}));
}

TEST_F(MediaTest, BrokenVideos) {
  expect_broken(path("missing.mp4"), "No such file");
  std::ofstream(path("text.mp4")) << "this is no video\n";
  expect_broken(path("text.mp4"), "cannot");
  std::ofstream(path("empty.avi")).flush();
  expect_broken(path("empty.avi"), "cannot");
  expect_broken("lavfi:nosuchfilter=1", "is not allowed");
}

// An MP4 keeps its index at the end: without it nothing can be read.
TEST_F(MediaTest, TruncatedMp4) {
  write_mp4(path("clip.mp4"), view(read_frames({bars, MediaTrust::deck})), 12);
  fs::resize_file(path("clip.mp4"), fs::file_size(path("clip.mp4")) / 2);
  expect_broken(path("clip.mp4"), "cannot open");
}

TEST_F(MediaTest, UnwritableResults) {
  const Footage made = read_frames({bars, MediaTrust::deck}, 1);
  EXPECT_THROW(write_mp4(path("no/such/dir.mp4"), view(made), 24), Error);
  EXPECT_THROW(write_png(path("no/such/dir.png"), made.height, made.width, made.rgb), Error);
  EXPECT_THROW(write_mp4(path("a.mp4"), view(made), 0), Error);
  EXPECT_TRUE(fs::is_empty(dir_));
}

VideoFrame frame_of(const std::vector<std::uint8_t>& rgb, std::int64_t height, std::int64_t width) {
  VideoFrame f;
  f.rgb = rgb.data();
  f.stride = width * 3;
  f.height = height;
  f.width = width;
  return f;
}

// Values from the definition: half-pixel centres, no antialiasing, crop of the middle.
TEST(CoverResizeTest, KnownValues) {
  std::vector<std::uint8_t> ramp(8 * 3);  // one row, 0 30 60 ... 210
  for (int x = 0; x < 8; ++x)
    for (int c = 0; c < 3; ++c) ramp[x * 3 + c] = static_cast<std::uint8_t>(30 * x);
  CoverResize resize;
  std::vector<std::uint8_t> out(2 * 3);
  // 1x8 -> covers 1x2 as 1x8, cropped to the two in the middle.
  resize(frame_of(ramp, 1, 8), 1, 2, out.data());
  EXPECT_EQ(out[0], 90);
  EXPECT_EQ(out[3], 120);
  // 2x2 -> 4x4: samples at -0.25 (clamped to 0), 0.25, 0.75, 1.25 (the last sample repeats).
  const std::vector<std::uint8_t> square = {0, 0, 0, 100, 100, 100, 0, 0, 0, 100, 100, 100};
  out.resize(4 * 4 * 3);
  resize(frame_of(square, 2, 2), 4, 4, out.data());
  const int expected[] = {0, 25, 75, 100};
  for (int x = 0; x < 4; ++x) EXPECT_EQ(out[x * 3], expected[x]);
}

// References of a clip go on unrounded.
TEST(CoverResizeTest, FloatsAreNotRounded) {
  std::vector<std::uint8_t> noise(5 * 7 * 3);
  for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::uint8_t>(i * 37);
  CoverResize resize;
  std::vector<std::uint8_t> bytes(4 * 4 * 3);
  std::vector<float> floats(bytes.size());
  resize(frame_of(noise, 5, 7), 4, 4, bytes.data());
  resize(frame_of(noise, 5, 7), 4, 4, floats.data());
  int between = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(bytes[i], static_cast<std::uint8_t>(floats[i] + 0.5f)) << i;
    between += floats[i] != std::floor(floats[i]);
  }
  EXPECT_GT(between, 30);
}

// Without antialiasing a picture shrunk 4 times is made of every fourth pair of pixels.
TEST(CoverResizeTest, NoAntialiasing) {
  std::vector<std::uint8_t> stripes(4 * 16 * 3);
  for (std::size_t i = 0; i < stripes.size(); ++i)
    stripes[i] = i / 3 % 4 == 1 || i / 3 % 4 == 2 ? 200 : 0;
  CoverResize resize;
  std::vector<std::uint8_t> out(4 * 3);
  resize(frame_of(stripes, 4, 16), 1, 4, out.data());
  for (const std::uint8_t v : out) EXPECT_EQ(v, 200);  // an antialiased one would be about 100
}

TEST(CoverResizeTest, SameSizeIsACopy) {
  std::vector<std::uint8_t> noise(5 * 7 * 3), out(noise.size());
  for (std::size_t i = 0; i < noise.size(); ++i)
    noise[i] = static_cast<std::uint8_t>(i * 37 + i / 5);
  CoverResize resize;
  resize(frame_of(noise, 5, 7), 5, 7, out.data());
  EXPECT_EQ(out, noise);
}

}  // namespace
}  // namespace weft
