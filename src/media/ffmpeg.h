// FFmpeg's objects with owners, and its errors as weft::Error. For the files of this module only.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavfilter/avfilter.h>
#include <libavformat/avformat.h>
#include <libavutil/frame.h>
#include <libswresample/swresample.h>
#include <libswscale/swscale.h>
}

#include <cstdint>
#include <memory>
#include <string>

namespace weft::ff {

struct Deleter {
  void operator()(AVCodecContext* p) const { avcodec_free_context(&p); }
  void operator()(AVFrame* p) const { av_frame_free(&p); }
  void operator()(AVPacket* p) const { av_packet_free(&p); }
  void operator()(AVFilterGraph* p) const { avfilter_graph_free(&p); }
  void operator()(SwsContext* p) const { sws_freeContext(p); }
  void operator()(SwrContext* p) const { swr_free(&p); }
};
template <class T>
using Ptr = std::unique_ptr<T, Deleter>;

// Sends FFmpeg's log to us instead of stderr, once per process. Call before any other use.
void quiet();

// The matrix by which a frame is shown: its own, or else the container's. Null: as it is.
const std::int32_t* display_matrix(const AVStream& stream, const AVFrame* frame = nullptr);

// How long a frame lasts, in its time base; 0: unknown.
std::int64_t duration_of(const AVFrame& frame);

// FFmpeg's message for `code`, with the last error line that it logged since the last call.
std::string reason(int code);

}  // namespace weft::ff
