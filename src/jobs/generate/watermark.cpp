#include "jobs/generate/watermark.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "media/open_media.h"

namespace weft {
namespace {

// To [to_height, to_width, 4] bytes of red, green, blue and alpha.
std::vector<std::uint8_t> scale(const std::uint8_t* const* planes, const int* strides,
                                AVPixelFormat format, std::int64_t height, std::int64_t width,
                                std::int64_t to_height, std::int64_t to_width) {
  const ff::Ptr<SwsContext> convert(
      sws_getContext(static_cast<int>(width), static_cast<int>(height), format,
                     static_cast<int>(to_width), static_cast<int>(to_height), AV_PIX_FMT_RGBA,
                     SWS_BICUBIC | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
  WEFT_ASSERT(convert != nullptr);
  // swscale writes whole vectors, past the last pixel: give it padded rows, with space behind the
  // last one.
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

Watermark::Watermark(const std::string& path, const MediaDeck& limits) {
  ff::OpenMedia media({path, MediaTrust::deck}, {limits, {}});
  const ff::Ptr<AVCodecContext> decoder = media.open_decoder(1);
  const ff::OpenMedia::Work work(media);
  const ff::Ptr<AVPacket> packet(av_packet_alloc());
  const ff::Ptr<AVFrame> frame(av_frame_alloc());
  do {
    av_packet_unref(packet.get());
    media.check(av_read_frame(media.format(), packet.get()), "read");
  } while (packet->stream_index != media.stream()->index);
  media.check(avcodec_send_packet(decoder.get(), packet.get()), "decode");
  media.check(avcodec_send_packet(decoder.get(), nullptr), "decode");
  media.check(avcodec_receive_frame(decoder.get(), frame.get()), "decode");
  media.check_size(frame->height, frame->width);
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
