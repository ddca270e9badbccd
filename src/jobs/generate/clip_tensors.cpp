#include "jobs/generate/clip_tensors.h"

#include <fmt/format.h>

#include <vector>

namespace weft {

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
