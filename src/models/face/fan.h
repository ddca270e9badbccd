// The face alignment network: stacked hourglasses that see where they are, and where the one before
// saw the face's outline.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "checkpoint/weights.h"
#include "models/resnet/folded_net.h"

namespace weft {

class Fan {
 public:
  // Registers the layers of `stacks` hourglasses under the released names.
  explicit Fan(std::int64_t stacks);

  ParameterTable& params() { return params_; }
  void fold() { net_.fold(); }

  static constexpr std::int64_t maps = 99;  // 98 points and the outline
  // image [1,1,256,256,3], BGR in 0 to 1 -> the last hourglass's maps [1,1,64,64,99].
  Tensor forward(const Tensor& image) const;

 private:
  static constexpr int depth = 4;  // of an hourglass

  // Three 3x3 convolutions behind their norms, side by side, on top of what came in.
  struct Block {
    std::array<const FoldedNorm*, 3> norms{};
    std::array<const FoldedConv*, 3> convs{};
    const FoldedNorm* skip_norm = nullptr;  // where the channels change
    const FoldedConv* skip = nullptr;
  };
  struct Level {
    Block beside, before, after;  // b1, b2, b3
  };
  struct Stack {
    const FoldedConv* coordinates = nullptr;
    std::array<Level, depth> levels;
    Block middle, top;
    const FoldedConv *last = nullptr, *maps = nullptr;
    const FoldedConv *features_back = nullptr, *maps_back = nullptr;  // null in the last
  };

  Block add_block(const std::string& name, std::int64_t in, std::int64_t out);
  Stack add_stack(std::int64_t i, bool last);
  static Tensor block(const Block& b, const Tensor& x);
  static Tensor hourglass(const Stack& s, int level, const Tensor& x);

  ParameterTable params_;
  FoldedNet net_;
  const FoldedConv* stem_ = nullptr;
  std::array<Block, 3> entry_;
  std::vector<Stack> stacks_;
};

WeightNames fan_weight_names();

}  // namespace weft
