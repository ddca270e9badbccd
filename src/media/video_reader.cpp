#include "media/video_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

extern "C" {
#include <libavfilter/buffersink.h>
#include <libavfilter/buffersrc.h>
#include <libavutil/display.h>
#include <libavutil/imgutils.h>
#include <libavutil/pixdesc.h>
}

#include "core/error.h"
#include "media/image_file.h"
#include "media/open_media.h"
#include "media/resize.h"
#include "media/yuv_rgb.h"

namespace weft {
namespace {

// How ffmpeg turns and mirrors a frame by its display matrix, which is that of a rotation in
// degrees counter-clockwise, of a mirror image, or of both.
using Turn = std::pair<std::string, bool>;  // filters, and whether they swap the sides
Turn turn_of(const std::int32_t* matrix) {
  const double counter = matrix == nullptr ? 0 : av_display_rotation_get(matrix);
  if (matrix == nullptr || !std::isfinite(counter)) return {};
  double degrees = -std::round(counter);
  degrees -= 360 * std::floor(degrees / 360 + 0.9 / 360);
  const auto is = [&](double angle) { return std::abs(degrees - angle) < 1; };
  if (is(90)) return {matrix[3] > 0 ? "transpose=cclock_flip," : "transpose=clock,", true};
  if (is(270)) return {matrix[3] < 0 ? "transpose=clock_flip," : "transpose=cclock,", true};
  if (is(180))
    return {std::string(matrix[0] < 0 ? "hflip," : "") + (matrix[4] < 0 ? "vflip," : ""), false};
  if (is(0)) return {matrix[4] < 0 ? "vflip," : "", false};
  return {fmt::format("rotate={}*PI/180,", degrees), false};
}

// The same of a picture by its EXIF.
Turn turn_of(int orientation) {
  static constexpr std::array turns = {"",
                                       ",hflip",
                                       ",hflip,vflip",
                                       ",vflip",
                                       ",transpose=cclock_flip",
                                       ",transpose=clock",
                                       ",transpose=clock_flip",
                                       ",transpose=cclock"};
  return {turns.at(static_cast<std::size_t>(orientation - 1)), is_sideways(orientation)};
}

}  // namespace

// Packets -> decoder -> filter graph -> RGB, one at a time, so that at most a handful of frames is
// in memory. The graph sets frames upright and converts their rate; what YuvRows does not take, it
// converts to RGB, too.
struct VideoReader::State {
  MediaSource medium;
  std::string path;
  VideoReaderOptions options;
  ff::OpenMedia media;
  AVStream* stream;
  ff::Ptr<AVCodecContext> decoder;
  ff::Ptr<AVPacket> packet{av_packet_alloc()};
  ff::Ptr<AVFrame> decoded{av_frame_alloc()}, delivered{av_frame_alloc()};
  ff::Ptr<AVFilterGraph> graph;
  AVFilterContext *source = nullptr, *sink = nullptr;
  std::string shape;  // of the frames that the graph takes

  VideoFrame frame;
  YuvRows yuv;                       // of `frame`, where the graph gives that
  std::vector<std::uint8_t> pixels;  // the same as RGB
  std::optional<ImageFile> still;    // a JPEG: FFmpeg reads fewer kinds, and not all of them right
  std::string turn;       // filters that set a picture upright; frames of a video have their own
  bool sideways = false;  // as the picture, or the container, says
  double native_fps = 24, fps = 24, first_seconds = 0;
  std::int64_t packets = 0, delivered_frames = 0, damaged = 0;
  std::int64_t start = 0, end = 0;  // of the file, and of the last frame decoded, in its time base
  bool waiting = false;  // `decoded` is of another shape than the graph, which is emptied
  bool all_frames = false;

  [[noreturn]] void fail(const std::string& what, int code) { media.fail(what, code); }
  int check(int code, const char* what) { return media.check(code, what); }

  State(const MediaSource& from, VideoReaderOptions how)
      : medium(from),
        path(from.name()),
        options(std::move(how)),
        media(from, options.access),
        stream(media.stream()),
        decoder(media.open_decoder(options.threads)) {
    AVRational rate = stream->avg_frame_rate;
    if (rate.num <= 0 || rate.den <= 0) rate = stream->r_frame_rate;
    if (rate.num > 0 && rate.den > 0) native_fps = av_q2d(rate);
    if (media.is_image()) options.fps = 0;
    fps = options.fps > 0 ? options.fps : native_fps;

    if (media.is_image())
      look_at_picture(media.bytes());
    else
      sideways = turn_of(ff::display_matrix(*stream)).second;
    // ffmpeg counts from where the first stream of the file begins.
    if (const std::int64_t begin = media.format()->start_time; begin != AV_NOPTS_VALUE)
      start = av_rescale_q(begin, {1, AV_TIME_BASE}, stream->time_base);
  }

  void look_at_picture(const std::vector<std::byte>& bytes) {
    WEFT_CHECK(!is_misread_tiff(bytes), Exit::data, "convert it to PNG",
               "picture {} is a TIFF compressed as JPEG, or in YCbCr, which is not read", path);
    if (options.access.limits.orientation == "upright")
      std::tie(turn, sideways) = turn_of(exif_orientation(bytes));
  }

  // How frames such as `decoded` are to be converted: the options of the graph's source, and its
  // filters.
  std::pair<std::string, std::string> conversion() const {
    const AVRational base = stream->time_base;
    const AVRational aspect = decoded->sample_aspect_ratio;
    std::string from = fmt::format("video_size={}x{}:pix_fmt={}:time_base={}/{}:pixel_aspect={}/{}",
                                   decoded->width, decoded->height, decoded->format, base.num,
                                   base.den, std::max(aspect.num, 0), std::max(aspect.den, 1));
#if LIBAVFILTER_VERSION_MAJOR >= 10  // FFmpeg 7
    from += fmt::format(":colorspace={}:range={}", static_cast<int>(decoded->colorspace),
                        static_cast<int>(decoded->color_range));
#endif
    // The size stays the same, so only chroma is interpolated. Full chroma, as a decoder to RGB
    // should.
    const std::string rgb = "scale=flags=bilinear+accurate_rnd+full_chroma_int,format=rgb24";
    if (media.is_image()) return {from, rgb + turn};
    const std::int32_t* matrix = ff::display_matrix(*stream, decoded.get());
    const std::string rate = options.fps > 0 ? fmt::format("fps={},", options.fps) : "";
    // It takes both forms of pixels as they are.
    const std::string cuts = options.cuts > 0 ? fmt::format(",scdet=t={}", options.cuts) : "";
    return {from, turn_of(matrix).first + rate + (is_plain_yuv(*decoded) ? "null" : rgb) + cuts};
  }

  // buffer -> [turn] -> [fps] -> RGB -> sink.
  void build_graph(const std::string& arguments, const std::string& chain) {
    graph.reset(avfilter_graph_alloc());
    check(avfilter_graph_create_filter(&source, avfilter_get_by_name("buffer"), "in",
                                       arguments.c_str(), nullptr, graph.get()),
          "convert");
    check(avfilter_graph_create_filter(&sink, avfilter_get_by_name("buffersink"), "out", nullptr,
                                       nullptr, graph.get()),
          "convert");
    AVFilterInOut* outputs = avfilter_inout_alloc();
    AVFilterInOut* inputs = avfilter_inout_alloc();
    outputs->name = av_strdup("in");
    outputs->filter_ctx = source;
    inputs->name = av_strdup("out");
    inputs->filter_ctx = sink;
    const int parsed =
        avfilter_graph_parse_ptr(graph.get(), chain.c_str(), &inputs, &outputs, nullptr);
    avfilter_inout_free(&inputs);
    avfilter_inout_free(&outputs);
    check(parsed, "convert");
    check(avfilter_graph_config(graph.get(), nullptr), "convert");
    shape = arguments + chain;
  }

  // Sends the decoder the next packet of our stream, or the end of the stream.
  void feed() {
    for (;;) {
      // What lies behind a picture is none of it.
      const bool picture_done = media.is_image() && packets > 0;
      const int got = picture_done ? AVERROR_EOF : av_read_frame(media.format(), packet.get());
      if (got == AVERROR_EOF) {
        check(avcodec_send_packet(decoder.get(), nullptr), "decode");
        // A truncated file often just ends.
        const std::int64_t promised = picture_done ? 1 : media.promised().packets;
        WEFT_CHECK(promised <= 0 || packets * 10 >= promised * 9, Exit::data,
                   "the file is incomplete: copy it again", "video {} ends after {} of {} frames",
                   path, packets, promised);
        return;
      }
      check(got, "read");
      if (packet->stream_index != stream->index) {
        av_packet_unref(packet.get());
        continue;
      }
      ++packets;
      const int sent = avcodec_send_packet(decoder.get(), packet.get());
      av_packet_unref(packet.get());
      check(sent, "decode");
      return;
    }
  }

  // One step towards the next RGB frame: a decoded frame into the graph, or a packet decoded.
  void advance() {
    const int got = avcodec_receive_frame(decoder.get(), decoded.get());
    if (got == AVERROR(EAGAIN)) return feed();
    if (got == AVERROR_EOF) {
      all_frames = true;
      WEFT_CHECK(graph != nullptr, Exit::data, "leave it out", "video {} has no frame", path);
      close_graph(end);
      return;
    }
    check(got, "decode");
    media.check_size(decoded->height, decoded->width);
    if (decoded->decode_error_flags != 0 || (decoded->flags & AV_FRAME_FLAG_CORRUPT) != 0)
      ++damaged;
    const std::int64_t time = decoded->best_effort_timestamp, length = ff::duration_of(*decoded);
    decoded->pts = time == AV_NOPTS_VALUE ? end : time - start;
    end = decoded->pts + (length > 0 ? length : whole_ticks(1 / native_fps));
    convert();
  }

  // Gives the graph `decoded`; if that is the first frame, or the shape has changed, a new graph.
  void convert() {
    const auto [arguments, chain] = conversion();
    waiting = graph != nullptr && shape != arguments + chain;
    if (waiting) return close_graph(decoded->pts);
    if (graph == nullptr) build_graph(arguments, chain);
    check(av_buffersrc_add_frame(source, decoded.get()), "convert");
  }

  // A rate is converted up to that time.
  void close_graph(std::int64_t time) { check(av_buffersrc_close(source, time, 0), "convert"); }

  std::int64_t whole_ticks(double seconds) const {
    return std::llround(seconds / av_q2d(stream->time_base));
  }

  const VideoFrame* next() {
    if (media.is_image() && stream->codecpar->codec_id == AV_CODEC_ID_MJPEG)
      return delivered_frames == 0 ? take_still() : nullptr;
    const ff::OpenMedia::Work work(media);
    av_frame_unref(delivered.get());
    for (;;) {
      media.check_budget();
      if (graph != nullptr) {
        const int got = av_buffersink_get_frame(sink, delivered.get());
        if (got >= 0) break;
        if (got == AVERROR_EOF) {
          if (!waiting) return nullptr;
          graph.reset();
          convert();
          continue;
        }
        if (got != AVERROR(EAGAIN)) fail("convert", got);
      }
      if (all_frames) return nullptr;
      advance();
    }
    take_pixels();
    frame.height = delivered->height;
    frame.width = delivered->width;
    frame.index = delivered_frames++;
    frame.cut = av_dict_get(delivered->metadata, "lavfi.scd.time", nullptr, 0) != nullptr;
    frame.seconds = static_cast<double>(frame.index) / fps;
    frame.duration = 1 / fps;
    if (const std::int64_t length = ff::duration_of(*delivered); length > 0 && options.fps == 0)
      frame.duration = static_cast<double>(length) * av_q2d(stream->time_base);
    if (delivered->pts != AV_NOPTS_VALUE) {
      const double seconds =
          static_cast<double>(delivered->pts) * av_q2d(av_buffersink_get_time_base(sink));
      if (frame.index == 0) first_seconds = seconds;
      frame.seconds = seconds - first_seconds;
    }
    check_length();
    return &frame;
  }

  // Takes the pixels of `delivered` into `frame`.
  void take_pixels() {
    frame.rgb = delivered->data[0];
    frame.stride = delivered->linesize[0];
    frame.yuv = nullptr;
    if (delivered->format == AV_PIX_FMT_RGB24) return;
    yuv.set(*delivered);
    if (options.rows) {
      frame.rgb = nullptr;
      frame.yuv = &yuv;
      return;
    }
    frame.stride = std::int64_t{3} * delivered->width;
    pixels.resize(static_cast<std::size_t>(frame.stride * delivered->height));
    for (std::int64_t y = 0; y < delivered->height; ++y) yuv.row(y, &pixels[y * frame.stride]);
    frame.rgb = pixels.data();
  }

  const VideoFrame* take_still() {
    still = decode_image(media.bytes(), path, options.access.limits);
    ++delivered_frames;
    frame = {still->values.data(), 3 * still->width, still->height, still->width};
    frame.duration = 1 / fps;
    return &frame;
  }

  // A container's claim of its length may be wrong, and a graph may be endless.
  void check_length() const {
    const MediaDeck& limits = options.access.limits;
    const char* hint = path.starts_with("lavfi:")
                           ? "give the source a duration, as lavfi:testsrc2=duration=4"
                           : "cut it, or raise media.max_frames or media.max_hours";
    WEFT_CHECK(delivered_frames <= limits.max_frames, Exit::data, hint,
               "video {} has more frames than media.max_frames = {}", path, limits.max_frames);
    WEFT_CHECK(frame.seconds <= limits.max_hours * 3600, Exit::data, hint,
               "video {} is longer than media.max_hours = {}", path, limits.max_hours);
  }
};

VideoReader::VideoReader(const MediaSource& source, VideoReaderOptions options)
    : state_(std::make_unique<State>(source, std::move(options))) {}

VideoReader::~VideoReader() = default;

const VideoFrame* VideoReader::next() { return state_->next(); }
double VideoReader::fps() const { return state_->fps; }
std::int64_t VideoReader::damaged() const { return state_->damaged; }
bool VideoReader::is_image() const { return state_->media.is_image(); }

double VideoReader::ticks() const {
  return state_->options.fps > 0 ? state_->fps : 1 / av_q2d(state_->stream->time_base);
}

std::int64_t VideoReader::height() const {
  const auto* p = state_->stream->codecpar;
  return state_->sideways ? p->width : p->height;
}
std::int64_t VideoReader::width() const {
  const auto* p = state_->stream->codecpar;
  return state_->sideways ? p->height : p->width;
}

std::int64_t VideoReader::frames() const {
  const State& s = *state_;
  if (s.media.is_image()) return 1;
  if (const std::int64_t promised = s.media.promised().frames; promised > 0 && s.options.fps == 0)
    return promised;
  if (s.stream->duration > 0)
    return std::llround(static_cast<double>(s.stream->duration) * av_q2d(s.stream->time_base) *
                        s.fps);
  if (s.media.format()->duration > 0)
    return std::llround(static_cast<double>(s.media.format()->duration) / AV_TIME_BASE * s.fps);
  return 0;
}

namespace {

// Packets of the pictures' stream that are shown, without decoding them.
std::int64_t count_packets(const MediaSource& source, const MediaAccess& access) {
  ff::OpenMedia media(source, access);
  const ff::OpenMedia::Work work(media);
  const ff::Ptr<AVPacket> packet(av_packet_alloc());
  WEFT_ASSERT(packet != nullptr);
  std::int64_t count = 0;
  // A file may be cut off: what is there counts.
  for (; av_read_frame(media.format(), packet.get()) >= 0; av_packet_unref(packet.get())) {
    const bool vp8 = media.stream()->codecpar->codec_id == AV_CODEC_ID_VP8;
    const bool hidden = (packet->flags & AV_PKT_FLAG_DISCARD) != 0 ||
                        (vp8 && packet->size > 0 && (packet->data[0] & 0x10) == 0);
    if (packet->stream_index == media.stream()->index && !hidden) ++count;
  }
  media.check_budget();
  return count;
}

}  // namespace

std::int64_t VideoReader::counted() const {
  const State& s = *state_;
  if (s.media.is_image() || s.options.fps > 0 || s.media.promised().frames > 0 ||
      is_source_graph(s.medium.path))
    return frames();
  return count_packets(s.medium, s.options.access);
}

Footage read_frames(const MediaSource& source, std::int64_t max_frames, std::int64_t height,
                    std::int64_t width, VideoReaderOptions options) {
  VideoReader reader(source, std::move(options));
  Footage clip;
  clip.fps = reader.fps();
  CoverResize resize;
  while (max_frames == 0 || clip.frames < max_frames) {
    const VideoFrame* f = reader.next();
    if (f == nullptr) break;
    if (clip.frames == 0) {
      clip.height = height > 0 ? height : f->height;
      clip.width = width > 0 ? width : f->width;
    }
    const auto bytes = static_cast<std::size_t>(clip.height * clip.width * 3);
    clip.rgb.resize(clip.rgb.size() + bytes);
    resize(*f, clip.height, clip.width, clip.rgb.data() + clip.rgb.size() - bytes);
    ++clip.frames;
  }
  WEFT_CHECK(clip.frames > 0, Exit::data, "leave it out", "video {} has no frame", source.name());
  return clip;
}

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
  bool has_no_count() const { return stream_->nb_frames == 0; }

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
    out.rgb.resize(height * width * 3);
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
  return {height, width, std::vector<std::uint8_t>(height * width * 3), std::move(fault)};
}

}  // namespace

PickedFrame frame_at(const MediaSource& source, std::int64_t index, const MediaAccess& access) {
  std::optional<Capture> video;
  std::string fault;
  try {
    video.emplace(source, access);
    PickedFrame out;
    if (video->read(index, out)) return out;
    // OpenCV takes a duration for the length, which may be that of the sound.
    if (video->has_no_count())
      if (const std::int64_t all = count_packets(source, access);
          all > 0 && index >= all && video->read(all - 1, out))
        return out;
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
