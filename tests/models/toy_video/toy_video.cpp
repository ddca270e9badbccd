#include "tests/models/toy_video/toy_video.h"

#include <algorithm>

#include "checkpoint/safetensors.h"
#include "tensor/tensor.h"

namespace weft::test {

Tensor ToyDenoiser::velocity(const DenoiserInput& in) {
  Tensor v = Tensor::empty(in.x.shape(), DType::f32);
  if (Arena::current().is_planning()) return v;
  const float offset = offset_->value.data<float>()[0];
  const std::int64_t clip = in.x.numel() / in.x.dim(0);
  std::int64_t row = 0;  // of the packed captions
  for (std::int64_t b = 0; b < in.x.dim(0); ++b) {
    float target = offset;
    for (std::int64_t l = 0; l < in.captions.lengths[b]; ++l, ++row)
      if (const std::int32_t i = in.captions.index.data<std::int32_t>()[row]; i >= 0)
        target += in.captions.y.data<float>()[i];
    // x = (1 - s) x0 + s eps, so that x0 - eps = (x0 - x) / s.
    const float s = in.timestep.data<float>()[b] / 1000;
    for (std::int64_t i = b * clip; i < (b + 1) * clip; ++i)
      v.data<float>()[i] = (target - in.x.data<float>()[i]) / s;
  }
  return v;
}

Tensor ToyCodec::encode(const Part& part, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise*) {
  const std::int64_t h = height / 2, w = width / 2;
  Tensor latent = Tensor::empty({1, 1, part.latents, h, w}, DType::f32);
  for (std::int64_t t = 0; t < part.frames; ++t) {
    const Tensor frame = source(part.first_frame + t, 1);
    if (Arena::current().is_planning()) continue;
    for (std::int64_t y = 0; y < h; ++y)
      for (std::int64_t x = 0; x < w; ++x)
        latent.data<float>()[(t * h + y) * w + x] =
            frame.data<float>()[(2 * y * width + 2 * x) * 3];
  }
  return latent;
}

void ToyCodec::decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) {
  const std::int64_t h = latent.dim(3), w = latent.dim(4);
  for (std::int64_t t = 0; t < frames; ++t) {
    Tensor frame = Tensor::empty({1, 2 * h, 2 * w, 3}, DType::f32);
    for (std::int64_t i = 0; !Arena::current().is_planning() && i < frame.numel(); ++i) {
      const std::int64_t y = i / (2 * w * 3), x = i / 3 % (2 * w);
      frame.data<float>()[i] = latent.data<float>()[(t * h + y / 2) * w + x / 2];
    }
    sink(t, frame);
  }
}

EncodedTexts ToyTextEncoder::encode(const std::vector<std::string>& texts,
                                    const std::vector<TextFile>& files,
                                    const std::function<bool()>&, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  std::size_t begin = 0;
  for (const TextFile& file : files) {
    if (rank != 0) break;
    std::vector<float> greys;
    for (std::size_t i = begin; i < file.end; ++i)
      greys.push_back(static_cast<float>(texts[i].size()) / 100);
    std::vector<SafetensorWrite> tensors;
    for (std::size_t i = 0; i < greys.size(); ++i)
      tensors.push_back(
          {std::to_string(i), DType::f32, {1, 1}, std::as_bytes(std::span(&greys[i], 1))});
    write_safetensors(file.path, tensors, file.metadata);
    begin = file.end;
  }
  MPI_Barrier(world);
  return {};
}

}  // namespace weft::test
