// SadTalker's dense motion: from where each voxel of a frame takes the source's features, and how
// much of each pixel the source can show at all (docs/models/sadtalker.md).
#pragma once

#include <vector>

#include "models/resnet/folded_net.h"
#include "models/sadtalker/options.h"

namespace weft {

class DenseMotion {
 public:
  // Registers dense_motion_network.* behind the net's prefix.
  DenseMotion(FoldedNet& net, const SadtalkerDeck& deck);

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
  const FoldedConv *compress_, *last_, *mask_, *occlusion_;
  std::vector<const FoldedConv*> down_, up_;
};

}  // namespace weft
