#include "models/sadtalker/render/dense_motion.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "models/sadtalker/render/volume.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr float least_mask = 1e-3f;  // smaller ones move nothing

// A k x k kernel over all `depth` slices of a volume at once, whose result is a plane.
ops::Conv through(int depth, int k) {
  ops::Conv c = ops::Conv::same(k);
  c.kt = depth;
  return c;
}

}  // namespace

DenseMotion::DenseMotion(FoldedNet& net, const SadtalkerDeck& d)
    : candidates_(d.num_kp + 1), channels_(candidates_ * (1 + d.motion_compress)) {
  const auto channels = [&](std::int64_t level) {
    return level == 0 ? channels_
                      : std::min(d.motion_max_features, d.motion_block_expansion << level);
  };
  const std::string before = net.prefix;
  const ops::Conv same = ops::Conv::volume(3), up = ops::Conv::volume_up(3);
  net.axes = 3;
  net.prefix = before + "dense_motion_network.hourglass.encoder.";
  for (std::int64_t i = 0; i < d.motion_num_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.{}.", i);
    down_.push_back(
        net.add(name + "conv", name + "norm", channels(i), channels(i + 1), same, true));
  }
  net.prefix = before + "dense_motion_network.hourglass.decoder.";
  std::int64_t last = channels_;
  for (std::int64_t i = d.motion_num_blocks; i-- > 0;) {
    const std::string name = fmt::format("up_blocks.{}.", d.motion_num_blocks - 1 - i);
    const std::int64_t in = (i == d.motion_num_blocks - 1 ? 1 : 2) * channels(i + 1);
    last = std::min(d.motion_max_features, d.motion_block_expansion << i);
    up_.push_back(net.add(name + "conv", name + "norm", in, last, up, true));
  }
  last += channels_;
  last_ = net.add("conv", "norm", last, last, same, true);
  net.prefix = before + "dense_motion_network.";
  mask_ = net.add("mask", "", last, candidates_, ops::Conv::volume(7), true);
  compress_ = net.add("compress", "norm", d.gen_reshape_channel, d.motion_compress,
                      ops::Conv::volume(1), true);
  net.axes = 2;
  occlusion_ =
      net.add("occlusion", "", last, 1, through(static_cast<int>(d.gen_reshape_depth), 7), true);
  net.prefix = before;
}

Tensor DenseMotion::hourglass(Tensor x) const {
  std::vector<Tensor> levels = {std::move(x)};
  for (const FoldedConv* conv : down_) levels.push_back(halve(convolve(*conv, levels.back(), 0)));
  Tensor y = std::move(levels.back());
  for (const FoldedConv* conv : up_) {
    levels.pop_back();
    y = convolve(*conv, y, 0);
    y = join_channels(y, levels.back());
  }
  levels.clear();
  return convolve(*last_, y, 0);
}

DenseMotion::Motion DenseMotion::forward(const Tensor& compressed, const Tensor& kp_source,
                                         const Tensor& kp_driving, bool want_mask) const {
  const std::int64_t N = kp_driving.dim(0), D = compressed.dim(1), h = compressed.dim(2),
                     w = compressed.dim(3);
  Tensor seen = Tensor::empty({N, D, h, w, channels_}, compressed.dtype());
  ops::motion_candidates(compressed, kp_source, kp_driving, seen);
  const Tensor x = hourglass(std::exchange(seen, {}));
  Motion m;
  m.occlusion = convolve(*occlusion_, x);
  ops::sigmoid_forward(m.occlusion, m.occlusion);
  const Tensor logits = convolve(*mask_, x);
  if (want_mask) m.mask = Tensor::empty({N, D, h, w, candidates_}, DType::f32);
  m.deformation = Tensor::empty({N, D, h, w, 3}, DType::f32);
  ops::motion_field(logits, kp_source, kp_driving, least_mask, m.mask, m.deformation);
  return m;
}

}  // namespace weft
