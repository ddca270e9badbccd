#include "media/open_media.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <optional>
#include <span>

extern "C" {
#include <libavdevice/avdevice.h>
#include <libavutil/avstring.h>
#include <libavutil/error.h>
#include <libavutil/log.h>
}

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "media/image_file.h"
#include "media/media_source.h"
#include "media/video_reader.h"

namespace weft {
namespace ff {
namespace {

std::mutex mutex;
std::string last_line;  // locked: decoders log from their own threads

void keep(void* object, int level, const char* format, va_list arguments) {
  if (level > AV_LOG_ERROR) return;
  char line[512];
  int prefix = 1;
  av_log_format_line2(object, level, format, arguments, line, sizeof line, &prefix);
  std::string text = line;
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  // "[mov,mp4 @ 0x55..] moov atom not found": drop the address, which is of no use to users.
  const auto at = text.find(" @ 0x"), end = text.find("] ");
  if (at != std::string::npos && end != std::string::npos && at < end) text.erase(at, end - at);
  std::lock_guard lock(mutex);
  if (!text.empty()) last_line = text;
}

}  // namespace

void quiet() {
  static const bool once = [] {
    av_log_set_callback(keep);
    avdevice_register_all();  // for lavfi sources
    return true;
  }();
  (void)once;
}

const std::int32_t* display_matrix(const AVStream& stream, const AVFrame* frame) {
  const AVFrameSideData* own =
      frame == nullptr ? nullptr : av_frame_get_side_data(frame, AV_FRAME_DATA_DISPLAYMATRIX);
  if (own != nullptr) return reinterpret_cast<const std::int32_t*>(own->data);
#if LIBAVCODEC_VERSION_INT >= AV_VERSION_INT(60, 30, 100)  // FFmpeg 6.1
  const AVCodecParameters& p = *stream.codecpar;
  const AVPacketSideData* side =
      av_packet_side_data_get(p.coded_side_data, p.nb_coded_side_data, AV_PKT_DATA_DISPLAYMATRIX);
  const std::uint8_t* data = side == nullptr ? nullptr : side->data;
#else
  const std::uint8_t* data = av_stream_get_side_data(&stream, AV_PKT_DATA_DISPLAYMATRIX, nullptr);
#endif
  return reinterpret_cast<const std::int32_t*>(data);
}

std::int64_t duration_of(const AVFrame& frame) {
#if LIBAVUTIL_VERSION_MAJOR >= 58  // FFmpeg 6
  return frame.duration;
#else
  return frame.pkt_duration;
#endif
}

std::string reason(int code) {
  char words[AV_ERROR_MAX_STRING_SIZE] = {};
  av_strerror(code, words, sizeof words);
  std::lock_guard lock(mutex);
  std::string out = words;
  if (!last_line.empty()) out += " (" + last_line + ")";
  last_line.clear();
  return out;
}

}  // namespace ff

namespace ff {

namespace {

// Demuxers of footage and pictures. Excluded are those that name other files (hls, dash, concat,
// image2 with its patterns, sdp, svg, subtitles, devices), and formats that nobody keeps footage
// in.
constexpr const char* picture_formats =
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,ogg,mxf,asf,nut,ivf,obu,dv,yuv4mpegpipe,h264,hevc,"
    "m4v,"
    "mjpeg,gif,apng,png_pipe,jpeg_pipe,jpegxl_pipe,jpegls_pipe,j2k_pipe,webp_pipe,bmp_pipe,tiff_"
    "pipe,"
    "qoi_pipe,dpx_pipe,exr_pipe,pam_pipe,pbm_pipe,pgm_pipe,ppm_pipe";
// Those of sound alone, which may also come with pictures.
constexpr const char* sound_formats = "wav,w64,aiff,au,caf,mp3,flac,aac,ac3,eac3,amr,wv,tta";

constexpr const char* size_hint = "leave it out, make it smaller, or raise media.max_megapixels";
constexpr const char* general_hint = "try to play it with ffplay; leave it out, or convert it";

// FFmpeg's demuxers call this to open other files.
int refuse_to_open(AVFormatContext* context, AVIOContext** io, const char*, int, AVDictionary**) {
  *io = nullptr;
  av_log(context, AV_LOG_ERROR, "it names another file, which is not opened\n");
  return AVERROR(EPERM);
}

// Cameras put a second picture, a film or data of their own behind a JPEG, which FFmpeg may take
// for a film of JPEGs; and an animated PNG is a picture to all who do not know of it. So files that
// begin as one of the two are a picture, unless their names say otherwise. Null: FFmpeg decides.
const AVInputFormat* picture_format(std::span<const std::byte> begin, const std::string& name) {
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), begin.size());
  const auto ends_as = [&](std::string_view ending) {
    return name.size() >= ending.size() &&
           av_strcasecmp(name.c_str() + name.size() - ending.size(), ending.data()) == 0;
  };
  if (text.starts_with("\xff\xd8\xff") && !ends_as(".mjpeg") && !ends_as(".mjpg"))
    return av_find_input_format("jpeg_pipe");
  if (text.starts_with("\x89PNG") && !ends_as(".apng")) return av_find_input_format("png_pipe");
  return nullptr;
}

}  // namespace

// A regular file as FFmpeg's bytes.
struct OpenMedia::Bytes {
  Bytes(OpenMedia& owner, File opened, std::uint64_t first, std::uint64_t count)
      : media(owner), file(std::move(opened)), begin(first), size(count) {
    constexpr int block = 1 << 16;
    auto* buffer = static_cast<unsigned char*>(av_malloc(block));
    io = avio_alloc_context(buffer, block, 0, this, read, nullptr, seek);
    WEFT_ASSERT(io != nullptr);
  }
  ~Bytes() {
    av_freep(&io->buffer);
    avio_context_free(&io);
  }

  static int read(void* opaque, std::uint8_t* out, int wanted) {
    auto& b = *static_cast<Bytes*>(opaque);
    // Checked at every read, since one FFmpeg call such as probing may read for long.
    if (b.media.is_over()) return AVERROR_EXIT;
    const auto count = static_cast<std::size_t>(
        std::min<std::uint64_t>(static_cast<std::uint64_t>(wanted), b.size - b.at));
    if (count == 0) return AVERROR_EOF;
    try {
      // An exception must not pass through FFmpeg's C frames: log the reason for fail() and return
      // a code.
      b.file.read(std::as_writable_bytes(std::span(out, count)), b.begin + b.at);
    } catch (const Error& e) {
      av_log(nullptr, AV_LOG_ERROR, "%s\n", e.what());
      return AVERROR(EIO);
    }
    b.at += count;
    return static_cast<int>(count);
  }
  static std::int64_t seek(void* opaque, std::int64_t offset, int whence) {
    auto& b = *static_cast<Bytes*>(opaque);
    const auto size = static_cast<std::int64_t>(b.size);
    whence &= ~AVSEEK_FORCE;
    if (whence == AVSEEK_SIZE) return size;
    const std::int64_t from = whence == SEEK_SET   ? 0
                              : whence == SEEK_CUR ? static_cast<std::int64_t>(b.at)
                                                   : size;
    // Tested without adding first, since the sum of file-supplied offsets could overflow.
    if (offset < -from || offset > size - from) return AVERROR(EINVAL);
    b.at = static_cast<std::uint64_t>(from + offset);
    return from + offset;
  }

  OpenMedia& media;
  File file;
  std::uint64_t begin = 0, size = 0, at = 0;
  AVIOContext* io = nullptr;
};

OpenMedia::Work::Work(OpenMedia& media) : media_(media) { media_.since_ = now_seconds(); }
OpenMedia::Work::~Work() { media_.spent_ += now_seconds() - media_.since_; }

OpenMedia::OpenMedia(const MediaSource& source, const MediaAccess& access, Wanted wanted)
    : source_(source),
      access_(access),
      wanted_(wanted),
      kind_(wanted == Wanted::sound ? "sound" : "video") {
  quiet();
  const Work work(*this);
  format_ = avformat_alloc_context();
  WEFT_ASSERT(format_ != nullptr);
  format_->interrupt_callback = {
      [](void* media) { return static_cast<OpenMedia*>(media)->is_over() ? 1 : 0; }, this};
  format_->io_open = refuse_to_open;
  try {
    if (is_source_graph(source_.path))
      open_graph();
    else
      open_file();
    check_streams();
  } catch (...) {
    avformat_close_input(&format_);
    throw;
  }
}

OpenMedia::~OpenMedia() { avformat_close_input(&format_); }

std::string OpenMedia::formats() const {
  std::string all = picture_formats;
  if (wanted_ == Wanted::sound) all += std::string(",") + sound_formats;
  return all;
}

AVDictionary* OpenMedia::options() const {
  AVDictionary* o = nullptr;
  av_dict_set(&o, "protocol_whitelist", "file", 0);
  av_dict_set(&o, "format_whitelist", is_source_graph(source_.path) ? "lavfi" : formats().c_str(),
              0);
  av_dict_set(&o, "max_streams", "64", 0);
  return o;
}

void OpenMedia::open_file() {
  File file = File::open(source_.path, Exit::data);
  const std::uint64_t whole = file.size();
  const bool member = !source_.member.empty();
  WEFT_CHECK(!member || (source_.begin <= whole && source_.bytes <= whole - source_.begin),
             Exit::data, "run the same command again once the archive is complete",
             "{} changed since its members were listed", source_.path);
  const std::uint64_t count = member ? source_.bytes : whole;
  WEFT_CHECK(gib(count) <= access_.limits.max_gib, Exit::data,
             "leave it out, or raise media.max_gib", "{} has {:.3f} GiB, media.max_gib = {}",
             source_.name(), gib(count), access_.limits.max_gib);
  std::vector<std::byte> begin(std::min<std::uint64_t>(count, 512));
  file.read(begin, member ? source_.begin : 0);
  const FileKind other = unreadable_kind(begin);
  WEFT_CHECK(other.what == nullptr, Exit::data, other.hint, "cannot open {} {}: it is {}", kind_,
             source_.name(), other.what);
  bytes_ = std::make_unique<Bytes>(*this, std::move(file), member ? source_.begin : 0, count);
  const AVInputFormat* kind = picture_format(begin, source_.name());
  if (kind == nullptr) check(av_probe_input_buffer2(bytes_->io, &kind, "", nullptr, 0, 0), "open");
  WEFT_CHECK(av_match_list(kind->name, formats().c_str(), ',') > 0, Exit::data,
             wanted_ == Wanted::sound ? "convert it to a file of sound, such as wav, flac or mp3"
                                      : "convert it to a file of pictures alone, such as mp4, mkv "
                                        "or png",
             "cannot open {} {}: it is of the kind \"{}\", which weft does not read", kind_,
             source_.name(), kind->name);
  format_->pb = bytes_->io;
  AVDictionary* o = options();
  // Pass no name: FFmpeg would parse it as a protocol, and look for other files next to it.
  const int opened = avformat_open_input(&format_, "", kind, &o);
  av_dict_free(&o);
  check(opened, "open");
}

void OpenMedia::open_graph() {
  WEFT_CHECK(source_.trust == MediaTrust::deck, Exit::data,
             "name a file; decks and the command line alone may ask for FFmpeg's sources",
             "{} may not be named by a prompt or a list", source_.path);
  const std::string graph = source_.path.substr(source_.path.find(':') + 1);
  check_source_graph(graph);
  AVDictionary* o = options();
  const int opened =
      avformat_open_input(&format_, graph.c_str(), av_find_input_format("lavfi"), &o);
  av_dict_free(&o);
  check(opened, "open");
}

void OpenMedia::check_streams() {
  const MediaDeck& limits = access_.limits;
  // FFmpeg decodes the first frames here to detect a stream's format, so sizes are limited before.
  std::vector<AVDictionary*> each(format_->nb_streams);
  for (unsigned i = 0; i < format_->nb_streams; ++i) {
    const AVCodecParameters& p = *format_->streams[i]->codecpar;
    check_size(p.height, p.width);
    av_dict_set_int(&each[i], "max_pixels", most_pixels(), 0);
  }
  const int understood = avformat_find_stream_info(format_, each.empty() ? nullptr : each.data());
  for (AVDictionary*& o : each) av_dict_free(&o);
  check(understood, "understand");
  const bool sound = wanted_ == Wanted::sound;
  const int index = av_find_best_stream(format_, sound ? AVMEDIA_TYPE_AUDIO : AVMEDIA_TYPE_VIDEO,
                                        -1, -1, &codec_, 0);
  WEFT_CHECK(!sound || index != AVERROR_STREAM_NOT_FOUND, Exit::data,
             "name a file with sound, or add some", "{} has no sound", source_.name());
  WEFT_CHECK(sound || index != AVERROR_STREAM_NOT_FOUND, Exit::data,
             "name a video or a picture, or leave it out", "{} has no pictures", source_.name());
  check(index, "find a decoder for");
  stream_ = format_->streams[index];
  for (unsigned i = 0; i < format_->nb_streams; ++i)  // the others are not even demuxed
    if (static_cast<int>(i) != index) format_->streams[i]->discard = AVDISCARD_ALL;
  check_size(stream_->codecpar->height, stream_->codecpar->width);
  // An SVG drawing may name other files.
  WEFT_CHECK(codec_->id != AV_CODEC_ID_SVG, Exit::data, general_hint,
             "cannot open video {}: SVG is not read", source_.name());
#if LIBAVFORMAT_VERSION_MAJOR >= 61  // FFmpeg 7 gives a picture's tiles as streams
  for (unsigned i = 0; i < format_->nb_stream_groups; ++i)
    WEFT_CHECK(format_->stream_groups[i]->type != AV_STREAM_GROUP_PARAMS_TILE_GRID, Exit::data,
               "convert it to JPEG or PNG", "picture {} is made of tiles, which are not read",
               source_.name());
#endif
  const double seconds = static_cast<double>(format_->duration) / AV_TIME_BASE;
  WEFT_CHECK(format_->duration == AV_NOPTS_VALUE || !knows_duration() ||
                 seconds <= limits.max_hours * 3600,
             Exit::data, "cut it, or raise media.max_hours",
             "{} {} has {:.2f} hours, media.max_hours = {}", kind_, source_.name(), seconds / 3600,
             limits.max_hours);
}

bool OpenMedia::is_image() const {
  const AVDictionaryEntry* brand = av_dict_get(format_->metadata, "major_brand", nullptr, 0);
  const std::string_view name = brand == nullptr ? "" : brand->value;
  return std::string_view(format_->iformat->name).ends_with("_pipe") || name == "avif" ||
         name == "avis" || name == "mif1";
}

std::vector<std::byte> OpenMedia::bytes() const {
  check_file_size(bytes_->size, source_.name(), access_.limits);
  std::vector<std::byte> all(bytes_->size);
  bytes_->file.read(all, bytes_->begin);
  return all;
}

OpenMedia::Promise OpenMedia::promised() const {
  Promise p{stream_->nb_frames, stream_->nb_frames};
  // The index of MOV is what the edit list leaves of the samples.
  const int indexed = avformat_index_get_entries_count(stream_);
  if (p.packets <= 0 || indexed <= 0 ||
      !std::string_view(format_->iformat->name).starts_with("mov"))
    return p;
  p = {indexed, 0};
  for (int i = 0; i < indexed; ++i)
    p.frames += (avformat_index_get_entry(stream_, i)->flags & AVINDEX_DISCARD_FRAME) == 0 ? 1 : 0;
  return p;
}

bool OpenMedia::knows_duration() const {
  return format_->duration_estimation_method != AVFMT_DURATION_FROM_BITRATE;
}

Ptr<AVCodecContext> OpenMedia::open_decoder(int threads) {
  const Work work(*this);
  Ptr<AVCodecContext> decoder(avcodec_alloc_context3(codec_));
  WEFT_ASSERT(decoder != nullptr);
  check(avcodec_parameters_to_context(decoder.get(), stream_->codecpar), "decode");
  decoder->thread_count = std::max(1, threads);
  decoder->pkt_timebase = stream_->time_base;
  decoder->max_pixels = most_pixels();
  check(avcodec_open2(decoder.get(), codec_, nullptr), "decode");
  return decoder;
}

void OpenMedia::check_size(std::int64_t height, std::int64_t width) const {
  const double most = access_.limits.max_megapixels;
  WEFT_CHECK(height * width <= std::llround(most * 1e6), Exit::data, size_hint,
             "video {} has frames of {}x{} pixels, media.max_megapixels = {}", source_.name(),
             height, width, most);
}

// Includes room for whole macroblocks: this limit guards memory, check_size is exact.
std::int64_t OpenMedia::most_pixels() const {
  return std::llround(access_.limits.max_megapixels * 1e6 * 1.25) + (1 << 16);
}

bool OpenMedia::is_over() {
  const double limit = access_.limits.timeout;
  late_ = late_ || (limit > 0 && spent_ + now_seconds() - since_ > limit);
  stopped_ = stopped_ || (access_.stop && access_.stop());
  return late_ || stopped_;
}

void OpenMedia::check_budget() {
  if (!is_over()) return;
  WEFT_CHECK(!stopped_, Exit::stopped, "run the same command to resume",
             "stopped on request while {} was read", source_.name());
  throw Error(Exit::data,
              fmt::format("{} {} takes longer to read than media.timeout = {} s", kind_,
                          source_.name(), access_.limits.timeout),
              "leave it out, convert it, or raise media.timeout", __FILE__, __LINE__);
}

void OpenMedia::fail(const std::string& what, int code) {
  if (late_ || stopped_) check_budget();
  const std::string why = reason(code);
  WEFT_CHECK(why.find("max pixel count") == std::string::npos, Exit::data, size_hint,
             "cannot {} {} {}, media.max_megapixels = {}: {}", what, kind_, source_.name(),
             access_.limits.max_megapixels, why);
  throw Error(Exit::data, fmt::format("cannot {} {} {}: {}", what, kind_, source_.name(), why),
              general_hint, __FILE__, __LINE__);
}

}  // namespace ff

namespace {

// Closes the connection on every exit path.
struct Stream {
  AVIOContext* io = nullptr;
  ~Stream() { avio_closep(&io); }
};

// When to give up. FFmpeg polls this while it waits.
struct Budget {
  const MediaAccess& access;
  double begin = now_seconds();
  bool late = false, stopped = false;

  bool is_over() {
    const double limit = access.limits.timeout;
    late = late || (limit > 0 && now_seconds() - begin > limit);
    stopped = stopped || (access.stop && access.stop());
    return late || stopped;
  }
};

void fetch(const std::string& address, const std::string& part, const MediaAccess& access) {
  Budget budget{access};
  const auto check = [&](int code) {
    if (budget.is_over()) {
      WEFT_CHECK(!budget.stopped, Exit::stopped, "run the same command to resume",
                 "stopped on request while {} was fetched", address);
      throw Error(Exit::data,
                  fmt::format("{} takes longer to fetch than media.timeout = {} s", address,
                              access.limits.timeout),
                  "download it before, and name the file", __FILE__, __LINE__);
    }
    WEFT_CHECK(code >= 0, Exit::data,
               "can this node reach the address? Compute nodes often cannot: download it before, "
               "and name the file",
               "cannot fetch {}: {}", address, ff::reason(code));
  };
  Stream from;
  AVDictionary* options = nullptr;
  av_dict_set(&options, "rw_timeout", "30000000", 0);  // microseconds without a byte
  av_dict_set(&options, "protocol_whitelist", "http,https,ftp,tcp,tls", 0);
  const AVIOInterruptCB interrupt = {
      [](void* b) { return static_cast<Budget*>(b)->is_over() ? 1 : 0; }, &budget};
  const int opened = avio_open2(&from.io, address.c_str(), AVIO_FLAG_READ, &interrupt, &options);
  av_dict_free(&options);
  check(opened);
  const auto most = static_cast<std::uint64_t>(access.limits.max_download_mib * (1 << 20));
  const std::int64_t promised = avio_size(from.io);
  const auto check_size = [&](std::uint64_t bytes) {
    WEFT_CHECK(bytes <= most, Exit::data, "name something smaller, or raise media.max_download_mib",
               "{} is larger than media.max_download_mib = {}", address,
               access.limits.max_download_mib);
  };
  check_size(static_cast<std::uint64_t>(std::max<std::int64_t>(promised, 0)));
  File to = File::create(part, Exit::data);
  std::array<unsigned char, 1 << 16> block;
  std::uint64_t written = 0;
  for (int n = 0; (n = avio_read(from.io, block.data(), block.size())) != AVERROR_EOF;) {
    check(n);
    const auto bytes = static_cast<std::size_t>(n);
    check_size(written + bytes);
    to.write(std::as_bytes(std::span(block).first(bytes)), written);
    written += bytes;
  }
  WEFT_CHECK(written > 0 && (promised <= 0 || written == static_cast<std::uint64_t>(promised)),
             Exit::data, "start the job again", "cannot fetch {}: {} of {} bytes came", address,
             written, promised);
  to.close();
}

}  // namespace

bool is_address(const std::string& name) {
  return name.starts_with("http://") || name.starts_with("https://") || name.starts_with("ftp://");
}

void download(const std::string& address, const std::string& path, const MediaAccess& access) {
  ff::quiet();
  WEFT_CHECK(access.limits.max_download_mib > 0, Exit::data,
             "download it before, and name the file; or set media.max_download_mib",
             "{} is not fetched: media.max_download_mib = 0", address);
  WholeFile file(path, Exit::data);
  fetch(address, file.draft(), access);
  try {
    // Opened once under its temporary name: only files that are read as media get their final name.
    VideoReader({file.draft(), MediaTrust::untrusted}, {.access = access});
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("what {} holds is not read: {}", address, e.what()), e.hint(),
                __FILE__, __LINE__);
  }
  file.commit();
}

}  // namespace weft
