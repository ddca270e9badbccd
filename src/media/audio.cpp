#include "media/audio.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "media/open_media.h"

extern "C" {
#include <libavutil/channel_layout.h>
#include <libavutil/opt.h>
}

namespace weft {
namespace {

constexpr std::int64_t least_rate = 1000, most_rate = 768'000;
constexpr float loudest = 1000;  // 60 dB above full scale
constexpr int most_channels = 64;
constexpr const char* sound_hint = "try to play it with ffplay; leave it out, or convert it";

}  // namespace

// Packets -> decoder -> resampler -> floats, one decoded frame at a time.
struct AudioReader::State {
  std::string path;
  AudioOptions options;
  ff::OpenMedia media;
  AVStream* stream;
  ff::Ptr<AVCodecContext> decoder;
  ff::Ptr<AVPacket> packet{av_packet_alloc()};
  ff::Ptr<AVFrame> decoded{av_frame_alloc()};
  ff::Ptr<SwrContext> resampler;
  // What the resampler takes and gives.
  int in_format = -1, in_rate = 0, in_channels = 0;
  std::int64_t rate = 0;
  int channels = 0;

  std::vector<float> block;
  std::int64_t taken = 0;      // samples per channel that the resampler took
  std::int64_t delivered = 0;  // and that next() gave
  std::int64_t settled = 0;    // of `wanted`, what was taken at rates before the present one
  std::int64_t damaged = 0;    // packets in a row that did not decode
  bool at_end = false, drained = false;

  State(const MediaSource& from, AudioOptions how)
      : path(from.name()),
        options(std::move(how)),
        media(from, options.access, ff::Wanted::sound),
        stream(media.stream()),
        decoder(media.open_decoder(1)) {
    const AVCodecParameters& p = *stream->codecpar;
    check_shape(p.sample_rate, p.ch_layout.nb_channels);
    rate = options.rate > 0 ? options.rate : p.sample_rate;
    channels = options.channels > 0 ? options.channels : std::min(p.ch_layout.nb_channels, 2);
    WEFT_ASSERT(rate <= most_rate && channels <= 2);
  }

  int check(int code, const char* what) { return media.check(code, what); }

  void check_shape(std::int64_t sample_rate, std::int64_t count) const {
    WEFT_CHECK(sample_rate >= least_rate && sample_rate <= most_rate, Exit::data, sound_hint,
               "sound {} claims {} samples a second; {} to {} are read", path, sample_rate,
               least_rate, most_rate);
    WEFT_CHECK(count > 0 && count <= most_channels, Exit::data, sound_hint,
               "sound {} claims {} channels; 1 to {} are read", path, count, most_channels);
  }

  // Samples per channel that what was taken so far makes in all.
  std::int64_t wanted() const {
    return settled + av_rescale_rnd(taken, rate, in_rate, AV_ROUND_UP);
  }

  // For frames of the shape of `decoded`.
  void build_resampler() {
    check_shape(decoded->sample_rate, decoded->ch_layout.nb_channels);
    in_format = decoded->format;
    in_rate = decoded->sample_rate;
    in_channels = decoded->ch_layout.nb_channels;
    // Channels in the order of the file: its names for them, which may be missing or nonsense, do
    // not matter here.
    AVChannelLayout from{}, to{};
    av_channel_layout_default(&from, in_channels);
    av_channel_layout_default(&to, channels);
    if (channels == 2 && in_channels > 2 && av_channel_layout_check(&decoded->ch_layout) == 1 &&
        decoded->ch_layout.order == AV_CHANNEL_ORDER_NATIVE)
      av_channel_layout_copy(&from, &decoded->ch_layout);
    SwrContext* made = nullptr;
    const int allocated =
        swr_alloc_set_opts2(&made, &to, AV_SAMPLE_FMT_FLT, static_cast<int>(rate), &from,
                            static_cast<AVSampleFormat>(in_format), in_rate, 0, nullptr);
    resampler.reset(made);
    av_channel_layout_uninit(&from);
    check(allocated, "convert");
    av_opt_set_sample_fmt(made, "internal_sample_fmt", AV_SAMPLE_FMT_FLTP, 0);
    // librosa's "kaiser_best", with which the originals resample: 64 zero crossings on either side.
    av_opt_set(made, "filter_type", "kaiser", 0);
    av_opt_set_int(made, "kaiser_beta", 15, 0);
    av_opt_set_int(made, "filter_size", 128, 0);
    av_opt_set_double(made, "cutoff", 0.9476, 0);
    if (channels == 1 && in_channels > 1) {
      const std::vector<double> mean(in_channels, 1.0 / in_channels);
      check(swr_set_matrix(made, mean.data(), in_channels), "convert");
    }
    check(swr_init(made), "convert");
  }

  // Decodes up to the next frame; false at the end.
  bool decode() {
    for (;;) {
      const int got = avcodec_receive_frame(decoder.get(), decoded.get());
      if (got == AVERROR_EOF) return false;
      if (got >= 0) {
        damaged = 0;
        return true;
      }
      // A damaged packet is left out, as players do; the length is checked at the end.
      if (got != AVERROR(EAGAIN)) skip(got);
      feed();
    }
  }
  void skip(int code) {
    constexpr std::int64_t most_damaged = 1000;
    if (code == AVERROR_INVALIDDATA && ++damaged < most_damaged) return;
    media.fail("decode", code);
  }

  void feed() {
    for (;;) {
      const int got = av_read_frame(media.format(), packet.get());
      if (got == AVERROR_EOF) {
        const int sent = avcodec_send_packet(decoder.get(), nullptr);
        if (sent != AVERROR_EOF) check(sent, "decode");
        return;
      }
      check(got, "read");
      if (packet->stream_index != stream->index) {
        av_packet_unref(packet.get());
        continue;
      }
      const int sent = avcodec_send_packet(decoder.get(), packet.get());
      av_packet_unref(packet.get());
      if (sent >= 0) return;
      skip(sent);
    }
  }

  // Gives the resampler `decoded`, or nothing, which takes out what it holds, up to `wanted()`.
  void convert(bool last) {
    const int count = last ? 0 : decoded->nb_samples;
    const std::int64_t room = swr_get_out_samples(resampler.get(), count) + 64;
    const std::size_t before = block.size();
    block.resize(before + static_cast<std::size_t>(room * channels));
    auto* out = reinterpret_cast<std::uint8_t*>(block.data() + before);
    const int made =
        check(swr_convert(resampler.get(), &out, static_cast<int>(room),
                          last ? nullptr : const_cast<const std::uint8_t**>(decoded->extended_data),
                          count),
              "convert");
    taken += count;
    std::int64_t keep = made;
    const std::int64_t so_far = delivered + static_cast<std::int64_t>(before) / channels;
    keep = std::min(keep, wanted() - so_far);
    // The resampler's tail may lack a sample or two.
    if (last) keep = std::max<std::int64_t>(wanted() - so_far, 0);
    block.resize(before + static_cast<std::size_t>(std::min<std::int64_t>(keep, made) * channels));
    block.resize(before + static_cast<std::size_t>(keep * channels), 0.0f);
  }

  void drain() {
    if (resampler == nullptr) return;
    convert(true);
    settled = wanted();
    taken = 0;
    resampler.reset();
  }

  void check_length() const {
    const double most = options.access.limits.max_hours * 3600;
    const double seconds = static_cast<double>(delivered) / static_cast<double>(rate);
    WEFT_CHECK(seconds <= most, Exit::data, "cut it, or raise media.max_hours",
               "sound {} has more than media.max_hours = {}", path,
               options.access.limits.max_hours);
  }

  void check_end() const {
    const double promised = stream->duration != AV_NOPTS_VALUE && media.knows_duration()
                                ? static_cast<double>(stream->duration) * av_q2d(stream->time_base)
                                : 0;
    const double seconds = static_cast<double>(delivered) / static_cast<double>(rate);
    WEFT_CHECK(seconds >= 0.9 * promised - 0.1, Exit::data, "the file is incomplete: copy it again",
               "sound {} ends after {:.2f} of {:.2f} s", path, seconds, promised);
  }

  std::span<const float> next() {
    const ff::OpenMedia::Work work(media);
    block.clear();
    while (block.empty() && !at_end) {
      media.check_budget();
      if (!decode()) {
        drain();
        at_end = true;
        break;
      }
      if (decoded->nb_samples <= 0) continue;
      if (decoded->format != in_format || decoded->sample_rate != in_rate ||
          decoded->ch_layout.nb_channels != in_channels)
        drain();
      if (resampler == nullptr) build_resampler();
      convert(false);
    }
    for (std::size_t i = 0; i < block.size(); ++i)
      WEFT_CHECK(std::abs(block[i]) <= loudest, Exit::data,
                 "write samples within -1 and 1, or leave it out",
                 "sound {} has the sample {} after {:.3f} s; {} either way of 0 is the most", path,
                 block[i],
                 static_cast<double>(delivered + static_cast<std::int64_t>(i) / channels) /
                     static_cast<double>(rate),
                 loudest);
    delivered += static_cast<std::int64_t>(block.size()) / channels;
    check_length();
    if (at_end && !std::exchange(drained, true)) check_end();
    return block;
  }
};

AudioReader::AudioReader(const MediaSource& source, AudioOptions options)
    : state_(std::make_unique<State>(source, std::move(options))) {}
AudioReader::~AudioReader() = default;
std::span<const float> AudioReader::next() { return state_->next(); }
std::int64_t AudioReader::rate() const { return state_->rate; }
int AudioReader::channels() const { return state_->channels; }

std::vector<float> read_speech(const std::string& path, std::int64_t rate,
                               const MediaAccess& access) {
  AudioReader reader({path, MediaTrust::untrusted}, {rate, 1, access});
  std::vector<float> all;
  for (std::span<const float> some = reader.next(); !some.empty(); some = reader.next())
    all.insert(all.end(), some.begin(), some.end());
  WEFT_CHECK(!all.empty(), Exit::data, "name a file with sound", "sound {} has no samples", path);
  return all;
}

}  // namespace weft
