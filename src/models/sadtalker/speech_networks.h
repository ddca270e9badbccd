// The networks that hear (docs/models/sadtalker.md, Speech): from windows of the mel spectrogram to
// what a face expresses (ExpNet) and how its head moves (PoseVae) while it speaks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/resnet/conv_net.h"
#include "models/sadtalker/mel.h"

namespace weft {

// A folded 1x1 convolution or linear layer of so few rows that a library would divide the sums
// among its threads. Its results on the CPU do not depend on the number of threads (ops/matmul.h,
// packed weights). Its weights serve nothing else.
class Dense {
 public:
  Dense() = default;
  explicit Dense(const ConvLayer* conv) : conv_(conv) {}

  void pack() const;  // once, after ConvNet::fold()
  // y [..., out] = leaky(x w^T + bias) of x [..., in] (convolve()).
  Tensor operator()(const Tensor& x, float slope = 1) const;

 private:
  const ConvLayer* conv_ = nullptr;
};

// Frames that the networks take at once. Always so many, so that a frame's place in a product, and
// with it every bit of its result, depends on its number alone.
inline constexpr std::int64_t speech_block = 32;
inline constexpr std::int64_t speech_embedding = 512;

// A 3x3 convolution, padded by 1, whose stride over rows is not that over columns. Rows are the
// frames of a volume of one column: the weights are the same memory.
class RowStrideConv {
 public:
  // `conv` must be a folded one of ops::Conv::same(3).
  RowStrideConv(const ConvLayer& conv, int row_stride, int column_stride);
  // y [N,1,h,w,out] = leaky(conv(x)) of x [N,1,H,W,in]; H - 1 must not be a multiple of the row
  // stride, for then the padding behind the last row would count.
  Tensor operator()(const Tensor& x, float slope) const;

 private:
  ConvLayer conv_;
};

// A window of the mel spectrogram to 512 numbers. The expressions' and the head's motion have one
// each.
class AudioEncoder {
 public:
  // Registers the layers NAME.0 to NAME.12.
  AudioEncoder(ConvNet& net, const std::string& name);

  void pack() const { last_.pack(); }  // once the net is folded
  // [N,1,1,1,512] of windows [N,1,80,16,1].
  Tensor operator()(const Tensor& windows) const;

 private:
  struct Block {
    const ConvLayer* conv;
    bool residual;
    int row_stride, column_stride;
  };
  std::vector<Block> blocks_;
  Dense last_;
};

// Values [n, per frame], n <= speech_block, followed by zeros for the rest of a block: [block,
// shape...] on the device, in the current arena.
Tensor speech_block_of(std::span<const float> values, const Shape& of_block);

// What a face expresses while it speaks: SadTalker's ExpNet.
class ExpNet {
 public:
  static constexpr const char* prefix = "audio2exp.";

  explicit ExpNet(ParameterTable& table);
  void fold();  // once the table is loaded

  // Expressions [block,64] of windows [block,1,80,16,1] and of what the face does otherwise, `face`
  // [block,65]: the reference's expression and how far the eyes are closed.
  Tensor run(const Tensor& windows, const Tensor& face) const;

  // The same of n <= speech_block frames on the host: windows [n,80,16], references [n,70],
  // closed [n] -> [n,64].
  std::vector<float> expressions(std::span<const float> windows, std::span<const float> references,
                                 std::span<const float> closed) const;

 private:
  ConvNet net_;
  AudioEncoder encoder_;
  Dense mapping_;
};

// How a head moves while it speaks: the decoder of SadTalker's PoseVAE.

inline constexpr std::int64_t pose_styles = 46, pose_values = 6, pose_latent = 64;
inline constexpr std::int64_t pose_call = 32;  // frames that the decoder moves at once

// Calls of the decoder for T frames: the first frame does not move.
constexpr std::int64_t pose_calls(std::int64_t frames) {
  return (frames - 1 + pose_call - 1) / pose_call;
}
// z [pose_calls(frames), 64], standard normal, drawn by the seed.
std::vector<float> draw_pose_latents(std::int64_t frames, std::uint64_t seed);

class PoseVae {
 public:
  static constexpr const char* prefix = "audio2pose.";
  // What files have under the prefix for training alone.
  static std::vector<std::string> unused();

  explicit PoseVae(ParameterTable& table);
  void fold();  // once the table is loaded

  // What the decoder hears, [block,6] of windows [block,1,80,16,1].
  Tensor hear(const Tensor& windows) const;
  // Motions [32,6] of a call's input [1,1,1,1,6+64+192]: the reference's pose, z, and what was
  // heard in each frame.
  static constexpr std::int64_t input_values = pose_values + pose_latent + pose_call * pose_values;
  Tensor decode(const Tensor& input) const;

  // hear() of n <= speech_block frames on the host: windows [n,80,16] -> [n,6].
  std::vector<float> heard(std::span<const float> windows) const;
  // Poses [T,6]: reference [6] plus a motion, 0 in the first frame. `heard` [T,6], of which the
  // first row is not used; z [pose_calls(T),64]; style < pose_styles. Frames go 32 a call; those
  // left over come last, with the frames before them, or copies of the first where there are fewer.
  std::vector<float> poses(std::span<const float> heard, std::span<const float> reference,
                           std::span<const float> z, std::int64_t style) const;

 private:
  // ReLU(norm) before each convolution; `stride` over rows.
  struct Residual {
    const NormLayer* norm;
    const ConvLayer *first, *second, *skip;
    int stride;
  };
  // A transposed 2x1 convolution of stride (2,1): a product for each of the two rows.
  struct RowsUp {
    Parameter *weight, *bias;
    std::int64_t channels;
    ConvLayer row[2];
  };
  Residual add_residual(const std::string& name, std::int64_t in, std::int64_t out, int stride);
  RowsUp add_rows_up(ParameterTable& table, const std::string& name, std::int64_t channels);
  Tensor residual(const Residual& r, const Tensor& x) const;
  // [N,1,2H,W,C] with the channels of `beside` [N,1,2H,W,c] behind.
  Tensor up(const RowsUp& u, const Tensor& x, const Tensor& beside) const;
  Tensor resunet(const Tensor& x) const;

  ConvNet net_;
  AudioEncoder encoder_;
  Parameter* styles_;
  Dense audio_, mlp_[2], pose_, output_;
  const ConvLayer *input_[2], *input_skip_;
  Residual down_[2], bridge_, joined_[3];
  RowsUp up_[3];
  std::vector<float> style_values_;  // [46,64]
};

}  // namespace weft
