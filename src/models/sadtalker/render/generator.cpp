#include "models/sadtalker/render/generator.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "models/sadtalker/render/volume.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {

FaceGenerator::FaceGenerator(const SadtalkerDeck& d)
    : depth_(d.gen_reshape_depth), net_(table_, "generator.") {
  WEFT_CHECK(d.gen_max_features == d.gen_reshape_channel * d.gen_reshape_depth, Exit::usage,
             "the released networks have 512, 32 and 16",
             "sadtalker.gen_max_features = {} is not gen_reshape_channel = {} times "
             "gen_reshape_depth = {}",
             d.gen_max_features, d.gen_reshape_channel, d.gen_reshape_depth);
  // The decoder makes four times the size of its features, which have 256 channels.
  WEFT_CHECK(d.gen_num_down_blocks == 2 && d.gen_block_expansion << 2 == SpadeDecoder::in,
             Exit::usage, "leave them out: 64 and 2 are the released networks'",
             "sadtalker.gen_block_expansion = {} and gen_num_down_blocks = {} do not fit the "
             "decoder",
             d.gen_block_expansion, d.gen_num_down_blocks);
  const auto channels = [&](std::int64_t level) {
    return std::min(d.gen_max_features, d.gen_block_expansion << level);
  };
  const ops::Conv same = ops::Conv::same(3), volume = ops::Conv::volume(3);
  first_ = net_.add("first.conv", "first.norm", 3, channels(0), same, true);
  for (std::int64_t i = 0; i < d.gen_num_down_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.{}.", i);
    down_.push_back(
        net_.add(name + "conv", name + "norm", channels(i), channels(i + 1), same, true));
  }
  second_ = net_.add("second", "", channels(d.gen_num_down_blocks), d.gen_max_features,
                     ops::Conv::same(1), true);
  net_.axes = 3;
  for (std::int64_t i = 0; i < d.gen_num_resblocks; ++i) {
    const std::string name = fmt::format("resblocks_3d.3dr{}.", i);
    const std::int64_t C = d.gen_reshape_channel;
    Residual r;
    r.norm = net_.add_norm(name + "norm1", C);
    r.conv_1 = net_.add(name + "conv1", name + "norm2", C, C, volume, true);
    r.conv_2 = net_.add(name + "conv2", "", C, C, volume, true);
    residuals_.push_back(r);
  }
  net_.axes = 2;
  motion_.emplace(net_, d);
  // The warped volume's slices are channels to this one.
  ops::Conv through = same;
  through.kt = static_cast<int>(depth_);
  third_ =
      net_.add("third.conv", "third.norm", d.gen_reshape_channel, SpadeDecoder::in, through, true);
  fourth_ = net_.add("fourth", "", SpadeDecoder::in, SpadeDecoder::in, ops::Conv::same(1), true);
  decoder_.emplace(net_);
}

void FaceGenerator::fold() {
  net_.fold();
  decoder_->fold();
}

FaceGenerator::Features FaceGenerator::encode(const Tensor& image) const {
  WEFT_ASSERT(image.dim(0) == 1 && image.dim(2) % stride() == 0 && image.dim(3) % stride() == 0);
  Tensor x = convolve(*first_, image, 0);
  for (const FoldedConv* conv : down_) x = halve(convolve(*conv, x, 0));
  x = channels_to_depth(convolve(*second_, x), depth_);
  for (const Residual& r : residuals_) {
    Tensor y = Tensor::empty(x.shape(), x.dtype());
    normalise(*r.norm, x, true, y);
    y = convolve(*r.conv_1, y, 0);
    x = convolve(*r.conv_2, y, 1, x);
  }
  return {x, motion_->compress(x)};
}

FaceGenerator::Frames FaceGenerator::render(const Features& features, const Tensor& kp_source,
                                            const Tensor& kp_driving, bool want_mask) const {
  Frames f;
  f.motion = motion_->forward(features.compressed, kp_source, kp_driving, want_mask);
  const Shape& s = features.volume.shape();
  const std::int64_t N = kp_driving.dim(0);
  Tensor x = Tensor::empty({N, s[1], s[2], s[3], s[4]}, features.volume.dtype());
  ops::volume_sample(features.volume, f.motion.deformation, x);
  x = convolve(*fourth_, convolve(*third_, x, 0.01f));
  ops::scale_groups_forward(x, f.motion.occlusion, x);
  // The sigmoid is steeper than bf16 is fine near 0 and 1.
  const Tensor logits = decoder_->forward(std::exchange(x, {}));
  f.picture = Tensor::empty({N, logits.dim(2), logits.dim(3), 3}, DType::f32);
  if (logits.dtype() == DType::f32) {
    ops::sigmoid_forward(logits.view(f.picture.shape()), f.picture);
    return f;
  }
  ops::convert(logits.view(f.picture.shape()), f.picture);
  ops::sigmoid_forward(f.picture, f.picture);
  return f;
}

}  // namespace weft
