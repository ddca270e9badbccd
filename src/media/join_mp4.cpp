#include "media/join_mp4.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "media/audio.h"
#include "media/open_media.h"

extern "C" {
#include <libavutil/channel_layout.h>
}

namespace weft {
namespace {

constexpr const char* disk_hint = "is the disk full, or the directory missing or not writable?";
constexpr const char* segment_hint = "remove the segments and make them anew";

// The MP4 that is made: pictures as they come, sound through FFmpeg's AAC. Closes everything on
// every exit path.
class Output {
 public:
  Output(const std::string& path, AVRational fps) : path_(path), made_(path + ".tmp"), fps_(fps) {
    check(avformat_alloc_output_context2(&format_, nullptr, "mp4", nullptr));
    format_->flags |= AVFMT_FLAG_BITEXACT;
  }
  ~Output() {
    if (format_->pb != nullptr) avio_closep(&format_->pb);
    avformat_free_context(format_);
    if (!done_) std::remove(made_.c_str());
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  void add_pictures(const AVStream& like) {
    pictures_ = avformat_new_stream(format_, nullptr);
    WEFT_ASSERT(pictures_ != nullptr);
    check(avcodec_parameters_copy(pictures_->codecpar, like.codecpar));
    pictures_->codecpar->codec_tag = 0;
    pictures_->time_base = av_inv_q(fps_);
    pictures_->avg_frame_rate = fps_;
  }

  void add_sound(std::int64_t rate, int channels) {
    const AVCodec* codec = avcodec_find_encoder_by_name("aac");
    WEFT_CHECK(codec != nullptr, Exit::data, "install FFmpeg with its AAC encoder",
               "cannot write {}: FFmpeg has no AAC encoder", path_);
    encoder_.reset(avcodec_alloc_context3(codec));
    encoder_->sample_rate = static_cast<int>(rate);
    encoder_->sample_fmt = AV_SAMPLE_FMT_FLTP;
    encoder_->bit_rate = 64'000 * channels;
    encoder_->time_base = {1, static_cast<int>(rate)};
    encoder_->flags |= AV_CODEC_FLAG_BITEXACT | AV_CODEC_FLAG_GLOBAL_HEADER;
    av_channel_layout_default(&encoder_->ch_layout, channels);
    check(avcodec_open2(encoder_.get(), codec, nullptr));
    sound_ = avformat_new_stream(format_, nullptr);
    WEFT_ASSERT(sound_ != nullptr);
    sound_->time_base = encoder_->time_base;
    check(avcodec_parameters_from_context(sound_->codecpar, encoder_.get()));
  }

  void start() {
    std::remove(made_.c_str());  // FFmpeg would write through a link
    check(avio_open(&format_->pb, made_.c_str(), AVIO_FLAG_WRITE));
    check(avformat_write_header(format_, nullptr));
  }

  // A packet of pictures; its times are numbers of frames.
  void write_picture(AVPacket& packet) {
    packet.stream_index = pictures_->index;
    packet.pos = -1;
    av_packet_rescale_ts(&packet, av_inv_q(fps_), pictures_->time_base);
    check(av_interleaved_write_frame(format_, &packet));
  }

  // Samples [n, channels] of the encoder's frame, its last may be shorter; none: the end.
  void write_sound(std::span<const float> samples) {
    const int channels = encoder_->ch_layout.nb_channels;
    ff::Ptr<AVFrame> frame;
    if (!samples.empty()) {
      frame.reset(av_frame_alloc());
      frame->format = AV_SAMPLE_FMT_FLTP;
      frame->nb_samples = static_cast<int>(samples.size()) / channels;
      frame->sample_rate = encoder_->sample_rate;
      check(av_channel_layout_copy(&frame->ch_layout, &encoder_->ch_layout));
      check(av_frame_get_buffer(frame.get(), 0));
      for (int c = 0; c < channels; ++c) {
        auto* out = reinterpret_cast<float*>(frame->extended_data[c]);
        for (int i = 0; i < frame->nb_samples; ++i)
          out[i] = samples[static_cast<std::size_t>(i * channels + c)];
      }
      frame->pts = std::exchange(sent_, sent_ + frame->nb_samples);
    }
    check(avcodec_send_frame(encoder_.get(), frame.get()));
    for (;;) {
      const int got = avcodec_receive_packet(encoder_.get(), packet_.get());
      if (got == AVERROR(EAGAIN) || got == AVERROR_EOF) return;
      check(got);
      packet_->stream_index = sound_->index;
      av_packet_rescale_ts(packet_.get(), encoder_->time_base, sound_->time_base);
      check(av_interleaved_write_frame(format_, packet_.get()));
    }
  }

  int sound_frame() const { return encoder_->frame_size; }
  std::int64_t samples_sent() const { return sent_; }

  void finish() {
    check(av_write_trailer(format_));
    check(avio_closep(&format_->pb));
    rename_file(made_, path_, Exit::data);
    done_ = true;
  }

 private:
  int check(int code) const {
    if (code < 0)
      throw Error(Exit::data, fmt::format("cannot write {}: {}", path_, ff::reason(code)),
                  disk_hint, __FILE__, __LINE__);
    return code;
  }

  std::string path_, made_;
  AVRational fps_;
  AVFormatContext* format_ = nullptr;
  AVStream *pictures_ = nullptr, *sound_ = nullptr;
  ff::Ptr<AVCodecContext> encoder_;
  ff::Ptr<AVPacket> packet_{av_packet_alloc()};
  std::int64_t sent_ = 0;
  bool done_ = false;
};

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

class Joiner {
 public:
  Joiner(const Mp4Sound& sound, double fps, const std::string& output, const MediaAccess& access)
      : access_(access), fps_(av_d2q(fps, 100000)), path_(output), output_(output, fps_) {
    if (!sound.file.empty() || !sound.samples.empty()) sound_.emplace(sound, access);
  }

  std::int64_t run(const std::vector<std::string>& segments) {
    for (const std::string& segment : segments) add(segment);
    if (sound_) {
      play_until(frames_, true);
      output_.write_sound({});
    }
    output_.finish();
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
      output_.write_picture(*packet);
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
      output_.add_pictures(stream);
      if (sound_) output_.add_sound(sound_->rate(), sound_->channels());
      output_.start();
      return;
    }
    WEFT_CHECK(p.codec_id == codec_ && p.width == width_ && p.height == height_, Exit::data,
               segment_hint, "segments {} and {} differ: {} {}x{} and {} {}x{}", first_, path,
               avcodec_get_name(codec_), width_, height_, avcodec_get_name(p.codec_id), p.width,
               p.height);
    WEFT_CHECK(header == header_, Exit::data, segment_hint,
               "segments {} and {} were encoded with different settings", first_, path);
  }

  // Encodes sound up to the time of that frame, or, at the end, all that belongs to the clip.
  void play_until(std::int64_t frame, bool all) {
    const std::int64_t until = av_rescale_q_rnd(
        frame, av_inv_q(fps_), {1, static_cast<int>(sound_->rate())}, AV_ROUND_DOWN);
    while (!silent_ && output_.samples_sent() < until) {
      const std::int64_t left = until - output_.samples_sent();
      if (!all && left < output_.sound_frame()) return;
      const auto some = sound_->take(std::min<std::int64_t>(left, output_.sound_frame()));
      silent_ = std::ssize(some) < output_.sound_frame() * sound_->channels();
      if (!some.empty()) output_.write_sound(some);
    }
  }

  MediaAccess access_;
  AVRational fps_;
  std::string path_;
  Output output_;
  std::optional<SoundSource> sound_;
  bool silent_ = false;  // the sound is over
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
