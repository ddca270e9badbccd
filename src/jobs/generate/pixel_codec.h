// The codec of a denoiser that works on pixels: its latents are the frames themselves, in [-1,1].
#pragma once

#include "models/interfaces.h"

namespace weft {

class PixelCodec : public VideoCodec {
 public:
  static constexpr std::int64_t pixel_channels = 3;

  std::string name() const override { return "pixels"; }
  ParameterTable& params() override { return none_; }
  bool bf16() const override { return false; }
  ResultTables result_tables() const override { return {}; }
  std::string dtype_key() const override { return "model.dtype"; }
  std::int64_t channels() const override { return pixel_channels; }
  std::int64_t latent_frames(std::int64_t frames) const override { return frames; }
  std::int64_t pixels_a_latent() const override { return 1; }
  std::int64_t chunk_pixels() const override { return 1; }
  Normalisation normalisation() const override { return {{1, 1, 1}, {0, 0, 0}}; }
  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const override;
  Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                const FrameSource& source, const Noise* noise) override;
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) override;
  double decoding_flops(double, double) const override { return 0; }
  std::int64_t frames_asked(std::int64_t frames) const override { return frames_at_once(frames); }
  std::int64_t frames_at_once(std::int64_t frames) const override;
  void set_micro_batch(std::int64_t frames) override { at_once_ = frames; }
  // Both: the latent and the frames at once.
  MemoryNeed plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0) override;
  MemoryNeed plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0) override;

 private:
  ParameterTable none_;
  std::int64_t at_once_ = 16;
};

}  // namespace weft
