#include "models/gfpgan/parse_net.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr float parse_slope = 0.2f;
constexpr int steps = 4, depth = 10;

// 3x3 over a frame that has its border already.
ops::Conv bordered(int stride) { return {1, 3, 3, 1, stride, 0, 0, 0, 0, 0, false}; }

Tensor with_border(const Tensor& x, int up = 1) {
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), up * x.dim(2) + 2, up * x.dim(3) + 2, x.dim(4)},
                           x.dtype());
  ops::reflect_border(x, up, y);
  return y;
}

}  // namespace

WeightNames parse_net_names() {
  WeightNames names;
  names.spare = [](const std::string& name) {
    return counts_batches(name) || name.starts_with("out_img_conv.");
  };
  return names;
}

ParseNet::ParseNet(std::int64_t channels)
    : params_(std::make_unique<ParameterTable>()), net_(std::make_unique<FoldedNet>(*params_, "")) {
  const auto at = [&](int level) { return std::min(channels << level, 4 * channels); };
  stem_ = net_->add("encoder.0.conv2d", "", 3, channels, bordered(1), true);
  for (int i = 0; i < steps; ++i)
    encoder_.push_back(add_block(fmt::format("encoder.{}", i + 1), at(i), at(i + 1), 2, 1));
  for (int i = 0; i < depth; ++i)
    body_.push_back(add_block(fmt::format("body.{}", i), at(steps), at(steps), 1, 1));
  for (int i = 0; i < steps; ++i)
    decoder_.push_back(
        add_block(fmt::format("decoder.{}", i), at(steps - i), at(steps - i - 1), 1, 2));
  head_ = net_->add("out_mask_conv.conv2d", "", channels, classes, bordered(1), true);
}

ParseNet::Block ParseNet::add_block(const std::string& name, std::int64_t in, std::int64_t out,
                                    int down, int up) {
  Block b;
  b.up = up;
  if (down > 1 || up > 1 || in != out)
    b.shortcut = net_->add(name + ".shortcut_func.conv2d", "", in, out, bordered(down), true);
  b.first = net_->add(name + ".conv1.conv2d", name + ".conv1.norm.norm", in, out, bordered(1));
  b.second = net_->add(name + ".conv2.conv2d", name + ".conv2.norm.norm", out, out, bordered(down));
  return b;
}

Tensor ParseNet::run(const Block& block, const Tensor& x) const {
  Tensor seen = with_border(x, block.up);
  const Tensor shortcut = block.shortcut ? convolve(*block.shortcut, seen) : x;
  Tensor y = convolve(*block.first, seen, parse_slope);
  seen.release();
  y = with_border(y);
  return convolve(*block.second, y, 1, shortcut);
}

Tensor ParseNet::logits(const Tensor& image) const {
  WEFT_ASSERT(image.dim(0) == 1 && image.dim(2) % multiple == 0 && image.dim(3) % multiple == 0 &&
              image.dim(2) >= 32 && image.dim(3) >= 32);
  Tensor x = convolve(*stem_, with_border(image));
  for (const Block& b : encoder_) x = run(b, x);
  Tensor y = x;
  for (const Block& b : body_) y = run(b, y);
  ops::add_inplace(x, y);
  x = std::exchange(y, {});
  for (const Block& b : decoder_) x = run(b, x);
  return convolve(*head_, with_border(x));
}

Tensor ParseNet::parse(const Tensor& image) const {
  const Tensor scores[] = {logits(image)};
  Tensor found = Tensor::empty({image.dim(2), image.dim(3)}, DType::u8),
         counts = Tensor::empty({3, classes}, DType::i64), none;
  ops::predict_classes(found, scores, none, counts, none);
  return found;
}

double ParseNet::multiply_adds(std::int64_t height, std::int64_t width) const {
  const auto arena = Arena::planning();
  const ArenaScope scope(*arena);
  const MultiplyAddCount count;
  logits(Tensor::empty({1, 1, height, width, 3}, stem_->weight.dtype()));
  return count.total();
}

}  // namespace weft
