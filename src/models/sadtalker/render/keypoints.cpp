#include "models/sadtalker/render/keypoints.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/sadtalker/render/volume.h"
#include "ops/resize.h"

namespace weft {

KeypointNet::KeypointNet(const SadtalkerDeck& d)
    : every_(std::lround(1 / d.kp_scale_factor)),
      depth_(d.kp_reshape_depth),
      num_kp_(d.num_kp),
      temperature_(static_cast<float>(d.kp_temperature)),
      net_(table_, "kp_extractor.") {
  WEFT_CHECK(std::abs(1 / d.kp_scale_factor - static_cast<double>(every_)) < 1e-6 && every_ <= 16,
             Exit::usage, "the released networks have 0.25",
             "sadtalker.kp_scale_factor = {} is not one over a whole number up to 16",
             d.kp_scale_factor);
  const auto channels = [&](std::int64_t level) {
    return std::min(d.kp_max_features, d.kp_block_expansion << level);
  };
  const std::int64_t deepest = channels(d.kp_num_blocks);
  WEFT_CHECK(d.kp_reshape_channel == d.kp_reshape_depth * deepest, Exit::usage,
             "the released networks have 16384, 16 and 1024",
             "sadtalker.kp_reshape_channel = {} is not kp_reshape_depth = {} times the {} channels "
             "of the deepest level",
             d.kp_reshape_channel, d.kp_reshape_depth, deepest);
  // A Gaussian of deviation (every - 1) / 2, as wide as four deviations each way.
  if (every_ > 1) {
    const auto reach = static_cast<int>(std::lround(2.0 * static_cast<double>(every_ - 1)));
    smooth_ = net_.add("down", "", 3, 3,
                       ops::Conv::strided(2 * reach + 1, static_cast<int>(every_), 1, 3));
  }
  net_.prefix += "predictor.";
  for (std::int64_t i = 0; i < d.kp_num_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.down{}.", i);
    down_.push_back(net_.add(name + "conv", name + "norm", i == 0 ? 3 : channels(i),
                             channels(i + 1), ops::Conv::same(3), true));
  }
  to_depth_ = net_.add("conv", "", deepest, d.kp_reshape_channel, ops::Conv::same(1), true);
  net_.axes = 3;
  for (std::int64_t i = d.kp_num_blocks; i-- > 0;) {
    const std::string name = fmt::format("up_blocks.up{}.", d.kp_num_blocks - 1 - i);
    up_.push_back(net_.add(name + "conv", name + "norm", channels(i + 1), channels(i),
                           ops::Conv::volume_up(3), true));
  }
  net_.prefix = "kp_extractor.";
  logits_ = net_.add("kp", "", channels(0), num_kp_, ops::Conv::volume(3), true);
}

std::int64_t KeypointNet::stride() const { return every_ << down_.size(); }

Tensor KeypointNet::forward(const Tensor& image) const {
  WEFT_ASSERT(image.dim(2) % stride() == 0 && image.dim(3) % stride() == 0);
  Tensor x = smooth_ != nullptr ? convolve(*smooth_, image) : image;
  for (const FoldedConv* conv : down_) x = halve(convolve(*conv, x, 0));
  x = channels_to_depth(convolve(*to_depth_, x), depth_);
  for (const FoldedConv* conv : up_) x = convolve(*conv, x, 0);
  const Tensor logits = convolve(*logits_, x);
  Tensor keypoints = Tensor::empty({image.dim(0), num_kp_, 3}, DType::f32);
  ops::volume_expectation(logits, temperature_, keypoints);
  return keypoints;
}

}  // namespace weft
