// One frame of a video; validation/check_frames.py compares its bytes with OpenCV's.
#include "media/video_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/writers.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::HasSubstr;

constexpr std::int64_t height = 48, width = 64, frames = 14;

// Grey of the upper half of a frame; the lower one is 10 levels darker.
int grey(std::int64_t frame) { return 30 + 15 * static_cast<int>(frame); }

class FrameAt : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    std::vector<std::uint8_t> rgb;
    for (std::int64_t i = 0; i < frames * height * width * 3; ++i) {
      const std::int64_t frame = i / (height * width * 3), row = i / (width * 3) % height;
      rgb.push_back(static_cast<std::uint8_t>(grey(frame) - (row < height / 2 ? 0 : 10)));
    }
    write_mp4(path("clip.mp4"), {rgb.data(), frames, height, width}, 24);
    clip_ = read("clip.mp4");
  }

  PickedFrame at(const std::string& name, std::int64_t index,
                 const MediaAccess& access = {}) const {
    return frame_at({path(name)}, index, access);
  }
  static int pixel(const PickedFrame& f, std::int64_t y, std::int64_t x) {
    return f.rgb.at(static_cast<std::size_t>((y * f.width + x) * 3));
  }
  static void is_black(const PickedFrame& f, std::int64_t side_y, std::int64_t side_x) {
    EXPECT_EQ(f.height, side_y);
    EXPECT_EQ(f.width, side_x);
    EXPECT_EQ(f.rgb, std::vector<std::uint8_t>(side_y * side_x * 3));
    EXPECT_THAT(f.fault, HasSubstr("a black frame stands in"));
  }

  std::string clip_;  // bytes of clip.mp4
};

TEST_F(FrameAt, IsTheOneAskedForOrTheLast) {
  for (const auto& [index, wanted] :
       {std::pair(0, 0), {1, 1}, {2, 2}, {10, 10}, {13, 13}, {14, 13}, {1'000'000, 13}}) {
    const PickedFrame f = at("clip.mp4", index);
    EXPECT_EQ(f.fault, "");
    ASSERT_EQ(f.height, height);
    ASSERT_EQ(f.width, width);
    ASSERT_EQ(f.rgb.size(), static_cast<std::size_t>(height * width * 3));
    EXPECT_NEAR(pixel(f, 8, 8), grey(wanted), 4) << index;
    EXPECT_NEAR(pixel(f, 40, 56), grey(wanted) - 10, 4) << index;
  }
}

TEST_F(FrameAt, IsTurnedAsTheFileSays) {
  // The matrix of the track header: a, b, u, c, d, v, x, y, w.
  const std::size_t matrix = clip_.find("tkhd") + 4 + 40;
  ASSERT_EQ(clip_.substr(matrix, 4), std::string("\0\1\0\0", 4));
  const std::string zero(4, '\0'), one("\0\1\0\0", 4), minus("\xff\xff\0\0", 4);
  std::string bytes = clip_;
  const auto turn = [&](const std::string& a, const std::string& b, const std::string& c,
                        const std::string& d) {
    bytes.replace(matrix, 20, a + b + zero + c + d);
    write("turned.mp4", bytes);
    return at("turned.mp4", 10);
  };
  const PickedFrame clockwise = turn(zero, one, minus, zero);
  ASSERT_EQ(clockwise.height, width);
  ASSERT_EQ(clockwise.width, height);
  EXPECT_NEAR(pixel(clockwise, 30, 40) - pixel(clockwise, 30, 8), 10, 2);
  const PickedFrame counter = turn(zero, minus, one, zero);
  ASSERT_EQ(counter.width, height);
  EXPECT_NEAR(pixel(counter, 30, 8) - pixel(counter, 30, 40), 10, 2);
  const PickedFrame over = turn(minus, zero, zero, minus);
  ASSERT_EQ(over.width, width);
  EXPECT_NEAR(pixel(over, 40, 30) - pixel(over, 8, 30), 10, 2);
}

TEST_F(FrameAt, OfNoVideoIsBlack) {
  write("text.mp4", "this is no video\n");
  write("empty.mp4", "");
  write("half.mp4", clip_.substr(0, clip_.size() / 4));
  for (const char* name : {"text.mp4", "empty.mp4", "half.mp4", "absent.mp4"}) {
    const PickedFrame f = at(name, 10);
    is_black(f, 256, 256);
    EXPECT_THAT(f.fault, HasSubstr(name));
  }
}

TEST_F(FrameAt, OfDamagedFramesIsTheFirstOrBlack) {
  // The frames' bytes end where the index begins, or the file.
  const std::size_t begin = clip_.find("mdat") + 4, index = clip_.find("moov", begin);
  const std::size_t end = index == std::string::npos ? clip_.size() : index - 4;
  ASSERT_LT(begin, end);
  const auto damage = [&](const std::string& name, std::size_t from) {
    std::string bytes = clip_;
    bytes.replace(from, end - from, end - from, '\xff');
    write(name, bytes);
  };
  // The first frame takes most of them.
  damage("later.mp4", begin + (end - begin) * 85 / 100);
  const PickedFrame first = at("later.mp4", 13);
  EXPECT_THAT(first.fault, HasSubstr("its first frame stands in"));
  ASSERT_EQ(first.height, height);
  EXPECT_NEAR(pixel(first, 8, 8), grey(0), 4);

  damage("all.mp4", begin);
  is_black(at("all.mp4", 10), height, width);
}

TEST_F(FrameAt, LimitsAreFaults) {
  MediaAccess access;
  access.limits.max_megapixels = 0.001;
  const PickedFrame large = at("clip.mp4", 10, access);
  is_black(large, 256, 256);
  EXPECT_THAT(large.fault, HasSubstr("media.max_megapixels = 0.001"));
  access = {};
  access.limits.max_gib = 1e-7;
  EXPECT_THAT(at("clip.mp4", 10, access).fault, HasSubstr("media.max_gib"));
  EXPECT_THAT(frame_at({"lavfi:testsrc2=duration=1"}, 0, {}).fault, HasSubstr("may not be named"));
}

TEST_F(FrameAt, StopsOnRequest) {
  const MediaAccess access = {{}, [] { return true; }};
  try {
    at("clip.mp4", 10, access);
    FAIL() << "no stop";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::stopped);
  }
}

}  // namespace
}  // namespace weft
