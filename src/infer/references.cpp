#include "infer/references.h"

#include <filesystem>
#include <span>

#include "core/error.h"
#include "formats/file.h"
#include "media/bicubic.h"
#include "media/video_reader.h"

namespace weft {
namespace {

LatentReference encode(std::int64_t count, std::int64_t height, std::int64_t width, VideoVae& vae,
                       const VideoVae::Noise& noise, const VideoVae::FrameSource& source) {
  const Tensor moments = vae.encode_moments(count, height, width, source, &noise);
  const Tensor latent = vae.draw_latent(moments, &noise).to_host();
  LatentReference reference;
  reference.frames = latent.dim(2);
  const auto values = latent.span<float>();
  reference.values.assign(values.begin(), values.end());
  return reference;
}

bool is_made(const std::string& file) { return file.starts_with("lavfi:"); }

}  // namespace

void check_references(const std::vector<std::string>& files, const std::string& where) {
  for (const std::string& file : files) {
    if (is_made(file)) continue;
    WEFT_CHECK(file.find("://") == std::string::npos, Exit::data,
               "download it first, and name the file", "{}: reference {} is an address", where,
               file);
    WEFT_CHECK(std::filesystem::exists(file), Exit::data,
               "check reference_path or generate.references; paths begin where weft is started",
               "{}: there is no reference file \"{}\"", where, file);
    File::open(file, Exit::data);  // may it be read?
  }
}

LatentReference encode_reference(const std::string& file, std::int64_t height, std::int64_t width,
                                 VideoVae& vae, const VideoVae::Noise& noise) {
  std::vector<std::uint8_t> rgb;
  std::int64_t count = 1;
  VideoReader reader(file);
  if (reader.is_image()) {
    const VideoFrame* frame = reader.next();
    WEFT_CHECK(frame != nullptr, Exit::data, "check the file", "picture {} is empty", file);
    rgb = cover_bicubic(*frame, height, width);
  } else {
    Footage clip = read_frames(file, 0, height, width);
    count = clip.frames;
    rgb = std::move(clip.rgb);
  }
  const std::int64_t frame_size = height * width * 3;
  std::vector<float> values;
  return encode(count, height, width, vae, noise, [&](std::int64_t first, std::int64_t n) {
    values.resize(static_cast<std::size_t>(n * frame_size));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] =
          static_cast<float>(rgb[static_cast<std::size_t>(first * frame_size) + i]) / 127.5f - 1.0f;
    return Tensor::from_host(std::span<const float>(values), {n, height, width, 3});
  });
}

LatentReference encode_frames(const std::vector<float>& frames, std::int64_t count,
                              std::int64_t height, std::int64_t width, VideoVae& vae,
                              const VideoVae::Noise& noise) {
  const std::int64_t frame_size = height * width * 3;
  return encode(count, height, width, vae, noise, [&](std::int64_t first, std::int64_t n) {
    return Tensor::from_host(std::span(frames).subspan(static_cast<std::size_t>(first * frame_size),
                                                       static_cast<std::size_t>(n * frame_size)),
                             {n, height, width, 3});
  });
}

}  // namespace weft
