// The network that hears: a window of the mel spectrogram to 512 numbers. The expressions' and the
// head's motion have one each (docs/models/sadtalker.md, Speech).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/sadtalker/speech/dense.h"
#include "models/sadtalker/speech/mel.h"

namespace weft {

// Frames that the networks take at once. Always so many, so that a frame's place in a product, and
// with it every bit of its result, depends on its number alone.
inline constexpr std::int64_t speech_block = 32;
inline constexpr std::int64_t speech_embedding = 512;

// A 3x3 convolution, padded by 1, whose stride over rows is not that over columns. Rows are the
// frames of a volume of one column: the weights are the same memory.
class RowStrideConv {
 public:
  // `conv` must be a folded one of ops::Conv::same(3).
  RowStrideConv(const FoldedConv& conv, int row_stride, int column_stride);
  // y [N,1,h,w,out] = leaky(conv(x)) of x [N,1,H,W,in]; H - 1 must not be a multiple of the row
  // stride, for then the padding behind the last row would count.
  Tensor operator()(const Tensor& x, float slope) const;

 private:
  FoldedConv conv_;
};

class AudioEncoder {
 public:
  // Registers the layers NAME.0 to NAME.12.
  AudioEncoder(FoldedNet& net, const std::string& name);

  void pack() const { last_.pack(); }  // once the net is folded
  // [N,1,1,1,512] of windows [N,1,80,16,1].
  Tensor operator()(const Tensor& windows) const;

 private:
  struct Block {
    const FoldedConv* conv;
    bool residual;
    int row_stride, column_stride;
  };
  std::vector<Block> blocks_;
  Dense last_;
};

// Values [n, per frame], n <= speech_block, followed by zeros for the rest of a block: [block,
// shape...] on the device, in the current arena.
Tensor speech_block_of(std::span<const float> values, const Shape& of_block);

}  // namespace weft
