// SadTalker's mapping network: from the coefficients of a frame and its neighbours to the pose and
// the expression that its keypoints take (docs/models/sadtalker.md).
#pragma once

#include <array>
#include <vector>

#include "models/resnet/folded_net.h"
#include "models/sadtalker/options.h"

namespace weft {

// What moves the keypoints of a frame.
struct HeadMotion {
  double yaw = 0, pitch = 0, roll = 0;  // degrees
  std::array<double, 3> t{};            // the network's, of which only y is used
  std::vector<double> expression;       // [K,3], x, y, z of each keypoint
};

class MappingNet {
 public:
  // Registers mapping.*.
  explicit MappingNet(const SadtalkerDeck& deck);

  ParameterTable& params() { return table_; }
  void fold() { net_.fold(); }  // once the table is loaded

  // Frames of a window, the one in question in the middle.
  static constexpr std::int64_t window = 27;

  // Of each of N windows, f32 [N,27,C] on the device. Zeros in a planning arena. On the CPU a
  // window's result does not depend on the others.
  std::vector<HeadMotion> forward(const Tensor& windows) const;

 private:
  // f32 [N, 3 * 66 + 3 + 3K], on the host.
  Tensor heads(const Tensor& windows) const;

  std::int64_t num_kp_;
  ParameterTable table_;
  FoldedNet net_;
  const FoldedConv* first_;
  std::vector<const FoldedConv*> layers_, heads_;
};

}  // namespace weft
