// Sound read from files of many kinds, sane and not.
#include "media/audio.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "tests/folder.h"
#include "tests/media/wav.h"

namespace weft {
namespace {

using testing::HasSubstr;

class AudioTest : public FolderTest {
 protected:
  void expect_broken(const std::string& path, const std::string& what,
                     const MediaAccess& access = {}) {
    try {
      read_speech(path, 16000, access);
      FAIL() << path << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(path));
      EXPECT_THAT(e.what(), HasSubstr(what));
    }
  }
};

TEST_F(AudioTest, SamplesOfTheSameRateAreTheFilesOwn) {
  std::vector<std::int16_t> samples;
  for (int i = 0; i < 5000; ++i) samples.push_back(static_cast<std::int16_t>((i * 7919) % 65536));
  const std::vector<float> read = read_speech(write("a.wav", wav(samples, 1, 16000)));
  ASSERT_EQ(read.size(), samples.size());
  for (std::size_t i = 0; i < read.size(); ++i)
    ASSERT_FLOAT_EQ(read[i], static_cast<float>(samples[i]) / 32768) << i;
}

TEST_F(AudioTest, StereoIsTheMeanAndResampled) {
  constexpr int rate = 48000;
  constexpr double hz = 440;
  std::vector<std::int16_t> both;
  for (int i = 0; i < rate; ++i) {
    const double left = 0.5 * std::sin(2 * M_PI * hz * i / rate);
    both.push_back(static_cast<std::int16_t>(std::lround(32767 * left)));
    both.push_back(static_cast<std::int16_t>(std::lround(32767 * 0.5 * left)));
  }
  const std::vector<float> read = read_speech(write("a.wav", wav(both, 2, rate)));
  ASSERT_EQ(read.size(), 16000u);
  // Away from the ends, where the resampler sees what is not there.
  for (std::size_t i = 200; i + 200 < read.size(); ++i)
    ASSERT_NEAR(read[i], 0.375 * std::sin(2 * M_PI * hz * static_cast<double>(i) / 16000), 2e-3)
        << i;
}

TEST_F(AudioTest, LengthsAreExactAtAnyRate) {
  for (const int rate : {8000, 11025, 22050, 44100, 96000})
    for (const int count : {1, 1000, 44101}) {
      const auto path = write("a.wav", wav(std::vector<std::int16_t>(count, 100), 1, rate));
      EXPECT_EQ(read_speech(path).size(),
                static_cast<std::size_t>((count * 16000LL + rate - 1) / rate))
          << rate << " " << count;
    }
}

TEST_F(AudioTest, EightBits) {
  const std::vector<std::uint8_t> samples = {0, 64, 128, 192, 255};
  const std::vector<float> read = read_speech(write("a.wav", wav(samples, 1, 16000)));
  EXPECT_THAT(read,
              testing::Pointwise(testing::FloatEq(), {-1.0f, -0.5f, 0.0f, 0.5f, 127.0f / 128}));
}

TEST_F(AudioTest, StereoIsKeptWhereWanted) {
  const std::vector<std::int16_t> both = {100, -200, 300, -400};
  AudioReader reader({write("a.wav", wav(both, 2, 22050))}, {.rate = 0, .channels = 0});
  EXPECT_EQ(reader.rate(), 22050);
  EXPECT_EQ(reader.channels(), 2);
  std::vector<float> all;
  for (auto some = reader.next(); !some.empty(); some = reader.next())
    all.insert(all.end(), some.begin(), some.end());
  ASSERT_EQ(all.size(), both.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    EXPECT_FLOAT_EQ(all[i], static_cast<float>(both[i]) / 32768);
  EXPECT_TRUE(reader.next().empty());  // and stays at the end
}

// What a recorder that was cut off leaves behind: its sound up to there.
TEST_F(AudioTest, ATruncatedWavHasWhatIsThere) {
  const std::string whole = wav(std::vector<std::int16_t>(16000, 1000), 1, 16000);
  const std::vector<float> read = read_speech(write("a.wav", whole.substr(0, 44 + 2 * 4000)));
  EXPECT_EQ(read.size(), 4000u);
}

TEST_F(AudioTest, FloatsMayBeLoudButMustBeNumbers) {
  const std::vector<float> loud = {0.25f, -3.5f};
  EXPECT_EQ(read_speech(write("a.wav", wav(loud, 1, 16000))), loud);
  const std::vector<float> broken = {0.25f, std::numeric_limits<float>::quiet_NaN()};
  expect_broken(write("b.wav", wav(broken, 1, 16000)), "has the sample nan after 0.000 s");
  const std::vector<float> deafening = {0.25f, -3e38f};
  expect_broken(write("c.wav", wav(deafening, 1, 16000)), "1000 either way of 0 is the most");
}

TEST_F(AudioTest, RatesThatNoSoundHas) {
  const std::vector<std::int16_t> samples(1000, 7);
  expect_broken(write("a.wav", wav(samples, 1, 1)), "claims 1 samples a second; 1000 to 768000");
  expect_broken(write("b.wav", wav(samples, 1, 999)), "claims 999 samples");
  expect_broken(write("c.wav", wav(samples, 1, 2'000'000)), "claims 2000000 samples");
  EXPECT_EQ(read_speech(write("d.wav", wav(samples, 1, 1000))).size(), 16000u);
}

// Speech after a pause takes more bits than the beginning, from which FFmpeg estimates the length.
TEST_F(AudioTest, AnEstimatedLengthIsNoPromise) {
  for (const std::string how : {"-c:a aac -b:a 64k x.aac",
                                "-c:a libmp3lame -q:a 4 -write_xing 0 "
                                "-id3v2_version 0 x.mp3"}) {
    const std::string command = "cd " + dir_.string() +
                                " && ffmpeg -nostdin -v error -f lavfi -i "
                                "'aevalsrc=if(lt(t\\,1)\\,0\\,random(0)-0.5):d=5' " +
                                how;
    ASSERT_EQ(std::system(command.c_str()), 0) << how;
    EXPECT_NEAR(
        static_cast<double>(read_speech((dir_ / how.substr(how.rfind(' ') + 1)).string()).size()),
        5 * 16000, 4000)
        << how;
  }
}

TEST_F(AudioTest, RefusesWhatIsNoSound) {
  expect_broken((dir_ / "missing.wav").string(), "No such file");
  expect_broken(write("text.txt", "a text, which is no sound"), "");
  expect_broken(write("empty.wav", ""), "");
  expect_broken(write("header.wav", wav(std::vector<std::int16_t>{}, 1, 16000)), "");
  // A playlist would name other files.
  expect_broken(write("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n"),
                "hls");
  const std::string silent = (dir_ / "silent.mp4").string();
  const Footage made =
      read_frames({"lavfi:testsrc2=duration=1:rate=5:size=32x32", MediaTrust::deck});
  write_mp4(silent, {made.rgb.data(), made.frames, made.height, made.width}, 5);
  expect_broken(silent, "has no sound");
}

TEST_F(AudioTest, LengthAndSizeAreLimited) {
  const auto path = write("a.wav", wav(std::vector<std::int16_t>(160000, 1), 1, 16000));
  MediaAccess access;
  access.limits.max_hours = 5.0 / 3600;
  expect_broken(path, "max_hours", access);
  access = {};
  access.limits.max_gib = 1e-5;
  expect_broken(path, "max_gib", access);
}

// A header may promise any length: only what is there counts against the limit.
TEST_F(AudioTest, PromisesOfTheHeaderAreNotBelieved) {
  std::string bytes = wav(std::vector<std::int16_t>(16000, 1), 1, 16000);
  for (std::size_t i = 40; i < 44; ++i) bytes[i] = '\x7f';
  EXPECT_EQ(read_speech(write("a.wav", bytes)).size(), 16000u);
}

TEST_F(AudioTest, StopsOnRequest) {
  MediaAccess access;
  access.stop = [] { return true; };
  try {
    read_speech(write("a.wav", wav(std::vector<std::int16_t>(16000, 1), 1, 16000)), 16000, access);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::stopped);
  }
}

}  // namespace
}  // namespace weft
