// SadTalker's generator (docs/models/sadtalker.md): a source picture once, then frames of it, its
// keypoints moved. Its parts in the order of a frame's way: dense motion, decoder.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "models/resnet/conv_net.h"
#include "models/sadtalker/options.h"

namespace weft {

// [N,D,h,w,C] of x [N,1,h,w,C*D], whose channel c D + d is channel c of slice d.
Tensor channels_to_depth(const Tensor& x, std::int64_t depth);

// From where each voxel of a frame takes the source's features, and how much of each pixel the
// source can show at all.
class DenseMotion {
 public:
  // Registers dense_motion_network.* behind the net's prefix.
  DenseMotion(ConvNet& net, const SadtalkerDeck& deck);

  // Height and width of volumes are multiples of this.
  std::int64_t stride() const { return std::int64_t{1} << down_.size(); }

  // What it reads of a source's volume [1,D,h,w,C], for all its frames: [1,D,h,w,c].
  Tensor compress(const Tensor& volume) const { return convolve(*compress_, volume, 0); }

  struct Motion {
    Tensor mask;         // f32 [N,D,h,w,K+1]: shares of the candidates, the small ones included
    Tensor deformation;  // f32 [N,D,h,w,3]: x, y, z in -1 to 1
    Tensor occlusion;    // [N,1,h,w,1] in 0 to 1
  };
  // `compressed` as above, kp_source f32 [1,K,3], kp_driving f32 [N,K,3]. The mask is left out
  // unless wanted.
  Motion forward(const Tensor& compressed, const Tensor& kp_source, const Tensor& kp_driving,
                 bool want_mask) const;

 private:
  // [N,D,h,w,·] of the candidates.
  Tensor hourglass(Tensor x) const;

  std::int64_t candidates_, channels_;
  const ConvLayer *compress_, *last_, *mask_, *occlusion_;
  std::vector<const ConvLayer*> down_, up_;
};

// A 3x3 convolution of a map that is seen nearest at four times its size: in each square of 4x4
// pixels it has nine different values, each of which is a convolution of the map itself
// (ops/layout.h, spread_4x4). Nine products of small maps instead of sixteen, and of 25 taps of
// their 81 instead of 144.
class Quadruple {
 public:
  // `conv`: 3x3, of stride 1, padded to keep the size; owned by the net that it was added to.
  explicit Quadruple(const ConvLayer* conv) : conv_(conv) {}

  void fold();  // once that net is folded: sums its weights

  // leaky(conv(x seen at four times its size)), as convolve(): [N,1,4h,4w,out] of x [N,1,h,w,in].
  Tensor forward(const Tensor& x, float slope) const;

 private:
  const ConvLayer* conv_;
  ConvLayer nine_;  // [9 out, in, 3, 3]
};

// The decoder: from the warped features to a picture, by residual blocks whose norms take scale and
// shift from these features (SPADE). Its sizes are fixed.
class SpadeDecoder {
 public:
  // Registers decoder.* behind the net's prefix.
  explicit SpadeDecoder(ConvNet& net);

  static constexpr std::int64_t in = 256;  // channels

  void fold();  // once the net is folded

  // Logits [N,1,4h,4w,3] of a picture from features [N,1,h,w,256].
  Tensor forward(const Tensor& features) const;

 private:
  struct Norm {
    const ConvLayer *shared, *gamma_beta;
    std::optional<Quadruple> quadruple;  // `shared`, of features seen at four times their size
  };
  struct Block {
    Norm norm_0, norm_1, norm_s;
    const ConvLayer *conv_0, *conv_1, *conv_s = nullptr;  // conv_s: of a shortcut that has one
    bool upsample = false;                                // x is seen at twice its size
  };
  // `scale`: of the block's maps to the features, 1, 2 or 4; 2 and 4 are twice the size of x.
  static Block add(ConvNet& net, const std::string& name, std::int64_t in, std::int64_t out,
                   int scale);
  static Tensor run(const Block& block, const Tensor& x, const Tensor& features, float slope);

  const ConvLayer *first_, *picture_;
  std::array<Block, 6> middle_;
  std::array<Block, 2> up_;
};

class FaceGenerator {
 public:
  // Registers generator.*. Exit::usage if the deck's sizes contradict each other.
  explicit FaceGenerator(const SadtalkerDeck& deck);

  ParameterTable& params() { return table_; }
  void fold();  // once the table is loaded

  // Sides of pictures are multiples of this.
  std::int64_t stride() const { return (std::int64_t{1} << down_.size()) * motion_->stride(); }

  // What all frames of a source share, in the current arena.
  struct Features {
    Tensor volume;      // [1,D,h,w,C]
    Tensor compressed;  // [1,D,h,w,c], for the dense motion
  };
  // The features of a picture [1,1,H,W,3] in 0 to 1.
  Features encode(const Tensor& image) const;

  struct Frames {
    DenseMotion::Motion motion;  // its mask if wanted
    Tensor picture;              // f32 [N,H,W,3] in 0 to 1
  };
  // With kp_source f32 [1,K,3] and kp_driving f32 [N,K,3].
  Frames render(const Features& features, const Tensor& kp_source, const Tensor& kp_driving,
                bool want_mask = false) const;

 private:
  struct Residual {
    const NormLayer* norm;
    const ConvLayer *conv_1, *conv_2;
  };

  std::int64_t depth_;
  ParameterTable table_;
  ConvNet net_;
  const ConvLayer *first_, *second_, *third_, *fourth_;
  std::vector<const ConvLayer*> down_;
  std::vector<Residual> residuals_;
  std::optional<DenseMotion> motion_;
  std::optional<SpadeDecoder> decoder_;
};

}  // namespace weft
