// The only entry point for media. For the files of this module only.
//
// Media is not trusted: FFmpeg knows formats that name other files and addresses (playlists,
// concat, HLS, SDP), names that are protocols (concat:, subfile,,:), and graphs that read and write
// files. Here a name is always a file's: weft opens it itself, as a regular file, and passes its
// bytes to FFmpeg. Only formats that contain their own pictures are accepted, and FFmpeg can open
// nothing else for them.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavfilter/avfilter.h>
#include <libavformat/avformat.h>
#include <libavutil/frame.h>
#include <libswresample/swresample.h>
#include <libswscale/swscale.h>
}

#include "media/media_source.h"

namespace weft::ff {

// FFmpeg's objects with owners.

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

// What a medium is opened for.
enum class Wanted { pictures, sound };

class OpenMedia {
 public:
  // Opens and probes `source` and picks its best stream of that kind. Throws Exit::data, naming the
  // source: not a regular file, an unsupported format, no such stream, larger than access.limits
  // allows, a source graph named by someone not trusted with one, or FFmpeg's reason.
  OpenMedia(const MediaSource& source, const MediaAccess& access, Wanted wanted = Wanted::pictures);
  ~OpenMedia();
  OpenMedia(const OpenMedia&) = delete;
  OpenMedia& operator=(const OpenMedia&) = delete;

  AVFormatContext* format() const { return format_; }
  AVStream* stream() const { return stream_; }
  bool is_image() const;                 // a still picture, of which the first frame counts
  std::vector<std::byte> bytes() const;  // of the file
  // What the container says of the stream, its edit list included: packets to be decoded, and
  // frames that come of them. 0: it does not say.
  struct Promise {
    std::int64_t packets = 0, frames = 0;
  };
  Promise promised() const;
  // Whether durations are the container's own, not made from the bit rate of its beginning.
  bool knows_duration() const;

  // Opens the decoder, with the limit of pixels.
  Ptr<AVCodecContext> open_decoder(int threads);

  // While one of these exists, time counts against limits.timeout; the time in which others use the
  // frames does not count.
  class Work {
   public:
    explicit Work(OpenMedia& media);
    ~Work();
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    OpenMedia& media_;
  };
  // Throws if frames of that size are too large.
  void check_size(std::int64_t height, std::int64_t width) const;
  // Throws if the time is up or a stop was requested (Exit::stopped).
  void check_budget();
  // As check_budget; otherwise "cannot WHAT video PATH" (or sound) with FFmpeg's reason.
  [[noreturn]] void fail(const std::string& what, int code);
  int check(int code, const char* what) {
    if (code < 0) fail(what, code);
    return code;
  }

 private:
  struct Bytes;
  bool is_over();  // of the budget; called by FFmpeg too
  void open_file();
  void open_graph();
  void check_streams();
  std::string formats() const;
  AVDictionary* options() const;
  std::int64_t most_pixels() const;  // of a decoder

  MediaSource source_;
  MediaAccess access_;
  Wanted wanted_;
  const char* kind_;  // of medium, for messages
  std::unique_ptr<Bytes> bytes_;
  AVFormatContext* format_ = nullptr;
  AVStream* stream_ = nullptr;
  const AVCodec* codec_ = nullptr;
  double spent_ = 0, since_ = 0;  // seconds; since when work goes on
  bool late_ = false, stopped_ = false;
};

}  // namespace weft::ff
