#include "media/writers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

extern "C" {
#include <libavutil/channel_layout.h>
#include <libavutil/opt.h>
}

#include "core/error.h"
#include "core/file.h"
#include "media/audio.h"
#include "media/open_media.h"

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

// An MP4 file being written. It closes everything, and removes what is not whole, on every exit
// path.
class Mp4File {
 public:
  // `exact`: the same packets give the same bytes.
  Mp4File(const std::string& path, bool exact) : path_(path), file_(path, Exit::data) {
    check(avformat_alloc_output_context2(&format_, nullptr, "mp4", nullptr));
    if (exact) format_->flags |= AVFMT_FLAG_BITEXACT;
  }
  ~Mp4File() {
    if (format_->pb != nullptr) avio_closep(&format_->pb);
    avformat_free_context(format_);
  }
  Mp4File(const Mp4File&) = delete;
  Mp4File& operator=(const Mp4File&) = delete;

  const std::string& path() const { return path_; }
  int check(int code) const { return weft::check(path_, code); }

  AVStream& add_stream(AVRational time_base) {
    AVStream* stream = avformat_new_stream(format_, nullptr);
    WEFT_ASSERT(stream != nullptr);
    stream->time_base = time_base;
    return *stream;
  }
  AVStream& add_stream(const AVCodecContext& encoder) {
    AVStream& stream = add_stream(encoder.time_base);
    check(avcodec_parameters_from_context(stream.codecpar, &encoder));
    return stream;
  }

  // After the streams: writes the header.
  void start() {
    std::remove(file_.draft().c_str());  // FFmpeg would write through a link
    check(avio_open(&format_->pb, file_.draft().c_str(), AVIO_FLAG_WRITE));
    check(avformat_write_header(format_, nullptr));
  }

  // A packet whose times are in units of `time_base`.
  void write(AVPacket& packet, const AVStream& stream, AVRational time_base) {
    packet.stream_index = stream.index;
    av_packet_rescale_ts(&packet, time_base, stream.time_base);
    check(av_interleaved_write_frame(format_, &packet));
  }

  // Encodes a frame and writes what the encoder has ready; nullptr ends the stream. `duration` in
  // the encoder's ticks; 0: as the encoder says.
  void encode(AVCodecContext& encoder, const AVFrame* frame, const AVStream& stream,
              std::int64_t duration) {
    check(avcodec_send_frame(&encoder, frame));
    for (;;) {
      const int got = avcodec_receive_packet(&encoder, packet_.get());
      if (got == AVERROR(EAGAIN) || got == AVERROR_EOF) return;
      check(got);
      if (duration > 0) packet_->duration = duration;
      write(*packet_, stream, encoder.time_base);
    }
  }

  void finish() {
    check(av_write_trailer(format_));
    check(avio_closep(&format_->pb));
    file_.commit();
  }

 private:
  std::string path_;
  WholeFile file_;
  AVFormatContext* format_ = nullptr;
  ff::Ptr<AVPacket> packet_{av_packet_alloc()};
};

// Chroma needs even sizes.
std::int64_t even(std::int64_t size) { return (size + 1) / 2 * 2; }

// A frame [height, width, 3] with its last row and column repeated up to even sizes.
void pad_frame(const std::uint8_t* from, std::int64_t height, std::int64_t width,
               std::vector<std::uint8_t>& out) {
  const std::int64_t to_width = even(width);
  // swscale reads whole vectors, past the last pixel too: pad them, so that stray memory does not
  // affect the file's bytes.
  constexpr std::int64_t vector = 64;
  out.resize(even(height) * to_width * 3 + vector);
  for (std::int64_t y = 0; y < even(height); ++y) {
    const std::uint8_t* row = from + std::min(y, height - 1) * width * 3;
    std::uint8_t* to = out.data() + y * to_width * 3;
    std::memcpy(to, row, static_cast<std::size_t>(width * 3));
    if (to_width > width) std::memcpy(to + width * 3, row + (width - 1) * 3, 3);
  }
}

}  // namespace

struct Mp4Writer::State {
  State(const std::string& path, bool segment) : file(path, segment), exact(segment) {}

  void start(std::int64_t clip_height, std::int64_t clip_width, AVRational rate, AVRational ticks) {
    height = clip_height;
    width = clip_width;
    const AVCodec* codec = avcodec_find_encoder_by_name("libx264");
    const bool x264 = codec != nullptr;
    if (!x264) codec = avcodec_find_encoder(AV_CODEC_ID_MPEG4);
    WEFT_CHECK(codec != nullptr, Exit::data, "install FFmpeg with libx264",
               "cannot write {}: FFmpeg has no MP4 encoder", file.path());
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
    encoder->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;  // MP4 keeps it beside the packets
    if (exact) encoder->flags |= AV_CODEC_FLAG_BITEXACT;
    if (x264) {
      av_opt_set(encoder->priv_data, "preset", "medium", 0);
      av_opt_set(encoder->priv_data, "crf", "12", 0);
    } else {
      encoder->flags |= AV_CODEC_FLAG_QSCALE;
      encoder->global_quality = 2 * FF_QP2LAMBDA;
    }
    file.check(avcodec_open2(encoder.get(), codec, nullptr));
    convert.reset(sws_getContext(encoder->width, encoder->height, AV_PIX_FMT_RGB24, encoder->width,
                                 encoder->height, AV_PIX_FMT_YUV420P,
                                 SWS_BILINEAR | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
    WEFT_ASSERT(convert != nullptr);
    stream = &file.add_stream(*encoder);
    stream->avg_frame_rate = rate;
    file.start();
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
    file.check(av_frame_get_buffer(frame.get(), 0));
    const std::uint8_t* const planes[] = {padded.data()};
    const int strides[] = {encoder->width * 3};
    sws_scale(convert.get(), planes, strides, 0, encoder->height, frame->data, frame->linesize);
    // Without a duration the last frame would have none.
    file.encode(*encoder, frame.get(), *stream, duration);
  }

  void finish() {
    file.encode(*encoder, nullptr, *stream, duration);
    file.finish();
  }

  Mp4File file;
  bool exact;
  AVStream* stream = nullptr;
  ff::Ptr<AVCodecContext> encoder;
  ff::Ptr<SwsContext> convert;
  std::vector<std::uint8_t> padded;
  std::int64_t height = 0, width = 0, frames = 0;
  std::int64_t last = -1, duration = 1;  // of the last frame in ticks: when, and how long
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

// Rows of `row` bytes, one behind the other at `pixels`. `path` is for errors.
ff::Ptr<AVPacket> encode_png(const std::string& path, std::int64_t height, std::int64_t width,
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
  ff::Ptr<AVPacket> packet(av_packet_alloc());
  check(path, avcodec_send_frame(encoder.get(), frame.get()));
  check(path, avcodec_receive_packet(encoder.get(), packet.get()));
  return packet;
}

std::string_view bytes_of(const ff::Ptr<AVPacket>& packet) {
  return {reinterpret_cast<const char*>(packet->data), static_cast<std::size_t>(packet->size)};
}

void write_packet(const std::string& path, const ff::Ptr<AVPacket>& packet) {
  WholeFile file(path, Exit::data);
  file.add(bytes_of(packet));
  file.commit();
}

}  // namespace

void write_png(const std::string& path, std::int64_t height, std::int64_t width,
               std::span<const std::uint8_t> rgb) {
  WEFT_ASSERT(rgb.size() == static_cast<std::size_t>(height * width * 3) && !rgb.empty());
  write_packet(path, encode_png(path, height, width, AV_PIX_FMT_RGB24, rgb.data(), 3 * width, {}));
}

std::string png_bytes(std::int64_t height, std::int64_t width, std::span<const std::uint8_t> rgb) {
  WEFT_ASSERT(rgb.size() == static_cast<std::size_t>(height * width * 3) && !rgb.empty());
  return std::string(bytes_of(
      encode_png("a PNG image", height, width, AV_PIX_FMT_RGB24, rgb.data(), 3 * width, {})));
}

void write_palette_png(const std::string& path, std::int64_t height, std::int64_t width,
                       std::span<const std::uint8_t> indices, std::span<const Rgb> palette) {
  WEFT_ASSERT(indices.size() == static_cast<std::size_t>(height * width) && !indices.empty());
  WEFT_ASSERT(palette.size() <= 256);
  // FFmpeg's palette has 256 entries: those left over are opaque black.
  std::vector<Rgb> all(palette.begin(), palette.end());
  all.resize(256);
  write_packet(path, encode_png(path, height, width, AV_PIX_FMT_PAL8, indices.data(), width, all));
}

namespace {

constexpr const char* segment_hint = "remove the segments; the same command makes them again";

// The sound, a frame of the encoder at a time.
class SoundSource {
 public:
  SoundSource(const Mp4Sound& sound, const MediaAccess& access) : samples_(sound.samples) {
    rate_ = sound.rate;
    if (sound.file.empty()) {
      WEFT_ASSERT(sound.rate > 0);
      if (aac_rate(sound.rate) == sound.rate) return;
      throw Error(Exit::internal, fmt::format("AAC has no rate {}", sound.rate), "", __FILE__,
                  __LINE__);
    }
    const MediaSource source{sound.file, MediaTrust::untrusted};
    reader_ = std::make_unique<AudioReader>(source, AudioOptions{0, 0, access});
    if (aac_rate(reader_->rate()) != reader_->rate())
      reader_ =
          std::make_unique<AudioReader>(source, AudioOptions{aac_rate(reader_->rate()), 0, access});
    rate_ = reader_->rate();
    channels_ = reader_->channels();
  }

  std::int64_t rate() const { return rate_; }
  int channels() const { return channels_; }

  // The next `count` samples of each channel, fewer at the end; valid until the next call.
  std::span<const float> take(std::int64_t count) {
    const auto wanted = static_cast<std::size_t>(count * channels_);
    if (reader_ == nullptr) {
      const auto out = samples_.first(std::min(wanted, samples_.size()));
      samples_ = samples_.subspan(out.size());
      return out;
    }
    taken_.assign(held_.begin(),
                  held_.begin() + static_cast<std::ptrdiff_t>(std::min(wanted, held_.size())));
    held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(taken_.size()));
    while (taken_.size() < wanted) {
      const std::span<const float> more = reader_->next();
      if (more.empty()) break;
      const auto used = static_cast<std::ptrdiff_t>(std::min(wanted - taken_.size(), more.size()));
      taken_.insert(taken_.end(), more.begin(), more.begin() + used);
      held_.assign(more.begin() + used, more.end());
    }
    return taken_;
  }

 private:
  // The rates that MPEG-4 has numbers for.
  static std::int64_t aac_rate(std::int64_t rate) {
    constexpr std::int64_t rates[] = {96000, 88200, 64000, 48000, 44100, 32000, 24000,
                                      22050, 16000, 12000, 11025, 8000,  7350};
    return std::ranges::find(rates, rate) != std::end(rates) ? rate : 48000;
  }

  std::unique_ptr<AudioReader> reader_;
  std::span<const float> samples_;
  std::vector<float> taken_, held_;
  std::int64_t rate_ = 0;
  int channels_ = 1;
};

// Copies the pictures of segments into one MP4 and encodes its sound alongside.
class Joiner {
 public:
  Joiner(const Mp4Sound& sound, double fps, const std::string& output, const MediaAccess& access)
      : access_(access), fps_(av_d2q(fps, 100000)), file_(output, true) {
    if (!sound.file.empty() || !sound.samples.empty()) sound_.emplace(sound, access);
  }

  std::int64_t run(const std::vector<std::string>& segments) {
    for (const std::string& segment : segments) add(segment);
    if (sound_) {
      play_until(frames_, true);
      write_sound({});
    }
    file_.finish();
    return frames_;
  }

 private:
  void add(const std::string& path) {
    ff::OpenMedia media({path, MediaTrust::untrusted}, access_);
    const ff::OpenMedia::Work work(media);
    const AVStream& from = *media.stream();
    check_like_first(path, from);
    const ff::Ptr<AVPacket> packet(av_packet_alloc());
    const std::int64_t before = frames_;
    std::int64_t count = 0, last = -1;
    for (;;) {
      const int got = av_read_frame(media.format(), packet.get());
      if (got == AVERROR_EOF) break;
      media.check(got, "read");
      if (packet->stream_index != from.index) {
        av_packet_unref(packet.get());
        continue;
      }
      WEFT_CHECK(packet->pts != AV_NOPTS_VALUE && packet->size > 0, Exit::data, segment_hint,
                 "segment {} has a packet without a time", path);
      const std::int64_t shown = av_rescale_q(packet->pts, from.time_base, av_inv_q(fps_));
      WEFT_CHECK(shown >= 0 && shown < from.nb_frames, Exit::data, segment_hint,
                 "segment {} has a frame at {:.3f} s that is none of its {} at {} a second", path,
                 static_cast<double>(packet->pts) * av_q2d(from.time_base), from.nb_frames,
                 av_q2d(fps_));
      WEFT_CHECK(count > 0 || (packet->flags & AV_PKT_FLAG_KEY) != 0, Exit::data, segment_hint,
                 "segment {} does not begin with a key frame", path);
      last = std::max(last, shown);
      // Pictures are decoded in the order of their packets, `delay_` frames ahead of the showing.
      const std::int64_t decoded = before + count - delay_;
      WEFT_CHECK(before + shown >= decoded, Exit::data, segment_hint,
                 "segment {} shows its frame {} before it is decoded", path, shown);
      if (sound_) play_until(std::max<std::int64_t>(decoded, 0), false);
      packet->pts = before + shown;
      packet->dts = decoded;
      packet->duration = 1;
      packet->pos = -1;
      file_.write(*packet, *pictures_, av_inv_q(fps_));
      ++count;
    }
    WEFT_CHECK(count > 0 && count == from.nb_frames && last == count - 1, Exit::data, segment_hint,
               "segment {} is incomplete: it has {} of {} frames", path, count, from.nb_frames);
    frames_ += count;
  }

  // Pictures encoded in the same way can follow each other without a new header.
  void check_like_first(const std::string& path, const AVStream& stream) {
    const AVCodecParameters& p = *stream.codecpar;
    const std::vector<std::uint8_t> header(p.extradata, p.extradata + p.extradata_size);
    if (first_.empty()) {
      first_ = path;
      codec_ = p.codec_id;
      width_ = p.width;
      height_ = p.height;
      header_ = header;
      delay_ = p.video_delay;
      start(stream);
      return;
    }
    WEFT_CHECK(p.codec_id == codec_ && p.width == width_ && p.height == height_, Exit::data,
               segment_hint, "segments {} and {} differ: {} {}x{} and {} {}x{}", first_, path,
               avcodec_get_name(codec_), width_, height_, avcodec_get_name(p.codec_id), p.width,
               p.height);
    WEFT_CHECK(header == header_, Exit::data, segment_hint,
               "segments {} and {} were encoded with different settings", first_, path);
  }

  // The file's streams: pictures as the first segment has them, and the sound as AAC.
  void start(const AVStream& first) {
    pictures_ = &file_.add_stream(av_inv_q(fps_));
    file_.check(avcodec_parameters_copy(pictures_->codecpar, first.codecpar));
    pictures_->codecpar->codec_tag = 0;
    pictures_->avg_frame_rate = fps_;
    if (sound_) {
      const AVCodec* codec = avcodec_find_encoder_by_name("aac");
      WEFT_CHECK(codec != nullptr, Exit::data, "install FFmpeg with its AAC encoder",
                 "cannot write {}: FFmpeg has no AAC encoder", file_.path());
      encoder_.reset(avcodec_alloc_context3(codec));
      encoder_->sample_rate = static_cast<int>(sound_->rate());
      encoder_->sample_fmt = AV_SAMPLE_FMT_FLTP;
      encoder_->bit_rate = 64'000 * sound_->channels();
      encoder_->time_base = {1, encoder_->sample_rate};
      encoder_->flags |= AV_CODEC_FLAG_BITEXACT | AV_CODEC_FLAG_GLOBAL_HEADER;
      av_channel_layout_default(&encoder_->ch_layout, sound_->channels());
      file_.check(avcodec_open2(encoder_.get(), codec, nullptr));
      heard_ = &file_.add_stream(*encoder_);
    }
    file_.start();
  }

  // Samples [n, channels] of a frame of the encoder, the last may be shorter; none: the end.
  void write_sound(std::span<const float> samples) {
    const int channels = encoder_->ch_layout.nb_channels;
    ff::Ptr<AVFrame> frame;
    if (!samples.empty()) {
      frame.reset(av_frame_alloc());
      frame->format = AV_SAMPLE_FMT_FLTP;
      frame->nb_samples = static_cast<int>(samples.size()) / channels;
      frame->sample_rate = encoder_->sample_rate;
      file_.check(av_channel_layout_copy(&frame->ch_layout, &encoder_->ch_layout));
      file_.check(av_frame_get_buffer(frame.get(), 0));
      for (int c = 0; c < channels; ++c) {
        auto* out = reinterpret_cast<float*>(frame->extended_data[c]);
        for (int i = 0; i < frame->nb_samples; ++i) out[i] = samples[i * channels + c];
      }
      frame->pts = std::exchange(samples_sent_, samples_sent_ + frame->nb_samples);
    }
    file_.encode(*encoder_, frame.get(), *heard_, 0);
  }

  // Encodes sound up to the time of that frame, or, at the end, all that belongs to the clip.
  void play_until(std::int64_t frame, bool all) {
    const std::int64_t until = av_rescale_q_rnd(
        frame, av_inv_q(fps_), {1, static_cast<int>(sound_->rate())}, AV_ROUND_DOWN);
    while (!silent_ && samples_sent_ < until) {
      const std::int64_t left = until - samples_sent_, one = encoder_->frame_size;
      if (!all && left < one) return;
      const auto some = sound_->take(std::min(left, one));
      silent_ = std::ssize(some) < one * sound_->channels();
      if (!some.empty()) write_sound(some);
    }
  }

  MediaAccess access_;
  AVRational fps_;
  Mp4File file_;
  AVStream *pictures_ = nullptr, *heard_ = nullptr;
  std::optional<SoundSource> sound_;
  ff::Ptr<AVCodecContext> encoder_;  // of the sound
  std::int64_t samples_sent_ = 0;    // to it
  bool silent_ = false;              // the sound is over
  std::int64_t frames_ = 0;

  std::string first_;  // the segment that the others must be like
  AVCodecID codec_ = AV_CODEC_ID_NONE;
  int width_ = 0, height_ = 0, delay_ = 0;
  std::vector<std::uint8_t> header_;
};

}  // namespace

std::int64_t join_mp4(const std::vector<std::string>& segments, const Mp4Sound& sound, double fps,
                      const std::string& output, const MediaAccess& access) {
  ff::quiet();
  WEFT_ASSERT(!segments.empty());
  WEFT_CHECK(fps > 0 && fps <= 1000, Exit::usage, "choose 1 to 1000 frames a second",
             "cannot write {} at {} frames a second", output, fps);
  return Joiner(sound, fps, output, access).run(segments);
}

}  // namespace weft
