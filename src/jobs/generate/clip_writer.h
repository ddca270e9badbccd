// Clips become files in a thread of their own while they are made: a few pieces of frames are in memory, never a clip.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "jobs/generate/frame_memory.h"
#include "jobs/manifest.h"
#include "media/watermark.h"

namespace weft {

class ClipWriter {
 public:
  // Pieces of frames that may wait for the thread, the one in its hands among them.
  static constexpr std::size_t pieces = 4;

  // `watermark`: a picture laid over a copy NAME_watermark of each clip; null for none. `piece_bytes`: the largest piece that
  // add() will be asked for; memory for `pieces` of them is taken here, and none later.
  ClipWriter(std::filesystem::path directory, std::shared_ptr<const Watermark> watermark, int rank,
             std::size_t piece_bytes);
  // Waits for what is under way. A clip that has not ended is dropped.
  ~ClipWriter();
  ClipWriter(const ClipWriter&) = delete;
  ClipWriter& operator=(const ClipWriter&) = delete;

  // A clip begins: an MP4, or a PNG where it has one frame, under a hidden name until it is whole. `clip` says its name, frames
  // and size; file, bytes, pixels and rank are filled in here.
  void begin(FinishedClip clip, double fps);
  // Its next frames, u8 [count, height, width, 3], which `fill` writes. Waits first while all pieces are in use, so that a slow
  // disk slows the clip down and does not fill the memory. What `fill` throws passes through.
  void add(std::int64_t count, const std::function<void(std::span<std::uint8_t>)>& fill);
  // All frames are there; `seconds` that it took: files under their names, then the line in the manifest.
  void end(double seconds);
  // It will not be finished: nothing of it stays.
  void drop();
  // Waits until all is written. The messages of clips that could not be, "NAME: why".
  std::vector<std::string> finish();

  const std::filesystem::path& directory() const { return directory_; }
  // Seconds that the thread has worked, and that add() has waited for it.
  double busy_seconds() const { return busy_; }
  double waited_seconds() const { return waited_; }

 private:
  struct Files;  // of the clip in hand
  struct Begin {
    FinishedClip clip;
    double fps;
  };
  struct Piece {
    std::size_t place;  // in memory_
    std::int64_t frames;
  };
  struct End {
    double seconds;
  };
  struct Drop {};
  using Event = std::variant<Begin, Piece, End, Drop>;

  void tell(Event event);
  void run();
  void take(const Event& event);

  std::filesystem::path directory_;
  std::shared_ptr<const Watermark> watermark_;
  int rank_;
  ClipManifest manifest_;
  std::vector<FrameVector<std::uint8_t>> memory_;  // [pieces], used in turn
  std::int64_t frame_bytes_ = 0;                   // of the clip that began last
  std::size_t next_ = 0;                           // place of the next piece
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> waiting_;
  std::size_t in_use_ = 0;  // pieces
  bool working_ = false, stop_ = false;
  std::vector<std::string> failures_;
  double busy_ = 0, waited_ = 0;
  std::unique_ptr<Files> files_;  // the thread's
  std::thread thread_;
};

}  // namespace weft
