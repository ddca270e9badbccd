// How Wan2.2 starts from a picture (docs/models/wan.md, Pictures; wan/image2video.py and
// wan/textimage2video.py of Wan-Video/Wan2.2).
#pragma once

#include <cstdint>

#include "media/resize.h"
#include "models/interfaces.h"
#include "tensor/tensor.h"

namespace weft {

// I2V-A14B: as many pixels as `area`, at most, with the picture's aspect; sides are multiples of
// `latent` pixels times `patch`. The picture is stretched.
PictureFit stretched_fit(std::int64_t width, std::int64_t height, std::int64_t area,
                         std::int64_t latent, std::int64_t patch);
// TI2V-5B: sides are multiples of `unit`; of two sizes the one of the nearer aspect. The picture is
// scaled to cover it, and its centre cut out.
PictureFit covering_fit(std::int64_t width, std::int64_t height, std::int64_t area,
                        std::int64_t unit);

// The picture at the clip's size, f32 [1,height,width,3] in -1..1 on this rank's device: bicubic,
// whose values leave that range, or Lanczos, rounded to bytes before the cut.
Tensor stretched(const RgbView& picture, const PictureFit& fit);
Tensor covering(const RgbView& picture, const PictureFit& fit,
                std::vector<std::uint8_t>* bytes = nullptr);

// What I2V-A14B reads beside the noisy latent, f32 [1,4 + C,T,h,w] for a clip of `frames`: 4
// channels of a mask, 1 in the first latent frame; then the latents' means of the picture f32
// [1,H,W,3] with grey frames behind it.
Tensor picture_condition(VideoCodec& codec, const Tensor& picture, std::int64_t frames);

// Of model.variant "i2v" or "ti2v"; `patch`: latents a token, each way.
class WanPicture : public PictureStart {
 public:
  WanPicture(bool beside, std::int64_t patch) : beside_(beside), patch_(patch) {}

  bool required() const override { return beside_; }
  PictureFit fit(std::int64_t width, std::int64_t height, std::int64_t area,
                 std::int64_t side) const override {
    return beside_ ? stretched_fit(width, height, area, side, patch_)
                   : covering_fit(width, height, area, side * patch_);
  }
  Tensor pixels(const RgbView& picture, const PictureFit& fit) const override {
    return beside_ ? stretched(picture, fit) : covering(picture, fit);
  }
  Tensor condition(VideoCodec& codec, const Tensor& pixels, std::int64_t frames) const override {
    return beside_ ? picture_condition(codec, pixels, frames) : Tensor();
  }

 private:
  bool beside_;
  std::int64_t patch_;
};

}  // namespace weft
