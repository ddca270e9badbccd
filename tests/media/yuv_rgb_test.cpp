// Frames of YUV to RGB: against libswscale, whose bytes ours are.
#include "media/yuv_rgb.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

extern "C" {
#include <libavutil/frame.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
}

#include "media/resize.h"
#include "media/video_reader.h"

namespace weft {
namespace {

struct Free {
  void operator()(AVFrame* frame) const { av_frame_free(&frame); }
  void operator()(SwsContext* context) const { sws_freeContext(context); }
};
using Frame = std::unique_ptr<AVFrame, Free>;

// Every byte is random, so that sums also leave the range of RGB, and wrap around.
Frame noise(int height, int width, AVPixelFormat format = AV_PIX_FMT_YUV420P) {
  Frame frame(av_frame_alloc());
  frame->format = format;
  frame->height = height;
  frame->width = width;
  EXPECT_GE(av_frame_get_buffer(frame.get(), 0), 0);
  std::uint32_t state = 1;
  for (int plane = 0; plane < 3; ++plane)
    for (int y = 0; y < (plane == 0 ? height : (height + 1) / 2); ++y)
      for (int x = 0; x < frame->linesize[plane]; ++x) {
        state = state * 1664525 + 1013904223;
        frame->data[plane][y * frame->linesize[plane] + x] = static_cast<std::uint8_t>(state >> 24);
      }
  return frame;
}

std::vector<std::uint8_t> ours(const AVFrame& frame) {
  YuvRows rows;
  rows.set(frame);
  std::vector<std::uint8_t> rgb(static_cast<std::size_t>(frame.height * frame.width * 3));
  for (int y = 0; y < frame.height; ++y) rows.row(y, &rgb[y * frame.width * 3]);
  return rgb;
}

std::vector<std::uint8_t> swscale(const AVFrame& frame, int matrix, bool full_range) {
  std::unique_ptr<SwsContext, Free> context(sws_alloc_context());
  const auto set = [&](const char* name, int value) {
    EXPECT_GE(av_opt_set_int(context.get(), name, value, 0), 0) << name;
  };
  set("srcw", frame.width), set("dstw", frame.width);
  set("srch", frame.height), set("dsth", frame.height);
  set("src_format", AV_PIX_FMT_YUV420P), set("dst_format", AV_PIX_FMT_RGB24);
  set("sws_flags", SWS_BILINEAR | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT);
  set("src_v_chr_pos", 128);  // as the filter `scale` sets it
  const int* factors = sws_getCoefficients(matrix);
  sws_setColorspaceDetails(context.get(), factors, full_range ? 1 : 0, factors, 1, 0, 1 << 16,
                           1 << 16);
  EXPECT_GE(sws_init_context(context.get(), nullptr, nullptr), 0);
  std::vector<std::uint8_t> rgb(static_cast<std::size_t>(frame.height * frame.width * 3));
  std::uint8_t* to[4] = {rgb.data()};
  const int stride[4] = {frame.width * 3};
  sws_scale(context.get(), frame.data, frame.linesize, 0, frame.height, to, stride);
  return rgb;
}

TEST(YuvRowsTest, SwscalesBytes) {
  const std::pair<AVColorSpace, int> matrices[] = {
      {AVCOL_SPC_UNSPECIFIED, SWS_CS_DEFAULT}, {AVCOL_SPC_BT709, SWS_CS_ITU709},
      {AVCOL_SPC_BT470BG, SWS_CS_ITU601},      {AVCOL_SPC_SMPTE170M, SWS_CS_SMPTE170M},
      {AVCOL_SPC_SMPTE240M, SWS_CS_SMPTE240M}, {AVCOL_SPC_BT2020_NCL, SWS_CS_BT2020}};
  const std::pair<int, int> sizes[] = {{32, 32}, {34, 62}, {36, 64}, {34, 854}};
  for (const auto& [space, matrix] : matrices)
    for (const auto& [height, width] : sizes)
      for (const bool full_range : {false, true}) {
        const Frame frame = noise(height, width);
        frame->colorspace = space;
        frame->color_range = full_range ? AVCOL_RANGE_JPEG : AVCOL_RANGE_UNSPECIFIED;
        ASSERT_TRUE(is_plain_yuv(*frame));
        EXPECT_EQ(ours(*frame), swscale(*frame, matrix, full_range))
            << space << " " << height << "x" << width << " " << full_range;
      }
}

// As the filter vflip gives them: the last row comes first, and rows lie backwards.
TEST(YuvRowsTest, RowsMayLieBackwards) {
  const Frame frame = noise(34, 40);
  for (int plane = 0; plane < 3; ++plane) {
    frame->data[plane] += ((plane == 0 ? 34 : 17) - 1) * frame->linesize[plane];
    frame->linesize[plane] *= -1;
  }
  EXPECT_EQ(ours(*frame), swscale(*frame, SWS_CS_DEFAULT, false));
}

TEST(YuvRowsTest, LeavesOtherFramesToSwscale) {
  EXPECT_TRUE(is_plain_yuv(*noise(32, 34)));
  EXPECT_FALSE(is_plain_yuv(*noise(33, 34)));
  EXPECT_FALSE(is_plain_yuv(*noise(32, 35)));
  EXPECT_FALSE(is_plain_yuv(*noise(32, 30)));
  EXPECT_FALSE(is_plain_yuv(*noise(32, 34, AV_PIX_FMT_YUV420P10)));
  const Frame frame = noise(32, 34);
  frame->colorspace = AVCOL_SPC_YCGCO;
  EXPECT_FALSE(is_plain_yuv(*frame));
}

TEST(YuvRowsTest, Ranges) {
  const std::tuple<AVPixelFormat, AVColorRange, bool> ranges[] = {
      {AV_PIX_FMT_YUV420P, AVCOL_RANGE_MPEG, false},
      {AV_PIX_FMT_YUVJ420P, AVCOL_RANGE_UNSPECIFIED, true},
      {AV_PIX_FMT_YUVJ420P, AVCOL_RANGE_JPEG, true}};
  for (const auto& [format, range, full] : ranges) {
    const Frame frame = noise(34, 62, format);
    frame->color_range = range;
    ASSERT_TRUE(is_plain_yuv(*frame));
    EXPECT_EQ(ours(*frame), swscale(*frame, SWS_CS_DEFAULT, full)) << format << " " << range;
  }
  const Frame frame = noise(34, 62, AV_PIX_FMT_YUVJ420P);  // the two contradict each other
  frame->color_range = AVCOL_RANGE_MPEG;
  EXPECT_FALSE(is_plain_yuv(*frame));
}

// A stream, against the filters that make RGB of frames that are not plain.
TEST(YuvRowsTest, StreamsAreAsByTheFilterScale) {
  const std::string plain = "lavfi:testsrc2=duration=1:rate=5:size=70x46,format=yuv420p";
  const Footage rows = read_frames({plain, MediaTrust::deck});
  const Footage scaled =
      read_frames({plain + ",scale=flags=bilinear+accurate_rnd+full_chroma_int,format=rgb24",
                   MediaTrust::deck});
  EXPECT_EQ(rows.frames, 5);
  EXPECT_EQ(rows.rgb, scaled.rgb);
}

// Rows that are converted as they are asked for, in vectors, make the bytes of the whole frame,
// pixel by pixel.
TEST(YuvRowsTest, ScalesAsRgbDoes) {
  const Frame frame = noise(46, 58);
  const std::vector<std::uint8_t> rgb = ours(*frame);
  VideoFrame whole{rgb.data(), 3 * 58, 46, 58}, by_rows{nullptr, 0, 46, 58};
  YuvRows rows;
  rows.set(*frame);
  by_rows.yuv = &rows;
  const std::pair<int, int> sizes[] = {{46, 58}, {20, 27}, {33, 41}, {100, 60}, {7, 53}};
  for (const auto& [height, width] : sizes) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(height * width * 3)), same(bytes);
    std::vector<float> exact(bytes.size());
    CoverResize resize;
    resize(whole, height, width, bytes.data());
    resize(by_rows, height, width, same.data());
    resize(whole, height, width, exact.data());
    EXPECT_EQ(bytes, same) << height << "x" << width;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      ASSERT_EQ(bytes[i], static_cast<std::uint8_t>(exact[i] + 0.5f)) << i;
  }
}

}  // namespace
}  // namespace weft
