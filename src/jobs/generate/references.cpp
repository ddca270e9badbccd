#include "jobs/generate/references.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "jobs/generate/texts.h"
#include "media/image_file.h"
#include "media/media_source.h"
#include "media/resize.h"
#include "media/video_reader.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

LatentReference encode(const VideoCodec::Part& part, std::int64_t height, std::int64_t width,
                       VideoCodec& codec, const VideoCodec::Noise& noise,
                       const VideoCodec::FrameSource& source) {
  const Tensor latent = codec.encode(part, height, width, source, &noise).to_host();
  const auto values = latent.span<float>();
  return {{values.begin(), values.end()},
          codec.latent_frames(part.clip_frames),
          part.first_latent,
          part.latents,
          {}};
}

// Frames of a file one after the other, sized to cover height x width.
class SizedFrames {
 public:
  SizedFrames(const MediaSource& file, const MediaAccess& access, std::int64_t height,
              std::int64_t width)
      : file_(file.path), reader_(file, {.access = access}), height_(height), width_(width) {}

  // The frame of that number, greater than the last one's, in [-1,1]: f32 [height, width, 3]. As in
  // the original a picture is rounded to bytes when it has been resized, a video is not.
  void take(std::int64_t number, float* out) {
    const VideoFrame* frame = nullptr;
    do frame = reader_.next();
    while (frame != nullptr && frame->index < number);
    WEFT_CHECK(frame != nullptr, Exit::data, "check the file", "{} has no frame {}", file_, number);
    if (reader_.is_image())
      std::ranges::copy(cover_bicubic(*frame, height_, width_), out);
    else
      resize_(*frame, height_, width_, out);
    for (float& v : std::span(out, height_ * width_ * 3)) v = v / 127.5f - 1.0f;
  }

 private:
  std::string file_;
  VideoReader reader_;
  std::int64_t height_, width_;
  CoverResize resize_;
};

// Counts the frames that next() gives: a container's own count is not reliable.
std::int64_t count_frames(const MediaSource& file, const MediaAccess& access) {
  VideoReader reader(file, {.access = access});
  std::int64_t count = 0;
  while (reader.next() != nullptr) {
    ++count;
    if (reader.is_image()) break;
  }
  WEFT_CHECK(count > 0, Exit::data, "check the file", "{} has no frame", file.path);
  return count;
}

// The name of an address's file. Keeps the ending: FFmpeg recognises some formats by it.
std::string name_of_address(const std::string& address) {
  const std::string ending = fs::path(address.substr(0, address.find_first_of("?#"))).extension();
  const bool plain = ending.size() <= 6 && std::all_of(ending.begin(), ending.end(), [](char c) {
                       return c == '.' || std::isalnum(static_cast<unsigned char>(c)) != 0;
                     });
  return to_hex(hash128(std::string_view(address))) + (plain ? ending : "");
}

}  // namespace

void fetch_references(std::vector<Prompt>& prompts, const GenerateDeck& deck,
                      const MediaAccess& access, const fs::path& output, MPI_Comm world) {
  bool any = false;
  for (Prompt& p : prompts) {
    for (std::string& reference : p.references) {
      if (!is_address(reference)) continue;
      any = true;
      const fs::path file = output / "references" / name_of_address(reference);
      std::error_code none;
      if (log::rank() == 0 && !fs::is_regular_file(fs::symlink_status(file, none))) {
        make_own_folder(file.parent_path(), Exit::data);
        try {
          download(reference, file, access);
        } catch (const Error& e) {
          throw Error(e.code(), fmt::format("{}: {}", place_of(deck, p), e.what()), e.hint(),
                      __FILE__, __LINE__);
        }
        log::info("fetched   {}", reference);
      }
      reference = file;
    }
  }
  if (any) MPI_Barrier(world);
}

void check_references(const std::vector<std::string>& files, MediaTrust named_by,
                      const std::string& where) {
  for (const std::string& file : files) {
    if (is_source_graph(file)) {
      WEFT_CHECK(named_by == MediaTrust::deck, Exit::data,
                 "name a file; FFmpeg's sources may stand in generate.references alone",
                 "{}: reference {} is not a file", where, file);
      continue;
    }
    WEFT_CHECK(file.find("://") == std::string::npos, Exit::data,
               "weft generate fetches http, https and ftp addresses; otherwise name a file",
               "{}: reference {} is an address", where, file);
    WEFT_CHECK(is_there(file, Exit::data), Exit::data,
               "check reference_path or generate.references; paths begin where weft is started",
               "{}: reference file \"{}\" does not exist", where, file);
  }
}

LatentReference encode_reference(const MediaSource& file, const MediaAccess& access,
                                 std::int64_t height, std::int64_t width, VideoCodec& codec,
                                 const VideoCodec::Noise& noise, const TakenFrames& taken) {
  const std::int64_t count = count_frames(file, access), latents = codec.latent_frames(count);
  const LatentRange range = taken(latents);
  SizedFrames frames(file, access, height, width);
  const std::int64_t frame_size = height * width * 3;
  std::vector<float> values;
  std::vector<std::uint8_t> picture;
  LatentReference reference =
      encode(codec.part_with(count, range.first, range.last), height, width, codec, noise,
             [&](std::int64_t first, std::int64_t n) {
               values.resize(n * frame_size);
               for (std::int64_t t = 0; t < n; ++t)
                 frames.take(first + t, values.data() + t * frame_size);
               if (picture.empty())
                 for (std::int64_t i = 0; i < frame_size; ++i)
                   picture.push_back(static_cast<std::uint8_t>(
                       std::lround(std::clamp((values[i] + 1) * 127.5f, 0.0f, 255.0f))));
               return Tensor::from_host(std::span<const float>(values), {n, height, width, 3});
             });
  reference.picture = std::move(picture);
  return reference;
}

LatentReference encode_picture(const MediaSource& file, const MediaAccess& access,
                               const PictureStart& start, PixelSize clip, std::int64_t area,
                               VideoCodec& codec) {
  const bool still = VideoReader(file, {.access = access}).is_image();
  // As the originals open pictures: Pillow's pixels.
  Footage shown;
  if (still) {
    ImageFile image = read_image_file(file, access.limits);
    shown = {std::move(image.values), 1, image.height, image.width};
  } else {
    shown = read_frames(file, 1, 0, 0, {.access = access});
  }
  const PictureFit fit = start.fit(shown.width, shown.height, area, codec.pixels_a_latent());
  WEFT_CHECK(fit.height == clip.height && fit.width == clip.width, Exit::data,
             "the file's size differs from what its header says: write it again",
             "{} is {}x{} (width x height), its clip was planned as {}x{}", file.path, shown.width,
             shown.height, clip.width, clip.height);
  const Tensor pixels =
      start.pixels({shown.rgb.data(), shown.height, shown.width, shown.width * 3}, fit);
  Tensor latent = start.condition(codec, pixels, clip.frames);
  if (!latent.defined())
    latent = codec.encode(
        codec.whole(1), fit.height, fit.width, [&](std::int64_t, std::int64_t) { return pixels; },
        nullptr);
  const Tensor on_host = latent.to_host(), seen = pixels.to_host();
  const auto values = on_host.span<float>();
  LatentReference reference{{values.begin(), values.end()}, latent.dim(2), 0, latent.dim(2), {}};
  for (const float v : seen.span<float>())
    reference.picture.push_back(
        static_cast<std::uint8_t>(std::lround(std::clamp((v + 1) * 127.5f, 0.0f, 255.0f))));
  return reference;
}

LatentReference encode_frames(const std::vector<float>& frames, const VideoCodec::Part& part,
                              std::int64_t height, std::int64_t width, VideoCodec& codec,
                              const VideoCodec::Noise& noise) {
  const std::int64_t frame_size = height * width * 3;
  return encode(part, height, width, codec, noise, [&](std::int64_t first, std::int64_t n) {
    const std::int64_t begin = (first - part.first_frame) * frame_size;
    return Tensor::from_host(std::span<const float>(frames).subspan(begin, n * frame_size),
                             {n, height, width, 3});
  });
}

std::size_t reference_bytes(std::int64_t at_once, std::int64_t height, std::int64_t width) {
  return static_cast<std::size_t>(at_once * height * width * 3) * sizeof(float);
}

}  // namespace weft
