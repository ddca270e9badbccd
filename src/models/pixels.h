// Pixels as footage has them to what a codec takes, and the codec of denoisers that work on them.
#pragma once

#include <cstdint>
#include <span>

#include "models/interfaces.h"
#include "tensor/tensor.h"

namespace weft {

// Frames [first, first + count) of a clip of pixels, u8 [.,height,width,3] on this rank's device
// (any shape of that size), as f32 [count,height,width,3] in [-1,1] in the current arena. While
// planning, `clip` may be undefined.
Tensor pixel_frames(const Tensor& clip, std::int64_t first, std::int64_t count, std::int64_t height,
                    std::int64_t width);

// And back: frames f32 [count,H,W,3] as a codec decodes them to `pixels` in host memory, converted
// on their device (ops::frames_to_pixels). The first frame that has a value which is not finite;
// otherwise -1.
std::int64_t pixels_of(const Tensor& frames, std::span<std::uint8_t> pixels);

// Copies `count` frames between clips [1,C,T,h,w] f32, of latents or of pixels.
void copy_frames(const Tensor& from, std::int64_t from_frame, std::int64_t count, Tensor& to,
                 std::int64_t to_frame);

// What nn::channel_affine() takes: y = factors[c] x + terms[c], as f32 [2,C].
Tensor channel_affine(std::span<const float> factors, std::span<const float> terms);

// The codec of a denoiser that works on pixels: its latents are the frames themselves, in [-1,1].
class PixelCodec : public VideoCodec {
 public:
  static constexpr std::int64_t pixel_channels = 3;

  PixelCodec() : VideoCodec(16) {}
  std::string name() const override { return "pixels"; }
  ParameterTable& params() override { return none_; }
  std::set<std::string> tables() const override { return {}; }
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

 private:
  ParameterTable none_;
};

}  // namespace weft
