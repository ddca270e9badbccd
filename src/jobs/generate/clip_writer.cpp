#include "jobs/generate/clip_writer.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "jobs/engine/manifest.h"
#include "media/open_media.h"
#include "media/writers.h"

namespace weft {

// ---- Watermark

namespace {

// To [to_height, to_width, 4] bytes of red, green, blue and alpha.
std::vector<std::uint8_t> scale(const std::uint8_t* const* planes, const int* strides,
                                AVPixelFormat format, std::int64_t height, std::int64_t width,
                                std::int64_t to_height, std::int64_t to_width) {
  const ff::Ptr<SwsContext> convert(
      sws_getContext(static_cast<int>(width), static_cast<int>(height), format,
                     static_cast<int>(to_width), static_cast<int>(to_height), AV_PIX_FMT_RGBA,
                     SWS_BICUBIC | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
  WEFT_ASSERT(convert != nullptr);
  // swscale writes whole vectors, past the last pixel: give it padded rows, with space behind the
  // last one.
  const std::int64_t stride = (to_width * 4 + 63) / 64 * 64;
  std::vector<std::uint8_t> padded(stride * to_height + 64);
  std::uint8_t* const to[] = {padded.data()};
  const int to_strides[] = {static_cast<int>(stride)};
  sws_scale(convert.get(), planes, strides, 0, static_cast<int>(height), to, to_strides);
  std::vector<std::uint8_t> out(to_height * to_width * 4);
  for (std::int64_t y = 0; y < to_height; ++y)
    std::copy_n(padded.data() + y * stride, to_width * 4, out.data() + y * to_width * 4);
  return out;
}

}  // namespace

Watermark::Watermark(const std::string& path, const MediaDeck& limits) {
  ff::OpenMedia media({path, MediaTrust::deck}, {limits, {}});
  const ff::Ptr<AVCodecContext> decoder = media.open_decoder(1);
  const ff::OpenMedia::Work work(media);
  const ff::Ptr<AVPacket> packet(av_packet_alloc());
  const ff::Ptr<AVFrame> frame(av_frame_alloc());
  do {
    av_packet_unref(packet.get());
    media.check(av_read_frame(media.format(), packet.get()), "read");
  } while (packet->stream_index != media.stream()->index);
  media.check(avcodec_send_packet(decoder.get(), packet.get()), "decode");
  media.check(avcodec_send_packet(decoder.get(), nullptr), "decode");
  media.check(avcodec_receive_frame(decoder.get(), frame.get()), "decode");
  media.check_size(frame->height, frame->width);
  height_ = frame->height;
  width_ = frame->width;
  rgba_ = scale(frame->data, frame->linesize, static_cast<AVPixelFormat>(frame->format), height_,
                width_, height_, width_);
}

void Watermark::lay_over(std::uint8_t* rgb, std::int64_t frames, std::int64_t height,
                         std::int64_t width) const {
  const std::int64_t h = std::max<std::int64_t>(2, height / 10);
  const std::int64_t w = std::max<std::int64_t>(
      2, std::lround(static_cast<double>(h * width_) / static_cast<double>(height_)));
  const std::uint8_t* const planes[] = {rgba_.data()};
  const int strides[] = {static_cast<int>(width_ * 4)};
  const std::vector<std::uint8_t> small =
      scale(planes, strides, AV_PIX_FMT_RGBA, height_, width_, h, w);
  for (std::int64_t t = 0; t < frames; ++t)
    for (std::int64_t y = 0; y < std::min(h, height); ++y)
      for (std::int64_t x = 0; x < std::min(w, width); ++x) {
        const std::uint8_t* over = small.data() + (y * w + x) * 4;
        std::uint8_t* under = rgb + ((t * height + y) * width + x) * 3;
        for (int c = 0; c < 3; ++c)
          under[c] = static_cast<std::uint8_t>(
              (over[c] * over[3] + under[c] * (255 - over[3]) + 127) / 255);
      }
}

// ---- Files

namespace {

namespace fs = std::filesystem;

// A PNG or an MP4, which appears with finish().
class ClipFile {
 public:
  ClipFile(const fs::path& path, const ClipToWrite& clip, double fps) : path_(path) {
    if (clip.frames > 1) video_.emplace(path.string(), clip.height, clip.width, fps);
  }
  void add(const ClipView& frames) {
    if (video_)
      video_->add(frames);
    else
      picture_ =
          png_bytes(frames.height, frames.width,
                    {frames.rgb, static_cast<std::size_t>(frames.height * frames.width * 3)});
  }
  void finish() {
    if (video_) return video_->finish();
    WholeFile file(path_, Exit::data);
    file.add(picture_);
    file.commit();
  }

 private:
  fs::path path_;
  std::optional<Mp4Writer> video_;
  std::string picture_;
};

}  // namespace

struct ClipWriter::Files {
  explicit Files(ClipToWrite to_write) : clip(std::move(to_write)) {
    name = clip.line.at("name").get<std::string>();
    file = name + (clip.frames == 1 ? ".png" : ".mp4");
  }
  ClipToWrite clip;
  std::string name, file, marked_file;
  std::optional<ClipFile> plain, marked;
  Hasher pixels;
  std::int64_t frames = 0;  // so far
  std::string failure;      // the clip's further steps are left out
};

ClipWriter::ClipWriter(fs::path directory, std::shared_ptr<const Watermark> watermark, int rank,
                       std::size_t piece_bytes,
                       std::function<void(const nlohmann::ordered_json&)> finished)
    : directory_(std::move(directory)),
      watermark_(std::move(watermark)),
      rank_(rank),
      finished_(std::move(finished)),
      memory_(pieces) {
  for (auto& piece : memory_) piece.resize(piece_bytes);
  thread_ = std::thread([this] { run(); });
}

ClipWriter::~ClipWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ClipWriter::send(Step step) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(step));
  changed_.notify_all();
}

void ClipWriter::begin(ClipToWrite clip, double fps) {
  frame_bytes_ = clip.height * clip.width * 3;
  send([this, fps, clip = std::move(clip)] {
    files_ = std::make_unique<Files>(clip);
    attempt([&] { open(fps); });
  });
}

void ClipWriter::add(std::int64_t count, const std::function<void(std::span<std::uint8_t>)>& fill) {
  const auto bytes = static_cast<std::size_t>(count * frame_bytes_);
  WEFT_ASSERT(count > 0 && bytes <= memory_[next_].size());
  {
    const double begin = now_seconds();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return in_use_ < pieces; });
    waited_ += now_seconds() - begin;
  }
  fill(std::span(memory_[next_]).first(bytes));
  {
    const std::lock_guard lock(mutex_);
    ++in_use_;
  }
  send([this, count, rgb = memory_[next_].data()] {
    attempt([&] { write(rgb, count); });
    // Also of a failed clip, or add() would wait for ever.
    const std::lock_guard lock(mutex_);
    --in_use_;
  });
  next_ = (next_ + 1) % pieces;
}

void ClipWriter::end(double seconds) {
  send([this, seconds] {
    attempt([&] { close(seconds); });
    const std::lock_guard lock(mutex_);
    if (!files_->failure.empty()) failures_.push_back({files_->name, files_->failure});
    files_.reset();
  });
}

void ClipWriter::drop() {
  send([this] { files_.reset(); });
}

std::vector<ClipWriter::Failure> ClipWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.empty() && !working_; });
  return std::exchange(failures_, {});
}

// ---- The thread

void ClipWriter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (waiting_.empty()) break;
    const Step step = std::move(waiting_.front());
    waiting_.pop_front();
    working_ = true;
    lock.unlock();
    const double begin = now_seconds();
    step();
    lock.lock();
    busy_ += now_seconds() - begin;
    working_ = false;
    changed_.notify_all();
  }
  files_.reset();
}

void ClipWriter::attempt(const Step& step) {
  if (!files_->failure.empty()) return;
  try {
    step();
  } catch (const std::exception& e) {
    files_->failure = e.what();
    files_->plain.reset();  // frees their room at once: the disk may be full
    files_->marked.reset();
  }
}

void ClipWriter::open(double fps) {
  Files& f = *files_;
  f.plain.emplace(directory_ / f.file, f.clip, fps);
  for (const ClipToWrite::Picture& p : f.clip.pictures) {
    nlohmann::ordered_json& all = f.clip.line["references"];
    const std::string name = fmt::format("references/{}-{}.png", f.name, all.size());
    write_png(result_path(directory_, name).string(), p.height, p.width, p.rgb);
    all.push_back(name);
  }
  f.clip.pictures.clear();
  if (!watermark_) return;
  f.marked_file = f.name + "_watermark" + fs::path(f.file).extension().string();
  f.marked.emplace(directory_ / f.marked_file, f.clip, fps);
}

void ClipWriter::write(std::uint8_t* rgb, std::int64_t frames) {
  Files& f = *files_;
  const ClipView view{rgb, frames, f.clip.height, f.clip.width};
  f.pixels.add(std::as_bytes(std::span(rgb, frames * view.height * view.width * 3)));
  f.plain->add(view);
  if (f.marked) {
    // In place, so only after the plain file and the hash have the pixels.
    watermark_->lay_over(rgb, frames, view.height, view.width);
    f.marked->add(view);
  }
  f.frames += frames;
}

void ClipWriter::close(double seconds) {
  Files& f = *files_;
  const ClipToWrite& c = f.clip;
  WEFT_ASSERT(f.frames == c.frames);
  f.plain->finish();
  if (f.marked) f.marked->finish();
  nlohmann::ordered_json line = c.line;
  line.update({{"frames", c.frames},
               {"height", c.height},
               {"width", c.width},
               {"seconds", seconds},
               {"pixels", to_hex(f.pixels.value())},
               {"rank", rank_}});
  // The hash needs the whole file again: at its end the encoder rewrites the file's head.
  add_file(line, directory_, f.file);
  if (f.marked) add_file(line, directory_, f.marked_file, "marked");
  finished_(line);
  log::write_info(fmt::format("clip      {}  {} of {}x{}  {:.1f} s  rank {}",
                              (directory_ / f.file).string(), counted(c.frames, "frame"), c.width,
                              c.height, seconds, rank_));
}

// ---- Tensors

ClipTensors::ClipTensors(const std::filesystem::path& path, std::int64_t loops, const Shape& latent,
                         std::int64_t frames, std::int64_t height, std::int64_t width)
    : loops_(loops) {
  std::vector<SafetensorWrite> tensors;
  for (std::int64_t i = 0; i < loops; ++i)
    tensors.push_back({fmt::format("latent_{}", i),
                       DType::f32,
                       {latent[1], latent[2], latent[3], latent[4]},
                       {}});
  tensors.push_back({"frames", DType::f32, {frames, height, width, 3}, {}});
  file_.emplace(path, tensors);
}

void ClipTensors::add_latent(std::int64_t loop, const Tensor& z) {
  const Tensor on_host = z.to_host();
  file_->write(static_cast<std::size_t>(loop), std::as_bytes(on_host.span<float>()));
}

void ClipTensors::add_frames(const Tensor& frames) {
  const Tensor on_host = frames.to_host();
  const auto bytes = std::as_bytes(on_host.span<float>());
  file_->write(static_cast<std::size_t>(loops_), bytes, at_);
  at_ += bytes.size();
}

}  // namespace weft
