#include "media/writers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "core/file.h"
#include "media/ffmpeg.h"

extern "C" {
#include <libavutil/opt.h>
}

namespace weft {
namespace {

[[noreturn]] void fail(const std::string& path, int code) {
  throw Error(Exit::data, fmt::format("cannot write {}: {}", path, ff::reason(code)),
              "is the disk full, or the directory missing or not writable?", __FILE__, __LINE__);
}
int check(const std::string& path, int code) {
  if (code < 0) fail(path, code);
  return code;
}

// Chroma needs even sizes.
std::int64_t even(std::int64_t size) { return (size + 1) / 2 * 2; }

// A frame [height, width, 3] with its last row and column repeated up to even sizes.
void pad_frame(const std::uint8_t* from, std::int64_t height, std::int64_t width,
               std::vector<std::uint8_t>& out) {
  const std::int64_t to_width = even(width);
  // swscale reads whole vectors, past the last pixel too: pad them, so that stray memory does not
  // affect the file's bytes.
  constexpr std::int64_t vector = 64;
  out.resize(static_cast<std::size_t>(even(height) * to_width * 3 + vector));
  for (std::int64_t y = 0; y < even(height); ++y) {
    const std::uint8_t* row = from + std::min(y, height - 1) * width * 3;
    std::uint8_t* to = out.data() + y * to_width * 3;
    std::memcpy(to, row, static_cast<std::size_t>(width * 3));
    if (to_width > width) std::memcpy(to + width * 3, row + (width - 1) * 3, 3);
  }
}

}  // namespace

// An MP4 file being written; closes everything on every exit path.
struct Mp4Writer::State {
  State(const std::string& file, bool is_segment)
      : path(file), made(is_segment ? file + ".tmp" : file), segment(is_segment) {
    check(path, avformat_alloc_output_context2(&format, nullptr, "mp4", nullptr));
    if (segment) format->flags |= AVFMT_FLAG_BITEXACT;
  }
  ~State() {
    if (format->pb != nullptr) avio_closep(&format->pb);
    avformat_free_context(format);
    if (!done) std::remove(made.c_str());
  }

  void start(std::int64_t clip_height, std::int64_t clip_width, AVRational rate, AVRational ticks) {
    height = clip_height;
    width = clip_width;
    const AVCodec* codec = avcodec_find_encoder_by_name("libx264");
    const bool x264 = codec != nullptr;
    if (!x264) codec = avcodec_find_encoder(AV_CODEC_ID_MPEG4);
    WEFT_CHECK(codec != nullptr, Exit::data, "install FFmpeg with libx264",
               "cannot write {}: FFmpeg has no MP4 encoder", path);
    encoder.reset(avcodec_alloc_context3(codec));
    encoder->width = static_cast<int>(even(width));
    encoder->height = static_cast<int>(even(height));
    encoder->pix_fmt = AV_PIX_FMT_YUV420P;
    // MPEG-4 part 2 counts at most 65535 ticks a second.
    encoder->time_base = x264 ? av_inv_q(ticks) : av_d2q(1 / av_q2d(ticks), 65535);
    encoder->framerate = rate;
    // What swscale makes of RGB by default; without it, players would guess BT.709 for large
    // pictures.
    encoder->colorspace = AVCOL_SPC_SMPTE170M;
    encoder->color_range = AVCOL_RANGE_MPEG;
    if ((format->oformat->flags & AVFMT_GLOBALHEADER) != 0)
      encoder->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    if (segment) encoder->flags |= AV_CODEC_FLAG_BITEXACT;
    if (x264) {
      av_opt_set(encoder->priv_data, "preset", "medium", 0);
      av_opt_set(encoder->priv_data, "crf", "12", 0);
    } else {
      encoder->flags |= AV_CODEC_FLAG_QSCALE;
      encoder->global_quality = 2 * FF_QP2LAMBDA;
    }
    check(path, avcodec_open2(encoder.get(), codec, nullptr));
    convert.reset(sws_getContext(encoder->width, encoder->height, AV_PIX_FMT_RGB24, encoder->width,
                                 encoder->height, AV_PIX_FMT_YUV420P,
                                 SWS_BILINEAR | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
    WEFT_ASSERT(convert != nullptr);
    stream = avformat_new_stream(format, nullptr);
    WEFT_ASSERT(stream != nullptr);
    stream->time_base = encoder->time_base;
    stream->avg_frame_rate = rate;
    check(path, avcodec_parameters_from_context(stream->codecpar, encoder.get()));
    std::remove(made.c_str());  // FFmpeg would write through a link
    check(path, avio_open(&format->pb, made.c_str(), AVIO_FLAG_WRITE));
    check(path, avformat_write_header(format, nullptr));
  }

  // nullptr ends the stream.
  void encode(const AVFrame* frame) {
    check(path, avcodec_send_frame(encoder.get(), frame));
    for (;;) {
      const int got = avcodec_receive_packet(encoder.get(), packet.get());
      if (got == AVERROR(EAGAIN) || got == AVERROR_EOF) return;
      check(path, got);
      packet->duration = duration;  // else the last frame would have no duration
      av_packet_rescale_ts(packet.get(), encoder->time_base, stream->time_base);
      packet->stream_index = stream->index;
      check(path, av_interleaved_write_frame(format, packet.get()));
    }
  }

  // A frame [height, width, 3] that begins at tick `time`.
  void add(const std::uint8_t* rgb, std::int64_t time) {
    pad_frame(rgb, height, width, padded);
    const ff::Ptr<AVFrame> frame(av_frame_alloc());
    frame->format = AV_PIX_FMT_YUV420P;
    frame->width = encoder->width;
    frame->height = encoder->height;
    frame->pts = time;
    ++frames;
    check(path, av_frame_get_buffer(frame.get(), 0));
    const std::uint8_t* const planes[] = {padded.data()};
    const int strides[] = {encoder->width * 3};
    sws_scale(convert.get(), planes, strides, 0, encoder->height, frame->data, frame->linesize);
    encode(frame.get());
  }

  void finish() {
    encode(nullptr);
    check(path, av_write_trailer(format));
    check(path, avio_closep(&format->pb));
    if (segment) rename_file(made, path, Exit::data);
    done = true;
  }

  std::string path, made;  // its name in the end, and meanwhile
  bool segment;
  AVFormatContext* format = nullptr;
  AVStream* stream = nullptr;
  ff::Ptr<AVCodecContext> encoder;
  ff::Ptr<SwsContext> convert;
  ff::Ptr<AVPacket> packet{av_packet_alloc()};
  std::vector<std::uint8_t> padded;
  std::int64_t height = 0, width = 0, frames = 0;
  std::int64_t last = -1, duration = 1;  // of the last frame in ticks: when, and how long
  bool done = false;
};

Mp4Writer::Mp4Writer(const std::string& path, std::int64_t height, std::int64_t width,
                     const Mp4Options& options) {
  ff::quiet();
  const double fps = options.fps;
  WEFT_ASSERT(height > 0 && width > 0);
  WEFT_CHECK(fps > 0 && fps <= 1000, Exit::usage, "choose 1 to 1000 frames a second",
             "cannot write {} at {} frames a second", path, fps);
  state_ = std::make_unique<State>(path, options.segment);
  const AVRational rate = av_d2q(fps, 100000);
  const double ticks = options.ticks <= 100000 ? options.ticks : 90000;
  state_->start(height, width, rate, ticks > 0 ? av_d2q(ticks, 100000) : rate);
}
Mp4Writer::~Mp4Writer() = default;

void Mp4Writer::add(const ClipView& clip) {
  WEFT_ASSERT(clip.height == state_->height && clip.width == state_->width);
  for (std::int64_t t = 0; t < clip.frames; ++t)
    state_->add(clip.rgb + t * clip.height * clip.width * 3, state_->frames);
}
void Mp4Writer::add(const ClipView& clip, double seconds, double duration) {
  WEFT_ASSERT(clip.frames == 1 && clip.height == state_->height && clip.width == state_->width);
  const double ticks = 1 / av_q2d(state_->encoder->time_base);
  state_->last = std::max<std::int64_t>(std::llround(seconds * ticks), state_->last + 1);
  state_->duration = std::max<std::int64_t>(std::llround(duration * ticks), 1);
  state_->add(clip.rgb, state_->last);
}
void Mp4Writer::finish() {
  WEFT_ASSERT(state_->frames > 0);
  state_->finish();
}

void write_mp4(const std::string& path, const ClipView& clip, double fps) {
  Mp4Writer file(path, clip.height, clip.width, fps);
  file.add(clip);
  file.finish();
}

namespace {

// Rows of `row` bytes, one behind the other at `pixels`.
void encode_png(const std::string& path, std::int64_t height, std::int64_t width,
                AVPixelFormat format, const std::uint8_t* pixels, std::int64_t row,
                std::span<const Rgb> palette) {
  ff::quiet();
  const AVCodec* codec = avcodec_find_encoder(AV_CODEC_ID_PNG);
  WEFT_CHECK(codec != nullptr, Exit::data, "install FFmpeg with zlib",
             "cannot write {}: FFmpeg has no PNG encoder", path);
  const ff::Ptr<AVCodecContext> encoder(avcodec_alloc_context3(codec));
  encoder->width = static_cast<int>(width);
  encoder->height = static_cast<int>(height);
  encoder->pix_fmt = format;
  encoder->time_base = {1, 1};
  check(path, avcodec_open2(encoder.get(), codec, nullptr));
  const ff::Ptr<AVFrame> frame(av_frame_alloc());
  frame->format = format;
  frame->width = encoder->width;
  frame->height = encoder->height;
  check(path, av_frame_get_buffer(frame.get(), 0));
  for (std::int64_t y = 0; y < height; ++y)
    std::memcpy(frame->data[0] + y * frame->linesize[0], pixels + y * row,
                static_cast<std::size_t>(row));
  for (std::size_t i = 0; i < palette.size(); ++i) {
    const Rgb c = palette[i];
    const std::uint32_t argb = 0xff000000u | c.r << 16 | c.g << 8 | c.b;
    std::memcpy(frame->data[1] + 4 * i, &argb, 4);
  }
  const ff::Ptr<AVPacket> packet(av_packet_alloc());
  check(path, avcodec_send_frame(encoder.get(), frame.get()));
  check(path, avcodec_receive_packet(encoder.get(), packet.get()));

  std::remove(path.c_str());  // a link in its place leads elsewhere
  std::FILE* file = std::fopen(path.c_str(), "wbx");
  if (file == nullptr) fail(path, AVERROR(errno));
  const bool whole = std::fwrite(packet->data, 1, static_cast<std::size_t>(packet->size), file) ==
                     static_cast<std::size_t>(packet->size);
  // A full disk may show only when the file is closed.
  const bool closed = std::fclose(file) == 0;
  if (!whole || !closed) {
    const int code = AVERROR(errno);
    std::remove(path.c_str());
    fail(path, code);
  }
}

}  // namespace

void write_png(const std::string& path, std::int64_t height, std::int64_t width,
               std::span<const std::uint8_t> rgb) {
  WEFT_ASSERT(rgb.size() == static_cast<std::size_t>(height * width * 3) && !rgb.empty());
  encode_png(path, height, width, AV_PIX_FMT_RGB24, rgb.data(), 3 * width, {});
}

void write_palette_png(const std::string& path, std::int64_t height, std::int64_t width,
                       std::span<const std::uint8_t> indices, std::span<const Rgb> palette) {
  WEFT_ASSERT(indices.size() == static_cast<std::size_t>(height * width) && !indices.empty());
  WEFT_ASSERT(palette.size() <= 256);
  // FFmpeg's palette has 256 entries: those left over are opaque black.
  std::vector<Rgb> all(palette.begin(), palette.end());
  all.resize(256);
  encode_png(path, height, width, AV_PIX_FMT_PAL8, indices.data(), width, all);
}

}  // namespace weft
