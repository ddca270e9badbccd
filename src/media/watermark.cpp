#include "media/watermark.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "media/ffmpeg.h"

namespace weft {
namespace {

struct Input {
  AVFormatContext* format = nullptr;
  ~Input() { avformat_close_input(&format); }
};

void check(const std::string& path, int code) {
  WEFT_CHECK(code >= 0, Exit::data, "name a picture that FFmpeg reads, such as a PNG",
             "cannot read watermark {}: {}", path, ff::reason(code));
}

// To [to_height, to_width, 4] bytes of red, green, blue and alpha.
std::vector<std::uint8_t> scale(const std::uint8_t* const* planes, const int* strides,
                                AVPixelFormat format, std::int64_t height, std::int64_t width,
                                std::int64_t to_height, std::int64_t to_width) {
  const ff::Ptr<SwsContext> convert(
      sws_getContext(static_cast<int>(width), static_cast<int>(height), format,
                     static_cast<int>(to_width), static_cast<int>(to_height), AV_PIX_FMT_RGBA,
                     SWS_BICUBIC | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
  WEFT_ASSERT(convert != nullptr);
  // swscale writes whole vectors: rows of its own, with room behind them.
  const std::int64_t stride = (to_width * 4 + 63) / 64 * 64;
  std::vector<std::uint8_t> padded(static_cast<std::size_t>(stride * to_height + 64));
  std::uint8_t* const to[] = {padded.data()};
  const int to_strides[] = {static_cast<int>(stride)};
  sws_scale(convert.get(), planes, strides, 0, static_cast<int>(height), to, to_strides);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(to_height * to_width * 4));
  for (std::int64_t y = 0; y < to_height; ++y)
    std::copy_n(padded.data() + y * stride, to_width * 4, out.data() + y * to_width * 4);
  return out;
}

}  // namespace

Watermark::Watermark(const std::string& path) : path_(path) {
  ff::quiet();
  Input in;
  check(path, avformat_open_input(&in.format, path.c_str(), nullptr, nullptr));
  check(path, avformat_find_stream_info(in.format, nullptr));
  const AVCodec* codec = nullptr;
  const int stream = av_find_best_stream(in.format, AVMEDIA_TYPE_VIDEO, -1, -1, &codec, 0);
  check(path, stream);
  const ff::Ptr<AVCodecContext> decoder(avcodec_alloc_context3(codec));
  check(path, avcodec_parameters_to_context(decoder.get(), in.format->streams[stream]->codecpar));
  check(path, avcodec_open2(decoder.get(), codec, nullptr));
  const ff::Ptr<AVPacket> packet(av_packet_alloc());
  const ff::Ptr<AVFrame> frame(av_frame_alloc());
  do {
    av_packet_unref(packet.get());
    check(path, av_read_frame(in.format, packet.get()));
  } while (packet->stream_index != stream);
  check(path, avcodec_send_packet(decoder.get(), packet.get()));
  check(path, avcodec_send_packet(decoder.get(), nullptr));
  check(path, avcodec_receive_frame(decoder.get(), frame.get()));
  height_ = frame->height;
  width_ = frame->width;
  rgba_ = scale(frame->data, frame->linesize, static_cast<AVPixelFormat>(frame->format), height_,
                width_, height_, width_);
}

void Watermark::lay_over(std::uint8_t* rgb, std::int64_t frames, std::int64_t height,
                         std::int64_t width) const {
  const std::int64_t h = std::max<std::int64_t>(2, height / 10);
  const std::int64_t w = std::max<std::int64_t>(
      2, std::lround(static_cast<double>(h * width_) / static_cast<double>(height_)));
  const std::uint8_t* const planes[] = {rgba_.data()};
  const int strides[] = {static_cast<int>(width_ * 4)};
  const std::vector<std::uint8_t> small =
      scale(planes, strides, AV_PIX_FMT_RGBA, height_, width_, h, w);
  for (std::int64_t t = 0; t < frames; ++t)
    for (std::int64_t y = 0; y < std::min(h, height); ++y)
      for (std::int64_t x = 0; x < std::min(w, width); ++x) {
        const std::uint8_t* over = small.data() + (y * w + x) * 4;
        std::uint8_t* under = rgb + ((t * height + y) * width + x) * 3;
        for (int c = 0; c < 3; ++c)
          under[c] = static_cast<std::uint8_t>(
              (over[c] * over[3] + under[c] * (255 - over[3]) + 127) / 255);
      }
}

}  // namespace weft
