// Writes clips to files in a thread of its own while they are made: a few pieces of frames are in
// memory, never a whole clip. Also a copy with a watermark, and the tensors before rounding.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/safetensors.h"
#include "config/deck.h"
#include "tensor/tensor.h"

namespace weft {

class Watermark {
 public:
  // A picture file, with or without transparency. Throws Exit::data, as VideoReader does.
  explicit Watermark(const std::string& path, const MediaDeck& limits = {});

  // Lays it over the upper left corner of each of `frames` frames rgb [T,H,W,3], a tenth of their
  // height high (at least 2 pixels), proportions kept: what the released sampler requests from
  // FFmpeg.
  void lay_over(std::uint8_t* rgb, std::int64_t frames, std::int64_t height,
                std::int64_t width) const;

 private:
  std::vector<std::uint8_t> rgba_;  // [height_, width_, 4]
  std::int64_t height_ = 0, width_ = 0;
};

// A clip to be written.
struct ClipToWrite {
  // Its line of OUT/generated.jsonl (jobs/engine/manifest.h): name, key, and what the job says.
  // Size, seconds, rank, files, and `pixels`, the XXH3-128 of the pixels [T,H,W,3] before they were
  // compressed, are added.
  nlohmann::ordered_json line;
  std::int64_t frames = 0, height = 0, width = 0;
  // What it begins with or is edited from.
  struct Picture {
    std::int64_t height = 0, width = 0;
    std::vector<std::uint8_t> rgb;
  };
  std::vector<Picture> pictures;
};

class ClipWriter {
 public:
  // Pieces of frames that may wait for the thread, the one in its hands among them.
  static constexpr std::size_t pieces = 4;

  // `watermark`: a picture laid over a copy NAME_watermark of each clip; null for none.
  // `piece_bytes`: the largest piece that add() will be asked for; memory for `pieces` of them is
  // taken here, and none later. `finished` is called on the writing thread with the line of each
  // clip whose files are there.
  ClipWriter(std::filesystem::path directory, std::shared_ptr<const Watermark> watermark, int rank,
             std::size_t piece_bytes, std::function<void(const nlohmann::ordered_json&)> finished);
  // Waits for the thread's pending work. Drops a clip that has not ended.
  ~ClipWriter();
  ClipWriter(const ClipWriter&) = delete;
  ClipWriter& operator=(const ClipWriter&) = delete;

  // A clip begins: an MP4, or a PNG where it has one frame, which appears with its end. Its
  // pictures go into references/.
  void begin(ClipToWrite clip, double fps);
  // Adds the next frames, u8 [count, height, width, 3], which `fill` writes. First waits while all
  // pieces are in use, so that a slow disk slows the clip down instead of filling the memory.
  // Exceptions of `fill` pass through.
  void add(std::int64_t count, const std::function<void(std::span<std::uint8_t>)>& fill);
  // Ends the clip, which took `seconds`: renames its files, then calls `finished`.
  void end(double seconds);
  // Abandons the clip and removes its files.
  void drop();
  // A clip that could not be written.
  struct Failure {
    std::string name, why;
  };
  // Waits until everything is written.
  std::vector<Failure> finish();

  const std::filesystem::path& directory() const { return directory_; }
  // Seconds that the thread has worked, and that add() has waited for it.
  double busy_seconds() const { return busy_; }
  double waited_seconds() const { return waited_; }

 private:
  struct Files;  // of the clip in hand
  using Step = std::function<void()>;

  void send(Step step);
  void run();
  // On the thread.
  void attempt(const Step& step);
  void open(double fps);
  void write(std::uint8_t* rgb, std::int64_t frames);
  void close(double seconds);

  std::filesystem::path directory_;
  std::shared_ptr<const Watermark> watermark_;
  int rank_;
  std::function<void(const nlohmann::ordered_json&)> finished_;
  std::vector<std::vector<std::uint8_t>> memory_;  // [pieces], used in turn
  std::int64_t frame_bytes_ = 0;                   // of the clip that began last
  std::size_t next_ = 0;                           // place of the next piece
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> waiting_;
  std::size_t in_use_ = 0;  // pieces
  bool working_ = false, stop_ = false;
  std::vector<Failure> failures_;
  double busy_ = 0, waited_ = 0;
  std::unique_ptr<Files> files_;  // the thread's
  std::thread thread_;
};

class ClipTensors {
 public:
  // latent_0, latent_1 ... f32 [C,T,h,w] of `latent` [1,C,T,h,w], one a loop, and frames f32
  // [frames,height,width,3].
  ClipTensors(const std::filesystem::path& path, std::int64_t loops, const Shape& latent,
              std::int64_t frames, std::int64_t height, std::int64_t width);

  void add_latent(std::int64_t loop, const Tensor& z);
  // The next frames.
  void add_frames(const Tensor& frames);
  // Gives the file its name. A file that is not finished is removed.
  void finish() { file_->finish(); }

 private:
  std::int64_t loops_;
  std::uint64_t at_ = 0;  // bytes of frames so far
  std::optional<SafetensorsWriter> file_;
};

}  // namespace weft
