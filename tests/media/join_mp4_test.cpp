// Clips joined from segments, with sound.
#include "media/writers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/audio.h"
#include "media/video_reader.h"
#include "tests/folder.h"
#include "tests/media/wav.h"

namespace weft {
namespace {

using testing::HasSubstr;

constexpr double fps = 25;

class JoinMp4 : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    clip_ = read_frames({"lavfi:testsrc2=duration=2:rate=25:size=64x48", MediaTrust::deck});
    ASSERT_EQ(clip_.frames, 50);
  }
  std::string file(const std::string& name) const { return (dir_ / name).string(); }
  std::string bytes(const std::string& path) const {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  // Frames [begin, end) of the clip as a segment.
  std::string segment(std::int64_t begin, std::int64_t end) const {
    const std::string path = file(std::to_string(begin) + "-" + std::to_string(end) + ".mp4");
    fs::remove(path);
    Mp4Writer writer(path, clip_.height, clip_.width, Mp4Options{fps, true});
    writer.add({clip_.rgb.data() + begin * frame_bytes(), end - begin, clip_.height, clip_.width});
    EXPECT_FALSE(fs::exists(path));
    writer.finish();
    return path;
  }
  std::int64_t frame_bytes() const { return clip_.height * clip_.width * 3; }
  // A tone, [seconds * rate, channels].
  std::string tone(double seconds, int rate, int channels) const {
    std::vector<std::int16_t> samples;
    for (int i = 0; i < static_cast<int>(seconds * rate); ++i)
      for (int c = 0; c < channels; ++c)
        samples.push_back(
            static_cast<std::int16_t>(std::lround(8000 * std::sin(2 * M_PI * 300 * i / rate))));
    const std::string path = file("tone.wav");
    std::ofstream(path, std::ios::binary) << wav(samples, channels, rate);
    return path;
  }
  // Seconds of a file's sound.
  double heard(const std::string& path, std::int64_t rate, int channels) const {
    AudioReader reader({path}, {.rate = 0, .channels = 0});
    EXPECT_EQ(reader.rate(), rate);
    EXPECT_EQ(reader.channels(), channels);
    std::size_t values = 0;
    for (auto some = reader.next(); !some.empty(); some = reader.next()) values += some.size();
    return static_cast<double>(values) / static_cast<double>(rate * channels);
  }
  void expect_refused(const std::vector<std::string>& segments, const std::string& what) {
    try {
      join_mp4(segments, {}, fps, file("out.mp4"));
      FAIL() << "joined";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(what));
    }
    EXPECT_FALSE(fs::exists(file("out.mp4")));
    EXPECT_FALSE(fs::exists(file(".out.mp4.partial")));
  }

  Footage clip_;
};

TEST_F(JoinMp4, ShowsTheSegmentsFramesInOrder) {
  // Of one frame and of two as well, fewer than an encoder reorders.
  const std::vector<std::string> parts = {segment(0, 20), segment(20, 21), segment(21, 23),
                                          segment(23, 50)};
  EXPECT_EQ(join_mp4(parts, {}, fps, file("out.mp4")), 50);
  std::vector<std::uint8_t> expected;
  for (const std::string& part : parts) {
    const Footage some = read_frames({part});
    expected.insert(expected.end(), some.rgb.begin(), some.rgb.end());
  }
  VideoReader reader({file("out.mp4")});
  EXPECT_NEAR(reader.fps(), fps, 1e-6);
  std::int64_t t = 0;
  for (const VideoFrame* frame = reader.next(); frame != nullptr; frame = reader.next(), ++t) {
    ASSERT_LT(t, 50);
    EXPECT_NEAR(frame->seconds, static_cast<double>(t) / fps, 1e-6);
    for (std::int64_t y = 0; y < frame->height; ++y)
      ASSERT_EQ(0, std::memcmp(frame->rgb + y * frame->stride,
                               expected.data() + t * frame_bytes() + y * 3 * frame->width,
                               static_cast<std::size_t>(3 * frame->width)))
          << t;
  }
  EXPECT_EQ(t, 50);
  EXPECT_EQ(reader.damaged(), 0);
}

TEST_F(JoinMp4, TheSameSegmentsGiveTheSameBytes) {
  const std::vector<std::string> parts = {segment(0, 25), segment(25, 50)};
  const std::string first = bytes(parts[0]);
  EXPECT_EQ(bytes(segment(0, 25)), first);
  const Mp4Sound sound{tone(2, 44100, 2)};
  join_mp4(parts, sound, fps, file("a.mp4"));
  join_mp4(parts, sound, fps, file("b.mp4"));
  EXPECT_EQ(bytes(file("a.mp4")), bytes(file("b.mp4")));
  EXPECT_FALSE(fs::exists(file(".a.mp4.partial")));
}

TEST_F(JoinMp4, SoundIsCutToThePictures) {
  join_mp4({segment(0, 50)}, {tone(3.5, 48000, 2)}, fps, file("out.mp4"));
  // AAC comes in frames of 1024 samples.
  EXPECT_NEAR(heard(file("out.mp4"), 48000, 2), 2, 1024.0 / 48000);
  EXPECT_EQ(read_frames({file("out.mp4")}).frames, 50);
}

TEST_F(JoinMp4, ShorterSoundEndsBeforeThePictures) {
  join_mp4({segment(0, 25), segment(25, 50)}, {tone(0.7, 16000, 1)}, fps, file("out.mp4"));
  EXPECT_NEAR(heard(file("out.mp4"), 16000, 1), 0.7, 1024.0 / 16000);
  EXPECT_EQ(read_frames({file("out.mp4")}).frames, 50);
}

TEST_F(JoinMp4, SoundIsInStepWithThePictures) {
  // Silence, then a tone from the first second on.
  std::vector<float> samples(32000, 0.0f);
  for (std::size_t i = 16000; i < samples.size(); ++i)
    samples[i] = 0.5f * static_cast<float>(std::sin(0.2 * static_cast<double>(i)));
  join_mp4({segment(0, 50)}, {.samples = samples}, fps, file("out.mp4"));
  const std::vector<float> back = read_speech(file("out.mp4"));
  ASSERT_GE(back.size(), 31000u);
  const auto loud = [&](std::size_t from, std::size_t to) {
    double sum = 0;
    for (std::size_t i = from; i < to; ++i) sum += back[i] * back[i];
    return std::sqrt(sum / static_cast<double>(to - from));
  };
  EXPECT_LT(loud(0, 15000), 0.01);
  EXPECT_GT(loud(16200, 31000), 0.3);
}

TEST_F(JoinMp4, RatesWithoutAacAreResampled) {
  join_mp4({segment(0, 25)}, {tone(1, 50000, 1)}, fps, file("out.mp4"));
  EXPECT_NEAR(heard(file("out.mp4"), 48000, 1), 1, 1024.0 / 48000);
}

TEST_F(JoinMp4, RefusesSegmentsThatDoNotFit) {
  const std::string good = segment(0, 25);
  expect_refused({good, file("missing.mp4")}, "missing.mp4");
  const std::string other = file("other.mp4");
  {
    const std::vector<std::uint8_t> grey(32 * 32 * 3, 99);
    Mp4Writer writer(other, 32, 32, Mp4Options{fps, true});
    writer.add({grey.data(), 1, 32, 32});
    writer.finish();
  }
  expect_refused({good, other}, "differ");
  {
    Mp4Writer writer(other, clip_.height, clip_.width, Mp4Options{10, true});
    writer.add({clip_.rgb.data(), 3, clip_.height, clip_.width});
    writer.finish();
  }
  expect_refused({other}, "");
  const std::string whole = bytes(good);
  std::ofstream(other, std::ios::binary) << whole.substr(0, whole.size() / 2);
  expect_refused({good, other}, "other.mp4");
}

TEST_F(JoinMp4, ASoundThatCannotBeReadLeavesNothing) {
  std::ofstream(file("tone.wav"), std::ios::binary) << "no sound";
  EXPECT_THROW(join_mp4({segment(0, 5)}, {file("tone.wav")}, fps, file("out.mp4")), Error);
  EXPECT_FALSE(fs::exists(file("out.mp4")));
  EXPECT_FALSE(fs::exists(file(".out.mp4.partial")));
}

}  // namespace
}  // namespace weft
