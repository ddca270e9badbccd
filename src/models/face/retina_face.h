// The network of RetinaFace: a ResNet-50, a feature pyramid, context modules and heads on three
// levels.
#pragma once

#include <array>

#include "checkpoint/weights.h"
#include "models/resnet/folded_net.h"
#include "models/resnet/folded_resnet.h"

namespace weft {

class RetinaFace {
 public:
  // Registers the layers under the released names, without "module.".
  RetinaFace();

  ParameterTable& params() { return params_; }
  void fold() { net_.fold(); }

  // Of two priors at each feature of a level: logits of no face and face, offsets of the box and of
  // the marks.
  struct Level {
    Tensor classes, boxes, marks;  // [1,1,h,w,4], [..,8], [..,20]
  };
  static constexpr int levels = 3;
  // image [1,1,H,W,3], less the means -> levels 8, 16 and 32 pixels apart, sizes rounded up.
  std::array<Level, levels> forward(const Tensor& image) const;

 private:
  // A 3x3 convolution beside chains of two and of three, joined.
  struct Context {
    const FoldedConv *one, *first, *two, *second, *three;
  };
  struct Head {
    const FoldedConv *classes, *boxes, *marks;
  };
  Context add_context(const std::string& name);
  static Tensor context(const Context& c, const Tensor& x);

  ParameterTable params_;
  FoldedNet net_;
  FoldedResNet50 body_;
  std::array<const FoldedConv*, levels> lateral_{};
  std::array<const FoldedConv*, levels - 1> merge_{};
  std::array<Context, levels> context_{};
  std::array<Head, levels> heads_{};
};

// How released files differ from the table.
WeightNames retina_face_weight_names();

}  // namespace weft
