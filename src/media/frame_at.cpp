#include "media/frame_at.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "core/error.h"
#include "media/bytes/orientation.h"
#include "media/ffmpeg.h"
#include "media/open_media.h"

extern "C" {
#include <libavutil/display.h>
#include <libavutil/imgutils.h>
#include <libavutil/pixdesc.h>
}

namespace weft {
namespace {

// As x86 converts to a whole number: what has none becomes the least one.
std::int64_t whole(double x) {
  return std::abs(x) < 9e18 ? static_cast<std::int64_t>(x)
                            : std::numeric_limits<std::int64_t>::min();
}
// Time stamps may be missing, or anything.
std::int64_t wrapped_sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}
std::int64_t wrapped_difference(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}

double ratio(AVRational r) { return r.num == 0 || r.den == 0 ? 0 : av_q2d(r); }

// How the pictures lie, as EXIF numbers it. OpenCV takes the angle alone, so that a mirrored
// picture is turned by 180 degrees, and applies quarter turns only.
int orientation_of(const AVStream& stream) {
  const std::int32_t* matrix = ff::display_matrix(stream);
  if (matrix == nullptr) return 1;
  const double degrees = av_display_rotation_get(matrix);
  if (!std::isfinite(degrees)) return 1;
  const int clockwise = (static_cast<int>(-std::nearbyint(degrees)) + 360) % 360;
  return clockwise == 90 ? 6 : clockwise == 180 ? 3 : clockwise == 270 ? 8 : 1;
}

// Whether the frame's memory has that many columns: beside those that are shown, decoders keep
// whole macroblocks.
bool has_columns(const AVFrame& frame, int columns) {
  const auto format = static_cast<AVPixelFormat>(frame.format);
  const AVPixFmtDescriptor* about = av_pix_fmt_desc_get(format);
  for (int plane = 0; plane < av_pix_fmt_count_planes(format); ++plane) {
    const AVBufferRef* memory = av_frame_get_plane_buffer(const_cast<AVFrame*>(&frame), plane);
    const int bytes = av_image_get_linesize(format, columns, plane), stride = frame.linesize[plane];
    if (memory == nullptr || bytes < 0 || stride < bytes) return false;
    const bool chroma = plane == 1 || plane == 2;
    const int rows = chroma ? AV_CEIL_RSHIFT(frame.height, about->log2_chroma_h) : frame.height;
    const std::uint8_t* end = memory->data + memory->size;
    if (end - frame.data[plane] < std::int64_t{rows - 1} * stride + bytes) return false;
  }
  return true;
}

// The steps of OpenCV's CvCapture_FFMPEG: which frame comes out depends on them where time stamps
// are odd or frames are damaged.
class Capture {
 public:
  Capture(const MediaSource& source, const MediaAccess& access)
      : media_(source, access),
        stream_(media_.stream()),
        decoder_(media_.open_decoder(1)),
        orientation_(orientation_of(*stream_)) {}

  // The frame, or false and reason().
  bool read(std::int64_t index, PickedFrame& out) {
    const ff::OpenMedia::Work work(media_);
    seek(std::min(index, std::max<std::int64_t>(count(), 0) - 1));
    return grab() && convert(out);
  }
  std::string reason() const { return ff::reason(code_); }

  // As the container says, after rotation.
  std::pair<std::int64_t, std::int64_t> height_width() const {
    const AVCodecParameters& p = *stream_->codecpar;
    if (is_sideways(orientation_)) return {p.width, p.height};
    return {p.height, p.width};
  }

 private:
  double fps() const { return ratio(av_guess_frame_rate(media_.format(), stream_, nullptr)); }
  std::int64_t count() const {
    if (stream_->nb_frames != 0) return stream_->nb_frames;
    double seconds = static_cast<double>(media_.format()->duration) / AV_TIME_BASE;
    if (seconds < 0.000025)
      seconds = static_cast<double>(stream_->duration) * ratio(stream_->time_base);
    return whole(std::floor(seconds * fps() + 0.5));
  }
  // The number of the frame in hand, by its time.
  std::int64_t number_by_time() const {
    const std::int64_t pts =
        picture_->pts != AV_NOPTS_VALUE && picture_->pts != 0 ? picture_->pts : picture_->pkt_dts;
    const double seconds = static_cast<double>(wrapped_difference(pts, stream_->start_time)) *
                           ratio(stream_->time_base);
    return whole(fps() * seconds + 0.5);
  }

  bool grab() {
    code_ = AVERROR_EOF;
    if (stream_->nb_frames > 0 && number_ > stream_->nb_frames) return false;
    constexpr int most_failures = 64, most_packets = 4096;
    int failures = 0, packets = 0;
    code_ = avcodec_receive_frame(decoder_.get(), picture_.get());
    while (code_ < 0) {
      media_.check_budget();
      av_packet_unref(packet_.get());
      code_ = av_read_frame(media_.format(), packet_.get());
      const bool end = code_ < 0 && code_ != AVERROR(EAGAIN);
      if (!end && (code_ < 0 || packet_->stream_index != stream_->index)) {
        if (++packets <= most_packets) continue;
        code_ = AVERROR(EAGAIN);
        return false;
      }
      // Without a packet, the decoder gives the frames that it holds.
      const int sent = avcodec_send_packet(decoder_.get(), end ? nullptr : packet_.get());
      if (sent < 0) {
        if (!end) code_ = sent;
        return false;
      }
      code_ = avcodec_receive_frame(decoder_.get(), picture_.get());
      if (code_ < 0 && code_ != AVERROR(EAGAIN) && ++failures > most_failures) return false;
    }
    media_.check_size(picture_->height, picture_->width);
    ++number_;
    if (first_ < 0) first_ = number_by_time();
    return true;
  }

  void seek(std::int64_t wanted) {
    const bool several = count() > 1;
    if (first_ < 0 && several) grab();
    for (std::int64_t before = 16;; before = before * 3 / 2) {
      const std::int64_t from = std::max<std::int64_t>(wanted - before, 0);
      if (several) {
        const double seconds = static_cast<double>(from) / fps();
        const std::int64_t time =
            wrapped_sum(stream_->start_time, whole(seconds / ratio(stream_->time_base) + 0.5));
        av_seek_frame(media_.format(), stream_->index, time, AVSEEK_FLAG_BACKWARD);
      }
      avcodec_flush_buffers(decoder_.get());
      number_ = std::clamp<std::int64_t>(wanted, 0, 1);
      if (wanted <= 0) return;
      const bool any = grab();
      number_ = 1;
      if (wanted == 1) return;
      number_ = any ? wrapped_difference(number_by_time(), first_) : -1;
      if (number_ >= 0 && number_ < wanted) break;
      if (from == 0) return;
    }
    while (number_ < wanted - 1 && grab()) continue;
    ++number_;
  }

  bool convert(PickedFrame& out) {
    const AVFrame& from = *picture_;
    // libswscale takes other code, and rounds otherwise, where a side is not a multiple of 8, 16 or
    // so: OpenCV converts as much as was coded, and shows what the container says.
    int width = decoder_->coded_width, height = decoder_->coded_height;
    if (width < from.width || height < from.height || !has_columns(from, width)) {
      width = from.width;
      height = from.height;
    }
    const AVCodecParameters& said = *stream_->codecpar;
    const bool fits =
        said.width > 0 && said.width <= width && said.height > 0 && said.height <= height;
    const auto format = static_cast<AVPixelFormat>(from.format);
    const ff::Ptr<SwsContext> scaler(sws_getContext(width, height, format, width, height,
                                                    AV_PIX_FMT_BGR24, SWS_BICUBIC, nullptr, nullptr,
                                                    nullptr));
    const ff::Ptr<AVFrame> bgr(av_frame_alloc());
    WEFT_ASSERT(bgr != nullptr);
    bgr->format = AV_PIX_FMT_BGR24;
    bgr->width = width;
    bgr->height = height;
    code_ = scaler == nullptr ? AVERROR(ENOSYS) : av_frame_get_buffer(bgr.get(), 32);
    if (code_ < 0) return false;
    // libswscale waits for the rows below the shown ones, where chroma of more than 8 bits is
    // interpolated, and leaves the last rows as they are: black here, anything in OpenCV.
    std::memset(bgr->buf[0]->data, 0, bgr->buf[0]->size);
    code_ =
        sws_scale(scaler.get(), from.data, from.linesize, 0, from.height, bgr->data, bgr->linesize);
    if (code_ < 0) return false;
    turn(*bgr, fits ? said.height : from.height, fits ? said.width : from.width, out);
    return true;
  }

  // The first rows and columns of `bgr`, turned, as RGB.
  void turn(const AVFrame& bgr, std::int64_t height, std::int64_t width, PickedFrame& out) const {
    const UprightWalk walk = upright_walk(orientation_, height, width, bgr.linesize[0]);
    out.height = height;
    out.width = width;
    if (is_sideways(orientation_)) std::swap(out.height, out.width);
    out.rgb.resize(static_cast<std::size_t>(height * width * 3));
    std::uint8_t* to = out.rgb.data();
    for (std::int64_t y = 0; y < out.height; ++y) {
      const std::uint8_t* pixel = bgr.data[0] + walk.first + y * walk.down;
      for (std::int64_t x = 0; x < out.width; ++x, pixel += walk.along, to += 3) {
        to[0] = pixel[2];
        to[1] = pixel[1];
        to[2] = pixel[0];
      }
    }
  }

  ff::OpenMedia media_;
  AVStream* stream_;
  ff::Ptr<AVCodecContext> decoder_;
  int orientation_;
  ff::Ptr<AVPacket> packet_{av_packet_alloc()};
  ff::Ptr<AVFrame> picture_{av_frame_alloc()};
  std::int64_t number_ = 0;  // of the frame that comes next, as OpenCV counts
  std::int64_t first_ = -1;  // of the first frame, by its time; below 0: not known
  int code_ = 0;
};

PickedFrame black(std::int64_t height, std::int64_t width, std::string fault) {
  if (height <= 0 || width <= 0) height = width = 256;
  return {height, width, std::vector<std::uint8_t>(static_cast<std::size_t>(height * width * 3)),
          std::move(fault)};
}

}  // namespace

PickedFrame frame_at(const MediaSource& source, std::int64_t index, const MediaAccess& access) {
  std::optional<Capture> video;
  std::string fault;
  try {
    video.emplace(source, access);
    PickedFrame out;
    if (video->read(index, out)) return out;
    fault = fmt::format("frame {} of video {} cannot be decoded ({})", index, source.path,
                        video->reason());
    if (video->read(0, out)) {
      out.fault = fault + "; its first frame stands in";
      return out;
    }
  } catch (const Error& e) {
    if (e.code() != Exit::data) throw;
    fault = e.what();
  }
  const auto [height, width] =
      video ? video->height_width() : std::pair<std::int64_t, std::int64_t>();
  return black(height, width, fault + "; a black frame stands in");
}

}  // namespace weft
