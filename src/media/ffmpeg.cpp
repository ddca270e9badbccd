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
