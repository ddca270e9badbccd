// CLIP (Radford et al., arXiv 2103.00020; docs/models/clip.md): features of pictures and of
// captions in one space, as transformers' CLIPModel computes them, and the aesthetic predictor on
// the features of pictures. All in f32.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/weights.h"
#include "config/deck.h"
#include "media/resize.h"
#include "nn/conv.h"
#include "nn/nn.h"
#include "tensor/tensor.h"

namespace weft {

// CLIP's table of the deck: [clip].
// Shapes are not in the deck: they follow from the weights (models/clip/clip.h).
struct ClipDeck {
  std::string weights;
  std::string merges;
  std::string aesthetic;
};

std::vector<DeckTable> clip_tables();

// Follows from the weights' shapes, as in OpenAI's loader: heads are 64 channels wide.
struct ClipShape {
  struct Tower {
    std::int64_t width = 0, layers = 0, mlp = 0;
    std::int64_t heads() const { return width / head_width; }
  };
  static constexpr std::int64_t head_width = 64;
  Tower vision, text;                          // text.layers 0: the files have no text encoder
  std::int64_t patch = 0, grid = 0;            // pixels of a patch's side; patches a side
  std::int64_t positions = 0, vocabulary = 0;  // of captions
  std::int64_t channels = 0;                   // of the common space
  std::int64_t side() const { return patch * grid; }  // of a picture, in pixels
};
// Exit::data where the files are not those of a CLIP model under Hugging Face's names.
ClipShape clip_shape(WeightFiles& files);

// What the image encoder is shown of a picture: u8 [side, side, 3], the picture with its shorter
// side at `side`, bicubic as Pillow, and the middle of its longer one, as OpenAI's transform does.
std::vector<std::uint8_t> clip_pixels(const RgbView& picture, std::int64_t side);

// The layers that both encoders are made of: LN, attention, LN, MLP with quick GELU.
class ClipLayers {
 public:
  // Registers the parameters PREFIXencoder.layers.I.*
  ClipLayers(ParameterTable& params, const std::string& prefix, const ClipShape::Tower& shape);
  // Once the weights are loaded: makes one matrix of those of q, k and v, and packs them all.
  void prepare();
  // x [M,C] through all layers. attend(qkv [M,3C]) -> [M,C].
  template <class Attend>
  Tensor forward(Tensor x, const Attend& attend) const;

 private:
  struct Layer {
    nn::NormWeights norm1, norm2;
    nn::Linear q, k, v, out, fc1, fc2;
    Tensor qkv, qkv_bias;  // [3C,C], [3C]
  };
  std::vector<Layer> layers_;
};

// Pictures to features.
class ClipImageEncoder {
 public:
  // Allocates and reads the weights. Exit::data if they do not fit.
  ClipImageEncoder(WeightFiles& files, const ClipShape& shape);

  // pixels u8 [N, side, side, 3] -> features f32 [N, channels], not normalised. In the current
  // arena.
  Tensor forward(const Tensor& pixels) const;
  // The same on the host, of pictures one behind the other; on the CPU one by one, to need less
  // memory. A picture's features do not depend on the others there, nor on the threads.
  std::vector<float> encode(std::span<const std::uint8_t> pixels) const;
  // Bytes of the arena that `count` pictures take.
  MemoryNeed plan(std::int64_t count, std::size_t capacity = 0) const;

 private:
  ClipShape shape_;
  ParameterTable params_;
  Parameter *class_ = nullptr, *patches_ = nullptr, *positions_ = nullptr, *projection_ = nullptr;
  nn::NormWeights pre_, post_;
  ClipLayers layers_;
  Tensor positions_and_class_;  // [1 + patches, C]
};

// Captions to features.
class ClipTextEncoder {
 public:
  ClipTextEncoder(WeightFiles& files, const ClipShape& shape);

  // Ids of each caption, as ClipTokenizer gives them -> features f32 [captions, channels], not
  // normalised: those at the first mark of the end, which is the greatest id. Tokens behind it do
  // not count, since attention is causal.
  Tensor forward(const std::vector<std::vector<std::int32_t>>& captions) const;
  // Bytes of the arena that the longest caption takes.
  MemoryNeed plan(std::size_t capacity = 0) const;

 private:
  ClipShape shape_;
  ParameterTable params_;
  Parameter *tokens_ = nullptr, *positions_ = nullptr, *projection_ = nullptr;
  nn::NormWeights final_;
  ClipLayers layers_;
};

// The improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor):
// five linear layers without activations, on normalised features of pictures.
class AestheticPredictor {
 public:
  // layers.{0,2,4,6,7}.{weight,bias} of a safetensors file.
  AestheticPredictor(const std::string& weights, std::int64_t channels);
  // features f32 [N, channels], normalised -> [N] scores, on the host.
  std::vector<float> score(const Tensor& features) const;

 private:
  ParameterTable params_;
  std::vector<nn::Linear> layers_;
};

// v / max(|v|, 1e-12), as PyTorch's normalize.
std::vector<float> unit_length(std::span<const float> v);
// 100 times the cosine of the two: Open-Sora's `match`, with the temperature of the released
// weights.
double clip_score(std::span<const float> picture, std::span<const float> caption);

}  // namespace weft
