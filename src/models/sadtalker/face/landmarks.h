// 68 landmarks of a face: FAN (arXiv:1703.07332) as adaptive wing loss has it (arXiv:1904.07399),
// under the names of the released alignment_WFLW_4HG.pth (docs/models/sadtalker.md).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "media/image_file.h"
#include "models/resnet/conv_net.h"
#include "models/sadtalker/face/detector.h"

namespace weft {

// The face alignment network: stacked hourglasses that see where they are, and where the one before
// saw the face's outline.
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
    std::array<const NormLayer*, 3> norms{};
    std::array<const ConvLayer*, 3> convs{};
    const NormLayer* skip_norm = nullptr;  // where the channels change
    const ConvLayer* skip = nullptr;
  };
  struct Level {
    Block beside, before, after;  // b1, b2, b3
  };
  struct Stack {
    const ConvLayer* coordinates = nullptr;
    std::array<Level, depth> levels;
    Block middle, top;
    const ConvLayer *last = nullptr, *maps = nullptr;
    const ConvLayer *features_back = nullptr, *maps_back = nullptr;  // null in the last
  };

  Block add_block(const std::string& name, std::int64_t in, std::int64_t out);
  Stack add_stack(std::int64_t i, bool last);
  static Tensor block(const Block& b, const Tensor& x);
  static Tensor hourglass(const Stack& s, int level, const Tensor& x);

  ParameterTable params_;
  ConvNet net_;
  const ConvLayer* stem_ = nullptr;
  std::array<Block, 3> entry_;
  std::vector<Stack> stacks_;
};

WeightNames fan_weight_names();

// x and y in pixels from the top left corner, in the order of iBUG's 68: the jaw 0..16, brows
// 17..26, nose 27..35, eyes 36..47, mouth 48..67.
using Landmarks = std::array<std::array<float, 2>, 68>;

constexpr std::int64_t heatmap_side = 64;
constexpr std::int64_t heatmap_points = 98;
using Points98 = std::array<std::array<double, 2>, heatmap_points>;

// Where 98 heatmaps [98,64,64] of a face crop of that size have their greatest values, in pixels of
// the crop: the centre of the first greatest, a quarter towards the greater neighbour in each
// direction. Neighbours are the original's: along rows those of the flattened map, the first value
// having the last on its left; along columns the whole call takes the map's last value for what is
// below, or its first for what is above, as soon as one of the 98 has no row there (index 64 counts
// as in the first row). The last value of a map, at which the original fails, has itself on its
// right. Exit::data for a value that is not finite.
Points98 decode_heatmaps(std::span<const float> maps, std::int64_t height, std::int64_t width);
// The 68 of WFLW's 98, some of them means of two.
Landmarks to_68(const Points98& points);

class LandmarkNet {
 public:
  // Allocates and reads the weights. Exit::data if they are of another network, or of another
  // sadtalker.fan_num_modules.
  LandmarkNet(const Deck& deck, const ModelSource& source);

  static constexpr std::int64_t side = 256;

  // Heatmaps [98,64,64] of a picture of 256 x 256. In the current arena.
  std::vector<float> heatmaps(const ImageFile& picture);
  // The landmarks of a picture of any size that shows the face alone.
  Landmarks landmarks(const ImageFile& face);

  MemoryNeed plan(std::size_t capacity = 0);
  double flops();  // two a multiply-add

 private:
  Tensor run(const Tensor& picture) const;

  DType dtype_;
  Fan net_;
};

// A picture's greatest face and its landmarks.
struct FoundFace {
  Face face;
  Landmarks landmarks = {};  // in the picture
  std::int64_t faces = 0;    // in the picture
};
// Detects, cuts the box of the greatest score out of the picture (face_pixels()) and finds its
// landmarks. `name` is for messages. Exit::data if there is no face, or its box is empty.
FoundFace find_face(FaceDetector& detector, LandmarkNet& net, const ImageFile& picture,
                    ChannelOrder order, const std::string& name);

}  // namespace weft
