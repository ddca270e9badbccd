#include "media/video_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "media/bytes/orientation.h"
#include "media/ffmpeg.h"
#include "media/image_file.h"
#include "media/open_media.h"
#include "media/resize.h"

extern "C" {
#include <libavfilter/buffersink.h>
#include <libavfilter/buffersrc.h>
#include <libavutil/display.h>
#include <libavutil/pixdesc.h>
}

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
// in memory.
struct VideoReader::State {
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
  std::optional<ImageFile> still;  // a JPEG: FFmpeg reads fewer kinds, and not all of them right
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
      : path(from.name()),
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
    const char* rgb = "scale=flags=bilinear+accurate_rnd+full_chroma_int,format=rgb24";
    if (media.is_image()) return {from, rgb + turn};
    const std::int32_t* matrix = ff::display_matrix(*stream, decoded.get());
    const std::string rate = options.fps > 0 ? fmt::format("fps={},", options.fps) : "";
    return {from, turn_of(matrix).first + rate + rgb};
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
    frame.rgb = delivered->data[0];
    frame.stride = delivered->linesize[0];
    frame.height = delivered->height;
    frame.width = delivered->width;
    frame.index = delivered_frames++;
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
               "video {} goes on behind media.max_hours = {}", path, limits.max_hours);
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

}  // namespace weft
