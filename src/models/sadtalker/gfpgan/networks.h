// The networks that restore a face (docs/models/gfpgan.md): GFPGAN v1.4's, and ParseNet, which says
// which pixels belong to it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "models/resnet/conv_net.h"

namespace weft {

// Files also hold the layers that make a style from one latent vector, those that turn the U-Net's
// maps to colours while training, and fixed noise; none of it is read.
WeightNames restorer_names();

// Sizes of the network. Released: these. Tests take fewer channels and smaller faces.
struct RestorerSize {
  std::int64_t side = 512;           // of the face, a power of two, 8 at the least
  std::int64_t features = 512;       // of a latent vector
  std::int64_t most_channels = 512;  // up to 64 pixels; half as many at each doubling after
};

// The "clean" architecture: a U-Net reads a damaged face and steers a StyleGAN2 that draws it anew
// (docs/models/gfpgan.md, Restorer; arXiv:2101.04061), under the names of the released file's
// params_ema.
class Restorer {
 public:
  explicit Restorer(const RestorerSize& size = {});

  ParameterTable& params() { return params_; }
  // Once, after the table is loaded or drawn. Exit::data if a value is not possible.
  void prepare();
  std::int64_t side() const { return size_.side; }

  // Sides of the square maps of noise that a run takes, one a layer: 4, 8, 8, 16, 16 ...
  std::vector<std::int64_t> noise_sides() const;
  // Normal numbers for all layers, a function of the key and the face: f32 [1,1,s,s] each.
  std::vector<Tensor> draw_noise(std::uint64_t key, std::uint64_t face) const;

  // The restored face f32 [1,1,S,S,3], about -1 to 1, from image [1,1,S,S,3] of the weights' type,
  // in [-1, 1].
  Tensor run(const Tensor& image, std::span<const Tensor> noise) const;
  // Operations of a face, two a multiply-add.
  double flops() const { return 2 * multiply_adds_; }

 private:
  // A residual block: both convolutions leaky, the frame resized between them; the shortcut is
  // resized and multiplied.
  struct Residual {
    const ConvLayer *first, *second, *skip;
  };
  // y = w x modulated by the style (ops/conv.h).
  struct Modulated {
    Parameter *weight, *style_weight, *style_bias, *bias;
    Parameter* noise = nullptr;  // its strength
    Tensor energy;               // f32 [out,in], after prepare(); undefined in a layer to colours
  };
  // Scale and shift of half of a level's channels.
  struct Condition {
    const ConvLayer *scale_in, *scale_out, *shift_in, *shift_out;
  };

  std::int64_t channels(std::int64_t side) const;  // of the StyleGAN2; the U-Net has half
  Residual add_residual(const std::string& name, std::int64_t in, std::int64_t out,
                        std::int64_t side, std::int64_t to);
  const ConvLayer* add_conv3(const std::string& name, std::int64_t in, std::int64_t out,
                             std::int64_t side);
  Modulated add_modulated(const std::string& name, std::int64_t in, std::int64_t out, int kernel,
                          std::int64_t side);
  Tensor style(const Modulated& layer, const Tensor& latents, std::int64_t k) const;
  // latents f32 [1,L,features]; `up`: x at twice its size. Overwrites x where it does not grow.
  Tensor style_conv(const Modulated& layer, Tensor x, const Tensor& latents, std::int64_t k,
                    const Tensor& noise, bool up, const Tensor& scale = {},
                    const Tensor& shift = {}) const;
  Tensor to_rgb(const Modulated& layer, const Tensor& x, const Tensor& latents, std::int64_t k,
                const Tensor& before) const;

  RestorerSize size_;
  int levels_ = 0;  // above 4x4
  double multiply_adds_ = 0;
  ParameterTable params_;
  ConvNet net_;
  const ConvLayer *first_, *final_;
  Parameter *final_weight_, *final_bias_, *constant_;
  std::vector<Residual> down_, up_;
  std::vector<Condition> conditions_;
  Modulated start_, start_rgb_;
  std::vector<Modulated> convs_, rgbs_;
  Tensor constant_last_;  // channels last, of the weights' type
};

// Files also hold the layer that paints the face again, and counts of batches; neither is read.
WeightNames parse_net_names();

// Which part of a face each pixel of an aligned face is (docs/models/gfpgan.md, ParseNet;
// arXiv:2009.08709), under the names of the released parsing_parsenet.pth.
class ParseNet {
 public:
  static constexpr std::int64_t classes = 19, multiple = 16;

  // Channels of the first layer; the deepest has four times as many. The released network has 64.
  explicit ParseNet(std::int64_t channels = 64);

  ParameterTable& params() { return params_; }
  // Once, after the table is loaded or drawn. Exit::data if a value is not possible.
  void fold() { net_.fold(); }

  // Logits [1,1,H,W,19] of an image [1,1,H,W,3] in [-1, 1], of the weights' type; H and W are
  // multiples of `multiple`, 32 at the least.
  Tensor logits(const Tensor& image) const;
  // The greatest's number, u8 [H,W]; the first of equal ones.
  Tensor parse(const Tensor& image) const;
  // Operations of an image, two a multiply-add.
  double flops(std::int64_t height, std::int64_t width) const;

 private:
  struct Block {
    int up = 1;                           // the frame is seen at twice its size first
    const ConvLayer* shortcut = nullptr;  // none: the frame itself
    const ConvLayer *first = nullptr, *second = nullptr;
  };
  Block add_block(const std::string& name, std::int64_t in, std::int64_t out, int down, int up);
  Tensor run(const Block& block, const Tensor& x) const;

  ParameterTable params_;
  ConvNet net_;
  const ConvLayer *stem_, *head_;
  std::vector<Block> encoder_, body_, decoder_;
};

}  // namespace weft
