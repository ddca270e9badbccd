#include "media/ffmpeg.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

extern "C" {
#include <libavdevice/avdevice.h>
#include <libavutil/error.h>
#include <libavutil/log.h>
}

namespace weft::ff {
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

}  // namespace weft::ff
