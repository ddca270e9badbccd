#include "models/sadtalker/speech/audio_encoder.h"

#include <algorithm>

#include "core/error.h"

namespace weft {

RowStrideConv::RowStrideConv(const FoldedConv& conv, int row_stride, int column_stride)
    : conv_(conv) {
  WEFT_ASSERT(conv.geometry.kh == 3 && conv.geometry.kw == 3 && conv.weight.defined());
  ops::Conv& g = conv_.geometry;
  g = ops::Conv{3, 3, 1, row_stride, column_stride, 1, 1, 0, 1, 0};
  conv_.weight = conv.weight.view({conv.out, conv.in, 3, 3, 1});
}

Tensor RowStrideConv::operator()(const Tensor& x, float slope) const {
  const std::int64_t N = x.dim(0), H = x.dim(2), W = x.dim(3);
  WEFT_ASSERT(x.dim(1) == 1 && (H - 1) % conv_.geometry.stride_t != 0);
  const Tensor y = convolve(conv_, x.view({N, H, W, 1, conv_.in}), slope);
  return y.view({N, 1, y.dim(1), y.dim(2), conv_.out});
}

AudioEncoder::AudioEncoder(FoldedNet& net, const std::string& name) {
  struct Layer {
    std::int64_t in, out;
    int row_stride, column_stride, padding;
    bool residual;
  };
  constexpr Layer layers[] = {
      {1, 32, 1, 1, 1, false},    {32, 32, 1, 1, 1, true},   {32, 32, 1, 1, 1, true},
      {32, 64, 3, 1, 1, false},   {64, 64, 1, 1, 1, true},   {64, 64, 1, 1, 1, true},
      {64, 128, 3, 3, 1, false},  {128, 128, 1, 1, 1, true}, {128, 128, 1, 1, 1, true},
      {128, 256, 3, 2, 1, false}, {256, 256, 1, 1, 1, true}, {256, 512, 1, 1, 0, false}};
  const auto add = [&](std::size_t i, std::int64_t in, std::int64_t out, const ops::Conv& g) {
    const std::string at = fmt::format("{}.{}.conv_block.", name, i);
    return net.add(at + "0", at + "1", in, out, g, true);
  };
  for (const Layer& l : layers) {
    const int stride = l.row_stride == l.column_stride ? l.row_stride : 1;
    const ops::Conv geometry{1, 3, 3, 1, stride, 0, l.padding, l.padding, l.padding, l.padding};
    blocks_.push_back(
        {add(blocks_.size(), l.in, l.out, geometry), l.residual, l.row_stride, l.column_stride});
  }
  last_ = Dense(add(blocks_.size(), speech_embedding, speech_embedding, {}));
}

Tensor AudioEncoder::operator()(const Tensor& windows) const {
  Tensor x = windows;
  for (const Block& b : blocks_) {
    if (b.row_stride != b.column_stride)
      x = RowStrideConv(*b.conv, b.row_stride, b.column_stride)(x, 0);
    else
      x = convolve(*b.conv, x, 0, b.residual ? x : Tensor());
  }
  return last_(x, 0);
}

Tensor speech_block_of(std::span<const float> values, const Shape& of_block) {
  const std::int64_t all = of_block.numel();
  WEFT_ASSERT(std::ssize(values) <= all && all % of_block[0] == 0);
  std::vector<float> block(static_cast<std::size_t>(all));
  std::ranges::copy(values, block.begin());
  return Tensor::from_host(std::span<const float>(block), of_block);
}

}  // namespace weft
