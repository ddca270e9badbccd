#include "media/video_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "media/ffmpeg.h"
#include "media/open_media.h"
#include "media/resize.h"

extern "C" {
#include <libavfilter/buffersink.h>
#include <libavfilter/buffersrc.h>
#include <libavutil/display.h>
#include <libavutil/pixdesc.h>
}

namespace weft {

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
  int graph_width = 0, graph_height = 0, graph_format = -1;

  VideoFrame frame;
  int quarter_turns = 0;  // clockwise
  double fps = 24, first_seconds = 0;
  std::int64_t packets = 0, delivered_frames = 0, damaged = 0;
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
    if (rate.num > 0 && rate.den > 0) fps = av_q2d(rate);
    if (options.fps > 0) fps = options.fps;

    // The display matrix rotates counter-clockwise; only quarter turns occur in practice.
    const auto* matrix = reinterpret_cast<const std::int32_t*>(
        av_stream_get_side_data(stream, AV_PKT_DATA_DISPLAYMATRIX, nullptr));
    if (matrix != nullptr) {
      const double degrees = -av_display_rotation_get(matrix);
      if (std::isfinite(degrees))
        quarter_turns = (static_cast<int>(std::lround(degrees / 90)) % 4 + 4) % 4;
    }
  }

  // buffer -> [fps] -> [turn] -> RGB -> sink, for frames of the shape of `decoded`.
  void build_graph() {
    graph.reset(avfilter_graph_alloc());
    const AVRational base = stream->time_base;
    const AVRational aspect = decoded->sample_aspect_ratio;
    const std::string arguments =
        fmt::format("video_size={}x{}:pix_fmt={}:time_base={}/{}:pixel_aspect={}/{}",
                    decoded->width, decoded->height, decoded->format, base.num, base.den,
                    std::max(aspect.num, 0), std::max(aspect.den, 1));
    check(avfilter_graph_create_filter(&source, avfilter_get_by_name("buffer"), "in",
                                       arguments.c_str(), nullptr, graph.get()),
          "convert");
    check(avfilter_graph_create_filter(&sink, avfilter_get_by_name("buffersink"), "out", nullptr,
                                       nullptr, graph.get()),
          "convert");
    std::string chain;
    if (options.fps > 0) chain += fmt::format("fps={},", options.fps);
    if (quarter_turns == 1) chain += "transpose=clock,";
    if (quarter_turns == 2) chain += "hflip,vflip,";
    if (quarter_turns == 3) chain += "transpose=cclock,";
    // The size stays the same, so only chroma is interpolated. Full chroma, as a decoder to RGB
    // should.
    chain += "scale=flags=bilinear+accurate_rnd+full_chroma_int,format=rgb24";
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
    graph_width = decoded->width;
    graph_height = decoded->height;
    graph_format = decoded->format;
  }

  // Sends the decoder the next packet of our stream, or the end of the stream.
  void feed() {
    for (;;) {
      const int got = av_read_frame(media.format(), packet.get());
      if (got == AVERROR_EOF) {
        check(avcodec_send_packet(decoder.get(), nullptr), "decode");
        // A truncated file often just ends. Edit lists leave out a few frames, but not a tenth.
        const std::int64_t promised = stream->nb_frames;
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
      check(av_buffersrc_add_frame(source, nullptr), "convert");
      return;
    }
    check(got, "decode");
    media.check_size(decoded->height, decoded->width);
    decoded->pts = decoded->best_effort_timestamp;
    if (decoded->decode_error_flags != 0 || (decoded->flags & AV_FRAME_FLAG_CORRUPT) != 0)
      ++damaged;
    if (decoded->width != graph_width || decoded->height != graph_height ||
        decoded->format != graph_format)
      build_graph();  // first frame, or the picture size has changed
    check(av_buffersrc_add_frame(source, decoded.get()), "convert");
  }

  const VideoFrame* next() {
    const ff::OpenMedia::Work work(media);
    av_frame_unref(delivered.get());
    for (;;) {
      media.check_budget();
      if (graph != nullptr) {
        const int got = av_buffersink_get_frame(sink, delivered.get());
        if (got >= 0) break;
        if (got == AVERROR_EOF) return nullptr;
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
    if (delivered->pts != AV_NOPTS_VALUE) {
      const double seconds =
          static_cast<double>(delivered->pts) * av_q2d(av_buffersink_get_time_base(sink));
      if (frame.index == 0) first_seconds = seconds;
      frame.seconds = seconds - first_seconds;
    }
    check_length();
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

std::int64_t VideoReader::height() const {
  const auto* p = state_->stream->codecpar;
  return state_->quarter_turns % 2 != 0 ? p->width : p->height;
}
std::int64_t VideoReader::width() const {
  const auto* p = state_->stream->codecpar;
  return state_->quarter_turns % 2 != 0 ? p->height : p->width;
}

std::int64_t VideoReader::frames() const {
  const State& s = *state_;
  if (s.media.is_image()) return 1;
  if (s.stream->nb_frames > 0 && s.options.fps == 0) return s.stream->nb_frames;
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
