// With generate.tensors: a clip before it is rounded to pixels, as NAME.safetensors, written while
// the clip is made.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/safetensors.h"
#include "tensor/tensor.h"

namespace weft {

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
