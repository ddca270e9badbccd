#include "models/resnet/folded_resnet.h"

#include "core/error.h"
#include "ops/resize.h"

namespace weft {

FoldedResNet50::FoldedResNet50(FoldedNet& net)
    : stem_(net.add("conv1", "bn1", 3, 64, ops::Conv::strided(7, 2))) {
  constexpr std::array<int, 4> blocks = {3, 4, 6, 3};
  std::int64_t in = 64;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const std::int64_t planes = std::int64_t{64} << l, out = 4 * planes;
    for (int b = 0; b < blocks[l]; ++b) {
      const std::string name = fmt::format("layer{}.{}.", l + 1, b);
      const int stride = b == 0 && l > 0 ? 2 : 1;
      Block& block = layers_[l].emplace_back();
      block.convs = {
          net.add(name + "conv1", name + "bn1", in, planes, ops::Conv::same(1)),
          net.add(name + "conv2", name + "bn2", planes, planes, ops::Conv::strided(3, stride)),
          net.add(name + "conv3", name + "bn3", planes, out, ops::Conv::same(1))};
      if (b == 0)
        block.shortcut = net.add(name + "downsample.0", name + "downsample.1", in, out,
                                 ops::Conv::strided(1, stride));
      in = out;
    }
  }
}

std::array<Tensor, 4> FoldedResNet50::forward(const Tensor& image, int first) const {
  Tensor x = convolve(*stem_, image, 0);
  {
    const ops::PoolWindow window{3, 2, 1};
    Tensor y = Tensor::empty(
        {x.dim(0), x.dim(1), window.count(x.dim(2)), window.count(x.dim(3)), x.dim(4)}, x.dtype());
    ops::max_pool_window_forward(x, window, y);
    x = y;
  }
  std::array<Tensor, 4> maps;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    for (const Block& b : layers_[l]) {
      // The block's first map goes before its last is made.
      Tensor y = convolve(*b.convs[1], convolve(*b.convs[0], x, 0), 0);
      if (b.shortcut != nullptr) x = convolve(*b.shortcut, x);
      x = convolve(*b.convs[2], y, 0, x);
    }
    if (static_cast<int>(l) >= first) maps[l] = x;
  }
  return maps;
}

}  // namespace weft
