#include "infer/clip_writer.h"

#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "formats/file.h"
#include "formats/safetensors.h"
#include "media/writers.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_waiting = 1;

}  // namespace

ClipWriter::ClipWriter(fs::path directory, std::shared_ptr<const Watermark> watermark, int rank)
    : directory_(std::move(directory)),
      watermark_(std::move(watermark)),
      manifest_(directory_, rank),
      thread_([this] { run(); }) {}

ClipWriter::~ClipWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ClipWriter::write(MadeClip clip) {
  const double begin = now_seconds();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.size() < most_waiting; });
  waited_ += now_seconds() - begin;
  waiting_.push_back(std::move(clip));
  changed_.notify_all();
}

std::vector<std::string> ClipWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.empty() && !working_; });
  return std::exchange(failures_, {});
}

void ClipWriter::run() {
  for (;;) {
    MadeClip clip;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      clip = std::move(waiting_.front());
      waiting_.pop_front();
      working_ = true;
    }
    changed_.notify_all();
    const double begin = now_seconds();
    std::string failure;
    try {
      put(clip);
    } catch (const std::exception& e) {
      failure = fmt::format("{}: {}", clip.record.name, e.what());
    }
    const std::lock_guard lock(mutex_);
    busy_ += now_seconds() - begin;
    working_ = false;
    if (!failure.empty()) failures_.push_back(failure);
    changed_.notify_all();
  }
}

void ClipWriter::put_file(const std::string& file, const MadeClip& clip) {
  const fs::path hidden = directory_ / ("." + file + ".partial");
  const FinishedClip& r = clip.record;
  if (r.frames == 1)
    write_png(hidden.string(), r.height, r.width, clip.rgb);
  else
    write_mp4(hidden.string(), {clip.rgb.data(), r.frames, r.height, r.width}, clip.fps);
  rename_file(hidden, directory_ / file, Exit::data);
}

void ClipWriter::put_tensors(const MadeClip& clip) {
  const ClipTensors& t = clip.tensors;
  std::vector<SafetensorWrite> tensors;
  for (std::size_t i = 0; i < t.latents.size(); ++i)
    tensors.push_back({fmt::format("latent_{}", i), DType::f32, t.latent_shape,
                       std::as_bytes(std::span(t.latents[i]))});
  const FinishedClip& r = clip.record;
  tensors.push_back(
      {"frames", DType::f32, {r.frames, r.height, r.width, 3}, std::as_bytes(std::span(t.frames))});
  write_safetensors(directory_ / (r.name + ".safetensors"), tensors);
}

void ClipWriter::put(MadeClip& clip) {
  FinishedClip& r = clip.record;
  const std::string ending = r.frames == 1 ? ".png" : ".mp4";
  r.file = r.name + ending;
  put_file(r.file, clip);
  r.bytes = fs::file_size(directory_ / r.file);
  if (!clip.tensors.frames.empty()) put_tensors(clip);
  if (watermark_) {
    watermark_->lay_over(clip.rgb.data(), r.frames, r.height, r.width);
    put_file(r.name + "_watermark" + ending, clip);
  }
  manifest_.add(r);
  log::write_info(fmt::format("clip      {}  {}x{}x{}  {:.1f} s  rank {}",
                              (directory_ / r.file).string(), r.frames, r.height, r.width,
                              r.seconds, r.rank));
}

}  // namespace weft
