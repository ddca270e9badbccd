// Finished clips become files in a thread of their own, while the next clip is made.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "infer/manifest.h"
#include "media/watermark.h"

namespace weft {

// What a clip was before it was rounded.
struct ClipTensors {
  std::vector<std::vector<float>> latents;  // [loop], each [C,T,h,w] of latent_shape
  std::vector<std::int64_t> latent_shape;
  std::vector<float> frames;  // [frames, height, width, 3]
};

struct MadeClip {
  std::vector<std::uint8_t> rgb;  // [frames, height, width, 3]
  double fps = 24;
  ClipTensors tensors;  // written as NAME.safetensors where there are any
  FinishedClip record;  // file and bytes are filled in when it is written
};

class ClipWriter {
 public:
  // `watermark`: a picture laid over a copy NAME_watermark of each clip; null for none.
  ClipWriter(std::filesystem::path directory, std::shared_ptr<const Watermark> watermark, int rank);
  // Waits for what is under way.
  ~ClipWriter();
  ClipWriter(const ClipWriter&) = delete;
  ClipWriter& operator=(const ClipWriter&) = delete;

  // MP4, or PNG for a single frame, under a hidden name until it is whole; then its line in the manifest. Waits while one
  // clip is waiting behind that in work, so that slow disks do not fill the memory.
  void write(MadeClip clip);
  // Waits until all are written. The messages of those that could not be, "NAME: why".
  std::vector<std::string> finish();
  // Seconds that the thread has worked, and that write() has waited for it.
  double busy_seconds() const { return busy_; }
  double waited_seconds() const { return waited_; }

 private:
  void run();
  void put(MadeClip& clip);
  void put_file(const std::string& file, const MadeClip& clip);
  void put_tensors(const MadeClip& clip);

  std::filesystem::path directory_;
  std::shared_ptr<const Watermark> watermark_;
  ClipManifest manifest_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MadeClip> waiting_;
  bool working_ = false, stop_ = false;
  std::vector<std::string> failures_;
  double busy_ = 0, waited_ = 0;
  std::thread thread_;
};

}  // namespace weft
