// SadTalker's generator: a source picture once, then frames of it, its keypoints moved
// (docs/models/sadtalker.md).
#pragma once

#include <optional>
#include <vector>

#include "models/resnet/folded_net.h"
#include "models/sadtalker/options.h"
#include "models/sadtalker/render/dense_motion.h"
#include "models/sadtalker/render/spade_decoder.h"

namespace weft {

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
  // Of a picture [1,1,H,W,3] in 0 to 1.
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
    const FoldedNorm* norm;
    const FoldedConv *conv_1, *conv_2;
  };

  std::int64_t depth_;
  ParameterTable table_;
  FoldedNet net_;
  const FoldedConv *first_, *second_, *third_, *fourth_;
  std::vector<const FoldedConv*> down_;
  std::vector<Residual> residuals_;
  std::optional<DenseMotion> motion_;
  std::optional<SpadeDecoder> decoder_;
};

}  // namespace weft
